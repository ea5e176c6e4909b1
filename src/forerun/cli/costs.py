"""`forerun costs`: what a round costs on this machine, or on one made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.console import note, stderr, stdout
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.lab.costs import Cell, Costs, Spread

MODELS = "Models"
MEASURED = "Measured"
MADE_UP = "Made up"
OUTPUT = "Output"


def costs(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A folder or a Hugging Face id. Default: the shipped one.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="Its draft model. Default: the shipped draft for the shipped target.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    batch: Annotated[
        str,
        typer.Option(
            metavar="B,...", help="Prompts decoded together, e.g. 1,2,4.", rich_help_panel=MEASURED
        ),
    ] = "1",
    context: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Tokens of text so far, e.g. 128,512.",
            rich_help_panel=MEASURED,
        ),
    ] = "128",
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Tokens verified in one pass, 1 among them. Default: some from 1 to 24.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(metavar="N", help="Timings of each. Default: 25.", rich_help_panel=MEASURED),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            help="Make a table up, no model needed: a target pass takes C draft steps.",
            rich_help_panel=MADE_UP,
        ),
    ] = None,
    slope: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="What each further token adds to a target pass, in passes.",
            rich_help_panel=MADE_UP,
        ),
    ] = 0.0,
    fixed: Annotated[
        float,
        typer.Option(
            metavar="X", help="Per round outside both models, in passes.", rich_help_panel=MADE_UP
        ),
    ] = 0.0,
    target_ms: Annotated[
        float,
        typer.Option(
            metavar="MS", help="Milliseconds of a plain target pass.", rich_help_panel=MADE_UP
        ),
    ] = 1000.0,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="COSTS",
            help="Also save the table as JSON, for forerun replay --costs.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            metavar="",
            help="Print one JSON document and nothing else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="cpu, cuda, cuda:1, ... Default: a GPU if any.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="auto, float32, bfloat16 or float16. Default: as the model was saved.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            metavar="",
            help="Run code that comes with a checkpoint.",
            rich_help_panel=MODELS,
        ),
    ] = False,
) -> None:
    """Measure a draft step, target passes by width and the engine's own time.

    With --ratio nothing is measured: the table stands for another machine. Interrupted, it keeps
    the cells that are complete.
    """
    from forerun.lab.costs import REPEATS, WIDTHS, Cell, Costs

    if output is not None:
        check_output(output)
    if ratio is not None:
        if target is not None or draft is not None:
            raise SettingError("--ratio makes the table up; leave --target and --draft out")
        cell = Cell.synthetic(ratio, slope, fixed, target_ms / 1000)
        given = {"c": ratio, "slope": slope, "fixed": fixed, "target_ms": target_ms}
        _finish(Costs((cell,), {"synthetic": given}), output, as_json)
        return
    if slope or fixed or target_ms != 1000:
        raise SettingError("--slope, --fixed and --target-ms describe a table made with --ratio")
    batches, contexts = numbers("--batch", batch), numbers("--context", context)
    wide = WIDTHS if widths is None else numbers("--widths", widths)
    turns = REPEATS if repeats is None else repeats
    require(turns >= 1, "--repeats", turns, "≥ 1")

    from forerun.cli.run import load_job

    _check_draft(target, draft)
    job = load_job(
        target,
        draft,
        "fixed(0)",
        "standard",
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )

    from forerun.lab.measuring import cells, gathered

    found: list[tuple[Cell, Spread]] = []
    try:
        with _progress(len(batches) * len(contexts) * turns) as tell:
            for one in cells(job.model, batches, contexts, wide, turns, tell):
                found.append(one)
    except KeyboardInterrupt:
        if not found:
            note(stderr(), "interrupted before the first cell was complete; nothing is saved")
        else:
            _finish(gathered(job.model, found, turns), output, as_json)
        raise
    _finish(gathered(job.model, found, turns), output, as_json)


def _check_draft(target: str | None, draft: str | None) -> None:
    """Refuse a drafter that is no model before anything is loaded."""
    from forerun.drafters.model import ModelDraft
    from forerun.model import drafter_spec

    by_default = draft is None and target is None
    if not by_default and (draft is None or not isinstance(drafter_spec(draft), ModelDraft)):
        raise SettingError("measuring costs needs a draft model; give --draft ID_OR_PATH")


def check_output(path: str) -> None:
    """Tell now what would otherwise be told after the work."""
    if Path(path).is_dir():
        raise SettingError(f"-o {path} is a folder; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise SettingError(f"-o {path}: there is no folder {Path(path).parent}")


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers ≥ 1 separated by commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    good = all(part.isdecimal() and int(part) >= 1 for part in parts)
    require(good, name, text, "whole numbers from 1 on, separated by commas")
    return list(dict.fromkeys(int(part) for part in parts))


def _finish(table: Costs, output: str | None, as_json: bool) -> None:
    if output is not None:
        table.write(output)
    if as_json:
        print(json.dumps(table.to_json(), ensure_ascii=False, allow_nan=False, indent=2))
        return
    _show(table)
    if output is not None:
        note(stderr(), f"saved to {output}")


def _show(table: Costs) -> None:
    """The table, for people: medians in ms, and how far the middle 80 % reach."""
    console = stdout()
    spread: list[Any] = list(table.spread) or [None] * len(table.cells)
    for i, (cell, said) in enumerate(zip(table.cells, spread, strict=True)):
        where = f"batch {cell.batch}, context {cell.context}: "
        head = where if said is not None else "made up: "
        note(console, Text.assemble("\n" if i else "", head, (f"c = {cell.ratio:.2f}", "bold")))
        shown = Table(box=None, pad_edge=False, show_edge=False)
        shown.add_column("one", header_style="dim")
        shown.add_column("ms", header_style="dim", justify="right")
        if said is not None:
            shown.add_column("10 % to 90 %", header_style="dim", justify="right")
        for row in _rows(cell, said):
            shown.add_row(*row)
        console.print(shown)


def _rows(cell: Cell, said: Spread | None) -> Iterator[list[str]]:
    if said is None:
        yield ["drafted token", _ms(cell.draft)]
    else:
        yield ["draft forward", _ms(cell.draft - said.work), _range(said.draft)]
        yield ["engine, per drafted token", _ms(said.work), ""]
    for i, (width, seconds) in enumerate(cell.verify):
        what = f"target pass of {width} token{'s' if width > 1 else ''}"
        yield [what, _ms(seconds), *([] if said is None else [_range(said.verify[i])])]
    yield ["engine, per round", _ms(cell.fixed), *([] if said is None else [""])]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _range(pair: tuple[float, float]) -> str:
    return f"{_ms(pair[0])} to {_ms(pair[1])}"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, on terminals only."""
    from rich import progress as bars

    console = stderr()
    bar: Any = bars.Progress(
        bars.TextColumn("measuring"),
        bars.BarColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    task = bar.add_task("measuring", total=total)
    with bar:
        yield lambda done: bar.update(task, completed=done)
