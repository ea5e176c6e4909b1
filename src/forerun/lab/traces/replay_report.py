"""Results of replays of several controllers, as a document and as a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from forerun.controllers import CONTROLLERS, Controller
from forerun.lab.bounds.bounds import best_fixed, oracle, tree_oracle
from forerun.lab.bounds.informed import informed
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Replay, by_family, geometric, summarise
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

SCHEMA = 1
DRAWS = 16  # times that sampled prompts are served by a rule's coins


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


def runner(trace: Trace, table: CostTable, rows: int, context: int, rule: str | None = None) -> Run:
    """So many texts together, by the costs that the table has nearest to each size of batch; one
    row is every text by itself, and by a rule's coins sampled ones several times."""
    judge, draws = None, 1
    if rule is not None:
        from forerun.lab.traces.rules import RecordedRule  # needs torch

        judge, draws = RecordedRule(trace, rule), DRAWS if trace.sampled.any() else 1
    if rows == 1:
        cell = table.at(1, context)
        return lambda controller: replay(trace, controller, cell, rule=judge, draws=draws)
    from forerun.lab.traces.batches import replay_batches  # needs torch

    def costs(size: int) -> Cell:
        return table.at(size, context)

    plain = replay_batches(trace, "fixed(0)", costs, rows).seconds
    return lambda controller: replay_batches(trace, controller, costs, rows, plain, rule=judge)


def result(
    trace: Trace,
    run: Run,
    controller: Controller,
    limits: Mapping[str, FloatArray],
    shared: int = 1,
    rule: str | None = None,
) -> dict[str, Any]:
    """Replay a controller by a `runner`, an entry of `controllers` of the document of `replay
    --json`; `shared` rows share seconds, `limits` are the bounds' speed-ups."""
    counts = run(controller)
    groups = summarise(trace, counts, shared)
    for name, chosen in by_family(trace).items() if limits else ():
        groups[name]["share"] = {
            bound: geometric((counts.speedup / best)[chosen]) for bound, best in limits.items()
        }
    judged = {} if rule is None else {"rule": rule}
    return {"controller": CONTROLLERS.text(controller), **judged, "families": groups}


def shares(
    trace: Trace, costs: CostTable, specs: Sequence[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Each controller's speed over that of the bounds, per family and overall, at batch 1.

    Returns:
        `cost_ratio`, `prompts`, and `cells`: per family and controller the shares of each of
        `bounds` and of `best_fixed`, the best fixed length; geometric means with intervals.
    """
    context = max(int(np.mean(trace.prompt_tokens + trace.sizes / 2)), 1)
    cell, run = costs.at(1, context), runner(trace, costs, 1, context)
    limits = {**bounds(trace, cell, tell), "best_fixed": best_fixed(trace, cell)[0].speedup}
    cells = []
    for spec in specs:
        tell(f"replaying {spec}")
        own = result(trace, run, CONTROLLERS.make(spec), limits)["families"]
        cells += [{"family": f, "controller": spec, **own[f]["share"]} for f in own]
    return {"cost_ratio": cell.ratio, "prompts": trace.prompts, "cells": cells}


def document(
    results: Sequence[Any], trace: Trace, cell: Cell, rows: int = 1, bound: Sequence[Any] = ()
) -> dict[str, Any]:
    """The document of `replay --json`; `rows` are the texts that were decoded together."""
    return {
        "schema": SCHEMA,
        "batch": rows,
        "cell": {**cell.to_json(), "ratio": cell.ratio},
        "controllers": list(results),
        **({"lenient_bound": list(bound)} if bound else {}),
        "trace": trace.about,
    }


def write_csv(results: Sequence[Mapping[str, Any]], output: str) -> None:
    """Save a row per controller and family; intervals as NAME_low and NAME_high."""
    rows = []
    for result in results:
        named = {key: result[key] for key in ("controller", "rule") if key in result}
        for family, group in result["families"].items():
            row: dict[str, Any] = {**named, "family": family}
            shares = {f"share_of_{k}": v for k, v in group.get("share", {}).items()}
            for key, value in {**group, **shares}.items():
                if key != "share":
                    many = isinstance(value, dict)
                    row[key] = value["mean"] if many else value
                    row |= {f"{key}_{end}": value[end] for end in ("low", "high") if many}
            rows.append(row)
    with open(output, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
