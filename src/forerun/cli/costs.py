"""`forerun costs`: what a round costs on this machine, or on one made up."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, remark, stdout, table
from forerun.cli.shared.models import Models
from forerun.cli.shared.options import Fields, numbers, option
from forerun.cli.shared.report import claim, report
from forerun.errors import SettingError, require
from forerun.lab.traces.costs import REPEATS, WIDTHS, Cell, CostTable, Spread

MEASURED = "Measured"  # panel of the help text, as the next
SYNTHETIC = "Made up"


@options.command
def costs(
    models: Annotated[Models, Fields(Models, draft=options.DraftModel)],
    batch: Annotated[str, option("B,...", panel=MEASURED)] = "1",
    context: Annotated[str, option("N,...", panel=MEASURED)] = "128",
    widths: Annotated[str | None, option("N,...", panel=MEASURED)] = None,
    repeats: Annotated[int | None, option("N", panel=MEASURED)] = None,
    ratio: Annotated[float | None, option("C", panel=SYNTHETIC)] = None,
    slope: Annotated[float, option("X", panel=SYNTHETIC)] = 0.0,
    fixed: Annotated[float, option("X", panel=SYNTHETIC)] = 0.0,
    target_ms: Annotated[float, option("MS", panel=SYNTHETIC)] = 1000.0,
    output: Annotated[str | None, options.output("COSTS")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure a draft step, target passes by width and the engine's own time.

    With --ratio nothing is measured: the table stands for another machine. Interrupted, it keeps
    the cells that are complete.

    Args:
        batch: prompts decoded together, e.g. 1,2,4.
        context: tokens of text so far, e.g. 128,512.
        widths: tokens verified in one pass, 1 among them. Default: some from 1 to 24.
        repeats: timings of each. Default: 25.
        ratio: make a table up, no model needed: a target pass takes C draft steps.
        slope: what each further token adds to a target pass, in passes.
        fixed: per round outside both models, in passes.
        target_ms: milliseconds of a plain target pass.
        output: also save the table as JSON, for forerun replay --costs.
    """
    claim(output)
    if ratio is not None:
        if models.target is not None or models.draft is not None:
            raise SettingError("--ratio makes the table up; leave --target and --draft out")
        cell = Cell.synthetic(ratio, slope, fixed, target_ms / 1000)
        settings = {"c": ratio, "slope": slope, "fixed": fixed, "target_ms": target_ms}
        _finish(CostTable((cell,), {"synthetic": settings}), output, as_json)
        return
    if slope or fixed or target_ms != 1000:
        raise SettingError("--slope, --fixed and --target-ms describe a table made with --ratio")
    batches, contexts = numbers("--batch", batch), numbers("--context", context)
    wide = WIDTHS if widths is None else numbers("--widths", widths)
    turns = REPEATS if repeats is None else repeats
    require(turns >= 1, "--repeats", turns, "≥ 1")

    from forerun.drafters.model import ModelDraft
    from forerun.drafters.shared import SharedDraft
    from forerun.lab.traces.measuring import measure
    from forerun.model import default_draft, drafter_spec

    draft = models.draft or default_draft(models.target)
    if not isinstance(drafter_spec(draft), (ModelDraft, SharedDraft)):  # nothing is loaded yet
        raise SettingError(
            f"measuring costs needs a draft model, and {draft} is none; give --draft ID_OR_PATH"
        )
    job = models.load()
    measured: CostTable | None = None
    try:
        with progress("measuring", len(batches) * len(contexts) * turns) as tell:
            advance = partial(tell, "measuring")
            for grown in measure(job.model, batches, contexts, wide, turns, advance):
                measured = grown
    except KeyboardInterrupt:
        if measured is None:
            remark("interrupted before the first cell was complete; nothing is saved")
        else:
            _finish(measured, output, as_json)
        raise
    assert measured is not None, "there is a cell at least"
    _finish(measured, output, as_json)


def _finish(costs: CostTable, output: str | None, as_json: bool) -> None:
    if output is not None:
        costs.write(output)
    report(costs.to_json(), partial(_show, costs), as_json, output)


def _show(costs: CostTable) -> None:
    """The table, for people: medians in ms, and the range of the middle 80 %."""
    spreads: list[Any] = list(costs.spread) or [None] * len(costs.cells)
    for i, (cell, spread) in enumerate(zip(costs.cells, spreads, strict=True)):
        place = f"batch {cell.batch}, context {cell.context}: "
        head = place if spread is not None else "made up: "
        note(Text.assemble("\n" if i else "", head, (f"c = {cell.ratio:.2f}", "bold")))
        shown = table("one", right=("ms", *(["10 % to 90 %"] if spread is not None else [])))
        for row in _rows(cell, spread):
            shown.add_row(*row)
        stdout().print(shown)


def _rows(cell: Cell, spread: Spread | None) -> Iterator[list[str]]:
    if spread is None:
        yield ["drafted token", _ms(cell.draft)]
    else:
        yield ["draft forward", _ms(cell.draft - spread["work"]), _range(spread["draft"])]
        yield ["the first of a round, more", _ms(cell.first), ""]
        yield ["plain, draft thrown away, more", _ms(cell.cold), ""]
        yield ["engine, per drafted token", _ms(spread["work"]), ""]
        yield ["asking a controller about it", _ms(cell.asking), ""]
    for i, (width, seconds) in enumerate(cell.verify):
        label = f"target pass of {width} token{'s' if width > 1 else ''}"
        yield [label, _ms(seconds), *([] if spread is None else [_range(spread["verify"][i])])]
    yield ["engine, per round", _ms(cell.fixed), *([] if spread is None else [""])]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _range(pair: Sequence[float]) -> str:
    return f"{_ms(pair[0])} to {_ms(pair[1])}"
