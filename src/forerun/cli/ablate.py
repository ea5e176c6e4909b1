"""`forerun ablate`: what each mechanism of a controller is worth."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.checks import whole
from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, stdout, table
from forerun.cli.shared.options import option
from forerun.cli.shared.report import print_json
from forerun.errors import SettingError


@options.command
def ablate(
    controller: Annotated[str, typer.Argument(metavar="CONTROLLER")],
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file of forerun record.")],
    costs: Annotated[list[str], option("FILE|c=10,slope=0.02", panel=options.COSTS)],
    context: options.NearContext = 128,
    seed: Annotated[int, option("N", "Of the order of the prompts.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Replay a controller without each of its mechanisms, one at a time.

    The prompts are requests of one engine, one after another. Shown is the change of the total
    speed, in per cent, with its 95 % interval over prompts.

    Args:
        controller: with all of its mechanisms, like auto.
        costs: what a round costs, as of forerun replay; repeatable, a column each.
    """
    from forerun.controllers import CONTROLLERS
    from forerun.lab.traces.ablation import without, worth
    from forerun.lab.traces.costs import CostTable
    from forerun.lab.traces.trace import Trace

    whole("seed", seed)
    made, texts = CONTROLLERS.make(controller), Trace.read(trace)
    if not without(made):
        raise SettingError(
            f"{controller} declares no mechanisms; a field does by controllers.base.mechanism"
        )
    cells = {spec: CostTable.find(spec).at(1, context) for spec in costs}
    results = {}
    with progress("replaying", len(cells)) as tell:
        for spec, cell in cells.items():
            results[spec] = worth(texts, made, cell, seed)
            tell("replaying", len(results))
    if as_json:
        print_json({"schema": 1, "controller": CONTROLLERS.text(made), "costs": results})
        return
    shown = table("without", right=list(cells), no_wrap=True)
    shown.add_row("nothing", *(f"{one['']['speedup']:.3f}" for one in results.values()))
    for name in without(made):
        shown.add_row(name, *(_change(one[name]) for one in results.values()))
    stdout().print(shown)
    note("\nnothing: speed-up over plain decoding; else % of that, and its 95 % interval")


def _change(one: dict[str, float]) -> str:
    change, low, high = (100 * one[name] for name in ("change", "low", "high"))
    return f"{change:+.1f} [{low:+.1f}, {high:+.1f}]"
