"""Results of replays of several controllers, as a document and as a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.controllers import CONTROLLERS, Controller
from forerun.lab.bounds.bounds import oracle, tree_oracle
from forerun.lab.bounds.informed import informed
from forerun.lab.bounds.lenient import lenient_bounds
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Replay, geometric, summarise
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

if TYPE_CHECKING:
    from forerun.lab.traces.rules import RecordedRule

SCHEMA = 1
DRAWS = 16  # times that sampled prompts are served by a rule's coins


@dataclass(frozen=True)
class Result:
    """One controller over the trace, under one rule."""

    spec: str  # as the user wrote it
    controller: str
    groups: dict[str, dict[str, Any]]
    """`forerun.lab.traces.replay.summarise`, with `share` of each bound if they were asked for."""
    rule: str | None = None  # None: what was kept when the texts were recorded


def bounds(
    trace: Trace, cell: Cell, tell: Callable[[str], None], trees: bool = False
) -> dict[str, FloatArray]:
    """`(prompts,)` speed-up of each bound; `tell` gets the name of each phase. `trees` says whether
    a controller takes second choices, so that oracles may, too."""
    tell("finding the oracle")
    best = oracle(trace, cell)
    out = {"oracle": best.speedup}
    if trees:
        out["one_leaf"] = best.plain_seconds / tree_oracle(trace, cell)
        out["all_leaves"] = best.plain_seconds / tree_oracle(trace, cell, comb=True)
    tell("fitting the informed bound")
    return {**out, "informed": informed(trace, cell).speedup}


Run = Callable[[Controller], Replay]  # replays one controller over a trace


def by_itself(trace: Trace, cell: Cell, rule: str | None = None) -> Run:
    """Every text by itself; by a rule's coins sampled ones several times."""
    draws = DRAWS if rule is not None and trace.sampled.any() else 1
    judge = _judge(trace, rule)
    return lambda controller: replay(trace, controller, cell, rule=judge, draws=draws)


def rules_of(text: str) -> list[str | None]:
    """Rules separated by semicolons, in full."""
    from forerun.rules import RULES  # needs torch

    return [RULES.text(RULES.make(rule)) for rule in text.split(";") if rule.strip()]


def _judge(trace: Trace, rule: str | None) -> RecordedRule | None:
    if rule is None:
        return None
    from forerun.lab.traces.rules import RecordedRule  # needs torch

    return RecordedRule(trace, rule)


def in_batches(
    trace: Trace, table: CostTable, rows: int, context: int, rule: str | None = None
) -> Run:
    """So many texts together, by the costs that the table has nearest to each size of batch."""
    from forerun.lab.traces.batches import replay_batches  # only this needs torch

    def costs(size: int) -> Cell:
        return table.at(size, context)

    plain, judge = replay_batches(trace, "fixed(0)", costs, rows).seconds, _judge(trace, rule)
    return lambda controller: replay_batches(trace, controller, costs, rows, plain, rule=judge)


def lenient(trace: Trace, cell: Cell) -> list[dict[str, Any]]:
    """The bound with rules at each of its budgets of drift."""
    return [
        {
            "budget": bound.budget,
            "drift": bound.drift,
            "price": bound.price / cell.plain if bound.budget else None,
            "speedup": geometric(bound.speedup),
        }
        for bound in lenient_bounds(trace, cell)
    ]


def result(
    trace: Trace,
    run: Run,
    spec: str,
    controller: Controller,
    limits: Mapping[str, FloatArray],
    shared: int = 1,
    rule: str | None = None,
) -> Result:
    """Replay a controller by `by_itself` or `in_batches`; `shared` rows share seconds."""
    counts = run(controller)
    groups = summarise(trace, counts, shared)
    for name, group in groups.items():
        chosen = [name in ("all", family) for family in trace.families]
        if limits:
            group["share"] = {
                bound: geometric((counts.speedup / best)[chosen]) for bound, best in limits.items()
            }
    return Result(spec, CONTROLLERS.text(controller), groups, rule)


def document(
    results: Sequence[Result], trace: Trace, cell: Cell, rows: int = 1, bound: Sequence[Any] = ()
) -> dict[str, Any]:
    """The document of `replay --json`; `rows` are the texts that were decoded together."""
    controllers = [
        {"controller": r.controller, **({"rule": r.rule} if r.rule else {}), "families": r.groups}
        for r in results
    ]
    return {
        "schema": SCHEMA,
        "batch": rows,
        "cell": {**cell.to_json(), "ratio": cell.ratio},
        "controllers": controllers,
        **({"lenient_bound": list(bound)} if bound else {}),
        "trace": trace.about,
    }


def write_csv(results: Sequence[Result], output: str) -> None:
    """Save a row per controller and family; intervals as NAME_low and NAME_high."""
    rows = []
    for result in results:
        for family, group in result.groups.items():
            row: dict[str, Any] = {"controller": result.controller, "family": family}
            row |= {"rule": result.rule} if result.rule else {}
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
