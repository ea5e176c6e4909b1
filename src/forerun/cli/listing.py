"""`forerun list`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.catalog import KINDS, QUESTIONS, cards
from forerun.cli.console import stdout
from forerun.errors import UnknownNameError

WIDE = 400
"""Columns when nobody looks: piped lines are never wrapped."""


def show(
    what: Annotated[
        str | None, typer.Argument(metavar="[controllers|rules|drafters|models]")
    ] = None,
) -> None:
    """List what is available, one line each."""
    known = (*KINDS, "models")
    if what is not None and what not in known:
        raise UnknownNameError.among("list", what, known)
    console = stdout()
    for i, kind in enumerate([what] if what else known):
        if i:
            console.print()
        table = _models() if kind == "models" else _parts(kind)
        if console.is_terminal:
            console.print(table)
        else:
            for line in Console(width=WIDE).render_lines(table, pad=False):
                print("".join(part.text for part in line).rstrip())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def _parts(kind: str) -> Table:
    rules = kind == "rules"
    columns = ["name", "what", *(["lossless"] if rules else []), "settings", "paper"]
    table = _table(f"{kind}: {QUESTIONS[kind]}", *columns)
    table.columns[0].no_wrap = True
    for card in cards(kind):
        lossless = [Text("yes" if card.lossless else "no")] if rules else []
        row = [Text(card.name, "bold"), Text(card.summary), *lossless]
        table.add_row(*row, Text(card.signature or "–", "cyan"), Text(card.paper or "–", "dim"))
    return table


def _models() -> Table:
    from forerun import zoo
    from forerun.runtime.support import PROVEN

    table = _table(
        "models: any decoder-only Hugging Face model with full attention", "name", "what"
    )
    table.add_row(Text("(shipped target)", "bold"), Text(_shipped(zoo.TARGET)))
    table.add_row(Text("(shipped draft)", "bold"), Text(_shipped(zoo.DRAFT)))
    for kind in sorted(PROVEN):
        table.add_row(Text(kind, "bold"), Text("architecture tested row by row"))
    return table


def _shipped(folder: object) -> str:
    import json
    from pathlib import Path

    path = Path(str(folder)) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "not in this copy"
    return (
        f"{config['model_type']}, {config['num_hidden_layers']} layers, hidden "
        f"{config['hidden_size']}, vocabulary {config['vocab_size']}, "
        f"context {config['max_position_embeddings']}; used when no --target is given"
    )
