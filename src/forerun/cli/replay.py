"""`forerun replay`: what any controller would do on a recorded trace, and how fast."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.cli import options
from forerun.cli.console import note, status, stderr, stdout, table
from forerun.cli.options import flag, option
from forerun.cli.progress import progress
from forerun.cli.report import check_writable, print_json
from forerun.errors import UnknownNameError

if TYPE_CHECKING:
    from forerun.controllers import LengthController
    from forerun.lab.costs import Cell
    from forerun.lab.trace import Trace
    from forerun.types import FloatArray

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """One controller over the trace."""

    spec: str
    """As the user wrote it."""
    controller: str
    groups: dict[str, dict[str, Any]]
    """`forerun.lab.replay.summarise`, with `share` of each bound if they were asked for."""


def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file of forerun record.")],
    costs: options.CostTable,
    controller: Annotated[
        list[str] | None,
        option("SPEC", "Like gammatune(eta=0.3); repeatable. Default: all that are registered."),
    ] = None,
    family: Annotated[
        list[str] | None, option("NAME", "Only prompts of this family; repeatable.")
    ] = None,
    batch: options.NearBatch = 1,
    context: options.NearContext = 128,
    bounds: Annotated[
        bool,
        flag(
            "--bounds",
            "Also show the share of what is possible: of the clairvoyant oracle, and of the best "
            "that sees only what a controller sees.",
        ),
    ] = False,
    output: Annotated[
        str | None,
        options.output("CSV", "Also save a table, a row per controller and family."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict speed, rounds and drafted tokens of controllers without running a model.

    Exact for greedy traces: counts are those of the live engine.
    """
    from forerun.controllers import CONTROLLERS
    from forerun.lab.costs import Costs
    from forerun.lab.trace import Trace

    made = {spec: CONTROLLERS.make(spec) for spec in controller or _registered()}
    check_writable(output)
    costs_table = Costs.find(costs)
    cell = costs_table.at(batch, context)
    texts = _of(Trace.read(trace), family or [])
    warn_of_other_models(texts.about, costs_table.about)
    limits = _bounds(texts, cell) if bounds else {}
    found: list[Result] = []
    try:
        with progress("replaying", len(made)) as tell:
            for spec, one in made.items():
                found.append(_result(texts, cell, spec, one, limits))
                tell("replaying", len(found))
    except KeyboardInterrupt:
        if found:
            note(stderr(), f"interrupted after {len(found)} of {len(made)} controllers")
            _tell(found, texts, cell, costs_table.about, output, as_json)
        raise
    _tell(found, texts, cell, costs_table.about, output, as_json)


def warn_of_other_models(trace: Mapping[str, Any], costs: Mapping[str, Any]) -> None:
    """Say so if a trace and a table of measured costs are of different models."""
    for role in ("target", "draft"):
        one, other = trace.get(role), costs.get(role)
        if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            continue
        keys = one.get("sha256"), other.get("sha256")
        if all(keys) and keys[0] != keys[1]:
            note(
                stderr(),
                f"the trace is of the {role} {one.get('name')} and the costs are of "
                f"{other.get('name')}: the figures hold for no pair of models",
            )


def _registered() -> list[str]:
    """Controllers that need no settings."""
    from forerun.controllers import CONTROLLERS

    def ready(name: str) -> bool:
        return all(
            f.default is not MISSING or f.default_factory is not MISSING or not f.init
            for f in fields(CONTROLLERS.load(name))
        )

    return [name for name in CONTROLLERS.names() if ready(name)]


def _of(trace: Trace, families: Sequence[str]) -> Trace:
    known = list(dict.fromkeys(trace.families))
    for name in families:
        if name not in known:
            raise UnknownNameError.among("family of the trace", name, known)
    if not families:
        return trace
    return trace.take([i for i, name in enumerate(trace.families) if name in families])


def _bounds(trace: Trace, cell: Cell) -> dict[str, FloatArray]:
    """`(prompts,)` seconds of each bound."""
    from forerun.lab.bounds import oracle
    from forerun.lab.informed import informed

    with status("finding the oracle") as tell:
        best = oracle(trace, cell).seconds
        tell("fitting the informed bound")
        return {"oracle": best, "informed": informed(trace, cell).seconds}


def _result(
    trace: Trace,
    cell: Cell,
    spec: str,
    controller: LengthController,
    limits: dict[str, FloatArray],
) -> Result:
    from forerun.controllers import CONTROLLERS
    from forerun.lab.replay import geometric, replay, summarise

    found = replay(trace, controller, cell)
    groups = summarise(trace, found, cell.batch)
    for name, group in groups.items():
        chosen = [name in ("all", family) for family in trace.families]
        if limits:
            group["share"] = {
                bound: geometric((seconds / found.seconds)[chosen])
                for bound, seconds in limits.items()
            }
    return Result(spec, CONTROLLERS.text(controller), groups)


def _tell(
    found: list[Result],
    trace: Trace,
    cell: Cell,
    about: Mapping[str, Any],
    output: str | None,
    as_json: bool,
) -> None:
    if output is not None:
        _write_csv(found, output)
    if as_json:
        _print_json(found, trace, cell)
        return
    order = sorted(found, key=lambda r: -r.groups["all"]["speedup"]["mean"])
    _show(order, trace, cell, made_up="synthetic" in about)
    if output is not None:
        note(stderr(), f"saved to {output}")


def _print_json(found: list[Result], trace: Trace, cell: Cell) -> None:
    document = {
        "schema": SCHEMA,
        "cell": {**cell.to_json(), "ratio": cell.ratio},
        "controllers": [{"controller": r.controller, "families": r.groups} for r in found],
        "trace": trace.about,
    }
    print_json(document)


def _write_csv(found: list[Result], output: str) -> None:
    """A row per controller and family; intervals as NAME_low and NAME_high."""
    rows = []
    for result in found:
        for family, group in result.groups.items():
            row: dict[str, Any] = {"controller": result.controller, "family": family}
            shares = {f"share_of_{k}": v for k, v in group.get("share", {}).items()}
            for key, value in {**group, **shares}.items():
                if key == "share":
                    continue
                if isinstance(value, dict):
                    row |= {key: value["mean"], f"{key}_low": value["low"]}
                    row[f"{key}_high"] = value["high"]
                else:
                    row[key] = value
            rows.append(row)
    with open(output, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _show(found: list[Result], trace: Trace, cell: Cell, made_up: bool) -> None:
    """The summary, for people: the best controller first."""
    console = stdout()
    size = f"{trace.prompts:,} prompts, {int(trace.sizes.sum()):,} tokens"
    note(console, f"{size}; c = {cell.ratio:.2f}, batch {cell.batch}, context {cell.context}\n")
    first = found[0].groups["all"]
    rate = "tokens/pass" if made_up else "tokens/s"  # a second is a target pass then
    heads = ["speed-up", rate, "rounds", "drafted", "wasted"]
    shown = table("controller", right=[*heads, *first.get("share", {})], no_wrap=True)
    for result in found:
        group = result.groups["all"]
        shown.add_row(
            result.spec,
            Text(_half(group["speedup"]), "bold"),
            f"{group['tokens_per_second']['mean']:,.{2 if made_up else 1}f}",
            *(f"{group[name]:,}" for name in heads[2:]),
            *(f"{share['mean']:.1%}" for share in group.get("share", {}).values()),
        )
    console.print(shown)
    families = [name for name in found[0].groups if name != "all"]
    if len(families) > 1:
        note(console, "\nspeed-up by family")
        shown = table("controller", right=families, no_wrap=True)
        for result in found:
            cells = [f"{result.groups[name]['speedup']['mean']:.2f}" for name in families]
            shown.add_row(result.spec, *cells)
        console.print(shown)
    if "share" in first:
        note(console, f"\n{', '.join(first['share'])}: share of the speed of that bound")
    note(console, Text("\n± is half of the 95 % interval over prompts", "dim"))
    capped = [r.spec for r in found if r.groups["all"]["capped"]]
    if capped:
        note(
            console,
            f"not exact for {', '.join(capped)}: drafts of more than the trace's {trace.depth} "
            "tokens were cut; record with a larger --depth",
        )


def _half(value: dict[str, float]) -> str:
    return f"{value['mean']:.2f} ±{(value['high'] - value['low']) / 2:.2f}"
