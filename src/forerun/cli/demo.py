"""`forerun demo`: three prompts, one load."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer
from rich.text import Text

from forerun.cli.shared.console import note, stderr, stdout

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
    """Speculative against plain decoding on three shipped prompts, with the models that ship."""
    from forerun.cli.shared.faces import Growing, play, warm_up
    from forerun.cli.shared.models import Models
    from forerun.prompts import Prompt, Reader
    from forerun.zoo import PENALTY, prompts

    console = stderr()
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
