"""`forerun info`."""

from __future__ import annotations

import re
import textwrap
from typing import Annotated

import typer
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.catalog import Card, find
from forerun.cli.shared.console import stdout
from forerun.errors import SettingError


@options.command
def info(
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None,
    target: Annotated[str | None, options.option("MODEL")] = None,
) -> None:
    """Show the full card of a part: what it does, when it helps, every setting.

    Args:
        name: a controller, rule or drafter.
        target: instead, what would be loaded for this model.
    """
    console = stdout()
    if (name is None) == (target is None):
        raise SettingError("give the name of a part, or --target MODEL")
    if target is not None:
        from forerun.runtime.preview import preview
        from forerun.zoo import locate

        for fact in preview(locate(target)):
            console.print(fact, soft_wrap=True, highlight=False)
        return
    assert name is not None
    cards = find(name)
    if len(cards) > 1:
        kinds = " and a ".join(card.kind.removesuffix("s") for card in cards)
        console.print(Text(f"{cards[0].name} is a {kinds}; both follow.\n", "dim"))
    for i, card in enumerate(cards):
        if i:
            console.print()
        for line in card_lines(card, console.width if console.is_terminal else None):
            console.print(line, soft_wrap=True)


def card_lines(card: Card, width: int | None = None) -> list[Text]:
    """The card as lines of text, wrapped between words if there is a width."""
    spec = f"{card.name}({card.signature})" if card.signature else card.name
    lines = [Text.assemble((card.name, "bold"), f"  ({card.kind.removesuffix('s')})")]
    lines += [Text(card.summary), Text()]
    lines += [*(Text(line, "cyan") for line in _wrap(spec, width, hang=4)), Text()]
    if card.lossless is not None:
        word = "lossless: the output has exactly the target's distribution"
        lines += [Text(word if card.lossless else "lossy: the output may differ"), Text()]
    lines += [Text(line) for block in _blocks(card.doc) for line in _wrap(block, width)]
    if card.bibtex:
        lines += [Text(), Text(f"BibTeX: forerun cite '{card.name}'", "dim")]
    return lines


_SETTING = re.compile(r" +\w+: ")
_APART = re.compile(r"\s*(>>>|\.\.\.|[-*] |\w+:$|$)")
"""Lines that neither continue another nor are continued."""


def _blocks(doc: str) -> list[str]:
    """Paragraphs and settings of a docstring, each with its lines as they stand."""
    blocks: list[list[str]] = []
    for line in doc.splitlines():
        last = blocks[-1] if blocks else None
        new = last is None or _APART.match(line) or _APART.match(last[0]) or _SETTING.match(line)
        if last is None or new:
            blocks.append([line])
        else:
            last.append(line)
    return ["\n".join(block) for block in blocks]


def _wrap(block: str, width: int | None, hang: int = 0) -> list[str]:
    """Lines of a block; one that is too wide anywhere is filled anew."""
    lines = block.split("\n")
    if width is None or max(map(len, lines)) <= width or lines[0].lstrip().startswith(">>>"):
        return lines
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    hang += 4 if _SETTING.match(lines[0]) else 0
    return textwrap.wrap(
        " ".join(line.strip() for line in lines),
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
