"""`forerun list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.cli.shared.catalog import KINDS, QUESTIONS, cards
from forerun.cli.shared.console import stdout
from forerun.errors import UnknownNameError

WIDE = 400
"""Columns where output is piped, so that lines are never wrapped."""

ROOMY = 130
"""Columns from which settings and papers fit beside the rest."""


def show(
    what: Annotated[
        str | None, typer.Argument(metavar="[controllers|rules|drafters|models]")
    ] = None,
) -> None:
    """List what is available, one line each."""
    kinds = (*KINDS, "models")
    if what is not None and what not in kinds:
        raise UnknownNameError.among("list", what, kinds)
    console = stdout()
    brief = console.is_terminal and console.width < ROOMY
    for i, kind in enumerate([what] if what else kinds):
        if i:
            console.print()
        table = _models() if kind == "models" else _parts(kind, brief)
        if console.is_terminal:
            console.print(table)
        else:
            for line in Console(width=WIDE).render_lines(table, pad=False):
                print("".join(part.text for part in line).rstrip())
    if brief and what != "models":
        console.print(Text("\nforerun info NAME shows a part's settings and its paper.", "dim"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def _parts(kind: str, brief: bool) -> Table:
    rules = kind == "rules"
    columns = ["name", *(["output"] if rules else []), "what"]
    columns += [] if brief else ["settings", "paper"]
    table = _table(f"{kind}: {QUESTIONS[kind]}", *columns)
    table.columns[0].no_wrap = True
    for card in cards(kind):
        output = Text("lossless", "green") if card.lossless else Text("lossy", "yellow")
        row = [Text(card.name, "bold"), *([output] if rules else []), Text(card.summary)]
        if not brief:
            row += [Text(card.signature or "–", "cyan"), Text(card.paper or "–", "dim")]
        table.add_row(*row)
    return table


def _models() -> Table:
    from forerun import zoo
    from forerun.runtime.support import PROVEN, PROVEN_ENCODER_DECODER

    table = _table(
        "models: any Hugging Face model with full attention that writes text", "name", "what"
    )
    table.add_row(Text("(shipped target)", "bold"), Text(_shipped(zoo.TARGET)))
    table.add_row(Text("(shipped draft)", "bold"), Text(_shipped(zoo.DRAFT)))
    for name, folder in zoo.NAMES.items():
        table.add_row(Text(name, "bold"), Text(_shipped_with_encoder(name, folder)))
    for kind in sorted(PROVEN):
        table.add_row(Text(kind, "bold"), Text("architecture tested row by row"))
    for kind in sorted(PROVEN_ENCODER_DECODER):
        table.add_row(Text(kind, "bold"), Text("encoder-decoder, likewise"))
    return table


def _config(folder: Path) -> dict[str, Any] | None:
    import json

    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return config


def _shipped_with_encoder(name: str, folder: Path) -> str:
    config = _config(folder)
    if config is None:
        return "not in this copy"
    task = {"translator": "English to German", "digest": "made-up passages to one line"}[name]
    return (
        f"{config['model_type']}, {config['encoder_layers']} + {config['decoder_layers']} layers, "
        f"width {config['d_model']}, vocabulary {config['vocab_size']}; ships, {task}: "
        f"--target {name}"
    )


def _shipped(folder: Path) -> str:
    config = _config(folder)
    if config is None:
        return "not in this copy"
    return (
        f"{config['model_type']}, {config['num_hidden_layers']} layers, hidden "
        f"{config['hidden_size']}, vocabulary {config['vocab_size']}, "
        f"context {config['max_position_embeddings']}; used when no --target is given"
    )
