"""Shares of the bounds that controllers reach, replayed over a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forerun.lab.bench.report import ALL
from forerun.lab.bounds.bounds import best_fixed, oracle
from forerun.lab.bounds.informed import informed
from forerun.lab.traces.costs import Costs
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import geometric
from forerun.lab.traces.trace import Trace


def shares(
    trace: Trace,
    costs: Costs,
    controllers: Sequence[str],
    tell: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """Each controller's speed over that of the bounds, per family and overall, at batch 1.

    Args:
        trace: the texts.
        costs: of this machine or another; the cell nearest to the trace's texts is used.
        controllers: specs.
        tell: called with the name of each phase.

    Returns:
        `cost_ratio`, `prompts`, and `cells`: per family and controller the shares `oracle` (of the
        clairvoyant one), `informed` (of the best policy with a controller's inputs) and
        `best_fixed` (of the best fixed length), each a geometric mean with its interval.
    """
    context = int(np.mean(trace.prompt_tokens + trace.sizes / 2))
    cell = costs.at(1, max(context, 1))
    tell("the oracle")
    best = {"oracle": oracle(trace, cell).seconds}
    tell("the best fixed length")
    best["best_fixed"] = best_fixed(trace, cell).overall.seconds
    tell("the informed bound")
    best["informed"] = informed(trace, cell).seconds
    families = np.array(trace.families)
    out = []
    for spec in controllers:
        tell(f"replaying {spec}")
        seconds = replay(trace, spec, cell).seconds
        for family in (*dict.fromkeys(trace.families), ALL):
            chosen = np.full(trace.prompts, True) if family == ALL else families == family
            spreads = {n: geometric(limit[chosen] / seconds[chosen]) for n, limit in best.items()}
            out.append({"family": family, "controller": spec, **spreads})
    return {"cost_ratio": cell.ratio, "prompts": trace.prompts, "cells": out}
