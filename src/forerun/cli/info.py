"""`forerun info`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from forerun.cli.catalog import Card, find
from forerun.cli.console import stdout


def info(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A controller, rule or drafter.")],
) -> None:
    """Show the full card of a part: what it does, when it helps, every setting."""
    console = stdout()
    for i, card in enumerate(find(name)):
        if i:
            console.print()
        for line in card_lines(card):
            console.print(line, soft_wrap=True)


def card_lines(card: Card) -> list[Text]:
    """The card as lines of text."""
    spec = f"{card.name}({card.signature})" if card.signature else card.name
    lines = [Text.assemble((card.name, "bold"), f"  ({card.kind.removesuffix('s')})")]
    lines += [Text(card.summary), Text(), Text(spec, "cyan"), Text()]
    if card.lossless is not None:
        word = "lossless: the output has exactly the target's distribution"
        lines += [Text(word if card.lossless else "lossy: the output may differ"), Text()]
    lines += [Text(line) for line in card.doc.splitlines()]
    if card.bibtex:
        lines += [Text(), Text(f"BibTeX: forerun cite '{card.name}'", "dim")]
    return lines
