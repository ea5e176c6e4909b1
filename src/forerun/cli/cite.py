"""`forerun cite`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forerun.citations import BIBTEX
from forerun.cli.shared import options
from forerun.cli.shared.catalog import find, names_in


@options.command
def cite(names: Annotated[list[str], typer.Argument(metavar="NAME...")]) -> None:
    """Print BibTeX of the papers behind parts.

    Args:
        names: parts or specs, like bounded(gammatune+,high=8).
    """
    entries: dict[str, None] = {}
    for text in names:
        if text in BIBTEX:
            entries[BIBTEX[text].strip()] = None
            continue
        for name in names_in(text):
            entries_of = [card.bibtex.strip() for card in find(name)]
            if not any(entries_of):
                print(f"{name}: no paper to cite", file=sys.stderr)
            for bibtex in filter(None, entries_of):
                entries |= dict.fromkeys(_split(bibtex))
    if entries:
        typer.echo("\n\n".join(entries))


def _split(bibtex: str) -> list[str]:
    """Single entries, so that a shared one is printed once."""
    return [f"@{entry.strip()}" for entry in f"\n{bibtex}".split("\n@") if entry.strip()]
