"""`forerun demo`: three prompts, one load."""

import shlex
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from forerun.cli.shared.console import remark, stdout

BEFORE = """\
A small draft model writes a few tokens ahead; the 12-layer target checks them all in one pass
and keeps those it agrees with. So several tokens come for the price of one, and the text is
exactly what the target alone would have written: each prompt below is also decoded plainly."""

AFTER = """\
Try next:
  forerun generate "The king" --repetition-penalty 1.2 --rounds    every round
  forerun generate "The king" --repetition-penalty 1.2 --controller "fixed(3)" --compare
  forerun generate "The king" --temperature 0.8 --seed 1 --compare  sampled: the same text, too
  forerun generate --target translator "I like apples."            English to German
  forerun list                                      the parts;  forerun info NAME  a card each
  forerun generate PROMPT --target ID_OR_PATH       your own Hugging Face model"""

OF_SMOLLM2 = """\
SmolLM2, 135 million parameters, writes. The text so far, a table of what it wrote for other
prompts, and one small layer on its own states say what may come next, and it checks these tokens
in one pass. So several come for the price of one, and the text is exactly what it would have
written alone: see below."""

QUESTIONS = (
    "Write a Python function that counts the vowels of a text, with a docstring and two examples.",
    "Translate into French: The children are playing in the garden, and the dog sleeps in the sun.",
    "Explain to a child why the sky is blue.",
)
"""To SmolLM2, from easy to hard to run ahead of."""
SHOWN = ("tours", "arithmetic", "stories")  # families, from easy to hard to run ahead of


def demo() -> None:
    """Speculative against plain decoding on three prompts: of smollm2 if it is installed, else of
    the models that ship."""
    from forerun.cli.shared.faces import Growing, play, warm_up
    from forerun.cli.shared.models import Models
    from forerun.prompts import Prompt, Reader
    from forerun.zoo import SMOLLM2, smollm2

    chats = smollm2() is not None
    remark(Text(OF_SMOLLM2 if chats else BEFORE))
    job = Models(SMOLLM2 if chats else None, dtype=None if chats else "float32").load()
    examples = list(_shipped())
    if chats:
        how: dict[str, Any] = {"max_new_tokens": 128}
        examples = [("", q, how, f"--target smollm2 {shlex.quote(q)}") for q in QUESTIONS]
    for number, (title, prompt, settings, command) in enumerate(examples, start=1):
        head = (f"\n{number}/{len(examples)} {title}".rstrip(), "bold")
        remark(Text.assemble(head, (f"   forerun generate {command} --compare", "dim")))
        if not (chats or stdout().is_terminal):
            remark(prompt)
        ready = Reader.of(job.model, chats or None).prepare([Prompt(prompt)], settings)
        warm_up(job, ready[0])
        play(job, Growing(job, ready, explain=number == 1), compare=True)
    remark(Text("\nTry next:\n  forerun chat" if chats else f"\n{AFTER}"))


Example = tuple[str, str, dict[str, Any], str]  # title, prompt, settings, the command's arguments


def _shipped() -> Iterator[Example]:
    """Long answers: a speed-up shows once the prompt has been read."""
    from forerun.zoo import PENALTY, prompts

    for family in SHOWN:
        penalty = {"repetition_penalty": PENALTY[family]} if family in PENALTY else {}
        chosen = max(prompts(family, limit=40), key=lambda p: len(p.answer))
        quoted = shlex.quote(f"{chosen.prompt.splitlines()[0][:32]}…")
        options = "".join(f" --{k.replace('_', '-')} {v}" for k, v in penalty.items())
        settings = {"max_new_tokens": chosen.max_new_tokens, **penalty}
        yield family, chosen.prompt, settings, quoted + options
