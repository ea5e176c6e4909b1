"""`forerun demo`: three prompts, one load."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from forerun.cli.shared.console import note, stderr, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.cli.shared.models import Models

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
SmolLM2, 135 million parameters, writes; what it wrote for other prompts, 62,000 n-grams, and the
text so far say what may come next, and it checks these tokens in one pass. So several come for the
price of one, and the text is exactly what it would have written alone: see below."""

QUESTIONS = (
    "Write a Python function that counts the vowels of a text, with a docstring and two examples.",
    "Translate into French: The children are playing in the garden, and the dog sleeps in the sun.",
    "Explain to a child why the sky is blue.",
)
"""To SmolLM2, from easy to hard to run ahead of."""
SHOWN = ("tours", "arithmetic", "stories")
"""Families of the shipped test prompts, from easy to hard to run ahead of."""


def demo(
    dtype: Annotated[
        str, typer.Option(metavar="T", help="float32 shows exact equality; bfloat16 is as saved.")
    ] = "float32",
    runtime: Annotated[
        str | None, typer.Option(metavar="SPEC", help="torch, openvino or auto.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="D", help="cpu, cuda, ...")] = None,
) -> None:
    """Speculative against plain decoding on three prompts: of smollm2 if it is installed, else of
    the models that ship."""
    from forerun.cli.shared.faces import Growing, play, warm_up
    from forerun.cli.shared.models import Models
    from forerun.prompts import Prompt, Reader
    from forerun.zoo import PENALTY, prompts, smollm2
    from forerun.zoo.promptset import SMOLLM2

    console = stderr()
    if smollm2() is not None:
        _ask(Models(SMOLLM2, runtime=runtime, device=device), console)
        return
    note(console, Text(BEFORE))
    job = Models(runtime=runtime, device=device, dtype=dtype).load()
    for number, family in enumerate(SHOWN, start=1):
        settings = {"repetition_penalty": PENALTY[family]} if family in PENALTY else {}
        # Long answers: a speed-up shows once the prompt has been read.
        chosen = max(prompts(family, limit=40), key=lambda p: len(p.answer))
        quoted = shlex.quote(f"{chosen.prompt.splitlines()[0][:32]}…")
        title = (f"\n{number}/{len(SHOWN)} {family}", "bold")
        options = "".join(f" --{k.replace('_', '-')} {v}" for k, v in settings.items())
        command = f"   forerun generate {quoted}{options} --compare"
        note(console, Text.assemble(title, (command, "dim")))
        if not stdout().is_terminal:
            note(console, chosen.prompt)
        common = {"max_new_tokens": chosen.max_new_tokens, **settings}
        ready = Reader.of(job.model).prepare([Prompt(chosen.prompt)], common)
        warm_up(job, ready[0])
        play(job, Growing(job, ready, explain=number == 1), compare=True)
    note(console, Text(f"\n{AFTER}"))


def _ask(models: Models, console: Console) -> None:
    """The questions, to a model that chats."""
    from forerun.cli.shared.faces import Growing, play, warm_up
    from forerun.prompts import Prompt, Reader

    note(console, Text(OF_SMOLLM2))
    job = models.load()
    for number, question in enumerate(QUESTIONS, start=1):
        command = f"   forerun generate --target smollm2 --compare {shlex.quote(question)}"
        title = (f"\n{number}/{len(QUESTIONS)}", "bold")
        note(console, Text.assemble(title, (command, "dim")))
        ready = Reader.of(job.model, True).prepare([Prompt(question)], {"max_new_tokens": 128})
        warm_up(job, ready[0])
        play(job, Growing(job, ready, explain=number == 1), compare=True)
    note(console, Text("\nTry next:\n  forerun chat"))
