"""Results of replays of several controllers, as a document and as a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.controllers import CONTROLLERS, Controller
from forerun.lab.bounds.bounds import oracle
from forerun.lab.bounds.informed import informed
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Replay, geometric, summarise
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """One controller over the trace."""

    spec: str
    """As the user wrote it."""
    controller: str
    groups: dict[str, dict[str, Any]]
    """`forerun.lab.traces.replay.summarise`, with `share` of each bound if they were asked for."""


def bounds(trace: Trace, cell: Cell, tell: Callable[[str], None]) -> dict[str, FloatArray]:
    """`(prompts,)` seconds of each bound; `tell` gets the name of each phase."""
    tell("finding the oracle")
    best = oracle(trace, cell).seconds
    tell("fitting the informed bound")
    return {"oracle": best, "informed": informed(trace, cell).seconds}


Run = Callable[[Controller], Replay]
"""Replays one controller over a trace."""


def by_itself(trace: Trace, cell: Cell) -> Run:
    """Every text by itself."""
    return lambda controller: replay(trace, controller, cell)


def in_batches(trace: Trace, table: CostTable, rows: int, context: int) -> Run:
    """So many texts together, by the costs that the table has nearest to each size of batch."""
    from forerun.lab.traces.batches import replay_batches  # only this needs torch

    def costs(size: int) -> Cell:
        return table.at(size, context)

    plain = replay_batches(trace, "fixed(0)", costs, rows).seconds
    return lambda controller: replay_batches(trace, controller, costs, rows, plain)


def result(
    trace: Trace,
    run: Run,
    spec: str,
    controller: Controller,
    limits: Mapping[str, FloatArray],
    shared: int = 1,
) -> Result:
    """Replay one controller.

    Args:
        trace: the texts.
        run: how, `by_itself` or `in_batches`.
        spec: the controller as the user wrote it.
        controller: it.
        limits: from `bounds`.
        shared: rows that each text's seconds are those of (`summarise`).
    """
    counts = run(controller)
    groups = summarise(trace, counts, shared)
    for name, group in groups.items():
        chosen = [name in ("all", family) for family in trace.families]
        if limits:
            group["share"] = {
                bound: geometric((seconds / counts.seconds)[chosen])
                for bound, seconds in limits.items()
            }
    return Result(spec, CONTROLLERS.text(controller), groups)


def document(results: Sequence[Result], trace: Trace, cell: Cell, rows: int = 1) -> dict[str, Any]:
    """The document of `replay --json`; `rows` are the texts that were decoded together."""
    return {
        "schema": SCHEMA,
        "batch": rows,
        "cell": {**cell.to_json(), "ratio": cell.ratio},
        "controllers": [{"controller": r.controller, "families": r.groups} for r in results],
        "trace": trace.about,
    }


def write_csv(results: Sequence[Result], output: str) -> None:
    """Save a row per controller and family; intervals as NAME_low and NAME_high."""
    rows = []
    for result in results:
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
