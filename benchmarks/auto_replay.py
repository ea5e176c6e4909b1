"""`auto` by replay of recorded texts, and on what it must not make slower, under made-up clocks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from benchmarks.common import provenance, save, table
from benchmarks.shares import families_of
from forerun.costs import Costs
from forerun.lab.bounds.informed import Study
from forerun.lab.traces.replay import stream
from forerun.lab.traces.results import mean_speed
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.virtual import KINDS, in_order, ratios, timed

HERE = Costs(
    2.078e-4, ((1, 1.323e-3), (2, 2.268e-3), (3, 2.415e-3), (4, 2.371e-3), (5, 2.910e-3),
    (6, 3.737e-3), (8, 3.328e-3), (12, 6.852e-3), (16, 4.219e-3), (24, 7.106e-3)), 7.72e-5,
    first=5.035e-4, levels=(1, 4, 5, 8), cold=7.27e-5, asking=1.24e-5,
)  # fmt: skip
"""Of the shipped pair on two cores of a Zen 4."""
CELLS = {"two cores": HERE} | {
    f"c = {c}": Costs.synthetic(c, slope, seconds=1.4e-3)
    for c, slope in ((4, 0.05), (8, 0.02), (20, 0.01))
}
STREAMS, SEEDS = 24, 20
"""Of texts, each of them in one of so many; of what must not be slower, each time all texts."""


def main(traces: Sequence[Path], bounds: bool) -> None:
    """Write `auto-replay.json`."""
    texts, clocks = {}, {}
    for path in traces:
        trace = Trace.read(path)
        order = np.random.default_rng(0).permutation(trace.prompts)
        order = order[: len(order) // STREAMS * STREAMS].reshape(STREAMS, -1)
        study = Study(trace) if bounds else None
        for label, costs in CELLS.items():
            texts[f"{path.stem}, {label}"] = _replayed(trace, order, costs, study)
    for name, (trace, costs) in _never_slower().items():
        for kind in KINDS:
            runs = [timed(trace, "auto", costs, in_order(trace, n), kind, n) for n in range(SEEDS)]
            plain, took = (
                sum(getattr(run, of).sum() for run in runs) for of in ("plain", "seconds")
            )
            clocks[f"{name}, {kind}"] = {
                "total": float(plain / took),
                "least": min(ratios(run.plain, run.seconds)["total"] for run in runs),
            }  # fmt: skip
    made = provenance(forerun.load(), traces=[path.name for path in traces], bounds=bounds)
    save("auto-replay", made, {"texts": texts, "clocks": clocks}, _text(texts, clocks))


def _replayed(trace: Trace, order: Any, costs: Costs, study: Study | None) -> dict[str, float]:
    """Plain seconds over seconds of all texts, and of each family; the share of a bound."""
    done = stream(trace, "auto", costs, order)
    out = {
        name: float(done.plain_seconds[at[order]].sum() / done.seconds[at[order]].sum())
        for name, at in families_of(trace).items()
    }
    if study is not None:
        best = study.tried(costs)[0].seconds
        out["of the informed bound"] = mean_speed(best[order] / done.seconds)
    return out


def _never_slower() -> dict[str, tuple[Trace, Costs]]:
    """Those that `tests/test_virtual.py` holds."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from test_virtual import CASES

    return CASES


def _text(texts: dict[str, dict[str, float]], clocks: dict[str, dict[str, float]]) -> str:
    heads = list(next(iter(texts.values())))
    rows = [[name, *(f"{one[head]:.3f}" for head in heads)] for name, one in texts.items()]
    streams = [[name, *(f"{x:.3f}" for x in one.values())] for name, one in clocks.items()]
    return (
        f"All plain seconds over all seconds, every text in one of {STREAMS} streams of requests "
        "in a random order, by replay at given costs.\n\n"
        + table(["texts, costs", *heads], rows)
        + f"\n\nUnder made-up clocks, {SEEDS} streams each, together and the least of them.\n\n"
        + table(["texts, clock", "total", "least"], streams)
    )
