"""The informed bound: the best policy in hindsight on the inputs of a real controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from forerun.lab.bounds.acceptance import Acceptance, RunOdds, TracePositions
from forerun.lab.bounds.bounds import Bound, Path, best_fixed, oracle, paths, tuned
from forerun.lab.bounds.stopping import COLUMNS, Stopper, improved, steps
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import geometric
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

GRID = (
    *(f"fixed({n})" for n in range(25)),
    *(
        f"hf-threshold(threshold={t},length={n})"
        for t, n in product((0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (4, 8, 24))
    ),
    *(
        f"svip(threshold={h},length=24,keep={keep})"
        for h, keep in product(
            (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0), ("true", "false")
        )
    ),
    *(
        f"adaedl(threshold={t},length=24,keep={keep})"
        for t, keep in product((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), ("true", "false"))
    ),
    *(
        f"cm-asd(alpha={alpha},high={high},{weights})"
        for alpha, high, weights in product(
            (0.4, 0.55, 0.7, 0.85, 1.0), (4, 8, 12, 16, 24),
            ("sharpness=1", "entropy=0,margin=0,softmax=1"),
        )
    ),
    *(
        f"gammatune+(length={length},eta={eta},threshold={tau},keep={keep})"
        for length, eta, tau, keep in product(
            (4, 7, 12, 20), (0.1, 0.3), (0.1, 0.2, 0.3, 0.4, 0.6), ("true", "false")
        )
    ),
    *(f"goodput(cost={cost},slope=0)" for cost in (2, 4, 8, 16, 32, 64)),
)  # fmt: skip
"""Specs that are tuned over: settings of stopping rules that may win in some cell."""

PRICES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.1)
"""Prices of a token in plain tokens' time, for the one-step look-ahead."""
ROUNDS = 5  # of policy improvement
ADJUSTED = ((2, 1.0), (1, 1.0), (3, 2.0), (5, 1.0), (11, 0.5), (13, 2.0), (24, 0.5))
"""Columns of the form that are then moved one by one, and how far in the mean cost of a token."""


@dataclass(frozen=True)
class Informed:
    """The informed bound in one cell, and how it was found."""

    best: Bound
    """The fastest policy tried."""
    stopper: Stopper | None
    """The fastest fitted policy; None if the trace has no accepted token."""
    tried: dict[str, float]
    """Geometric mean of the speed-up of each policy tried, the best first. `look-ahead`, `improved`
    and `adjusted` are fitted; the others are specs."""


class Study:
    """A trace with the fits that all cells share.

    Args:
        trace: the texts.
        drafted: paths of controllers on it (`paths`); by default all of `GRID`.
        acceptance: fitted elsewhere; by default here, in hindsight.
    """

    def __init__(
        self,
        trace: Trace,
        drafted: dict[str, Path] | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        self.trace, texts = trace, TracePositions(trace)
        self.paths = paths(trace, GRID) if drafted is None else drafted
        if acceptance is None and trace.matches.any():
            acceptance = Acceptance.fit(texts)
        self.acceptance = acceptance
        self.prepared: RunOdds | None = None if acceptance is None else acceptance.prepare(texts)

    def informed(self, cell: Cell) -> Informed:
        """The best policy for all prompts, by geometric mean of the speed-up."""
        cell = cell.asked
        fitted = self._fitted(cell)
        bounds = [bound for bound, _ in fitted] + tuned(self.trace, cell, self.paths)
        bounds.sort(key=lambda bound: -bound.mean)
        stopper = max(fitted, key=lambda pair: pair[0].mean)[1] if fitted else None
        tried: dict[str, float] = {}
        for bound in bounds:
            tried.setdefault(bound.name, bound.mean)
        return Informed(bounds[0], stopper, tried)

    def _fitted(self, cell: Cell) -> list[tuple[Bound, Stopper]]:
        """Look-ahead at its best price, improved policies, and the best of these adjusted."""
        acceptance, prepared = self.acceptance, self.prepared
        if acceptance is None or prepared is None:
            return []
        step = steps(cell, self.trace.depth)

        def scored(name: str, weights: FloatArray) -> tuple[Bound, Stopper]:
            stopper = Stopper(acceptance, weights, step)
            return Bound.of(name, stopper.path(prepared), self.trace, cell), stopper

        ahead = [scored("look-ahead", _look_ahead(price)) for price in PRICES]
        out = [max(ahead, key=lambda pair: pair[0].mean)]
        weights = out[0][1].weights
        for _ in range(ROUNDS):
            stopper = Stopper(acceptance, weights, step)
            # Half the way: gains hold only near the policy under which they were computed.
            weights = (weights + improved(stopper, prepared, cell)) / 2
            out.append(scored("improved", weights))
        best = max(out, key=lambda pair: pair[0].mean)
        size = 0.15 * float(step.mean())
        while size > 0.02 * step.mean():
            before = best[0].mean
            for column, scale in ADJUSTED:
                for sign in (1, -1):
                    weights = best[1].weights.copy()
                    weights[column] += sign * scale * size
                    trial = scored("adjusted", weights)
                    if trial[0].mean > best[0].mean:
                        best = trial
                        break
            size /= 1 if best[0].mean > before * 1.0005 else 2.5
        return [*out, best]


def informed(trace: Trace, cell: Cell) -> Bound:
    """The fastest policy in hindsight with the inputs of a real controller.

    It knows the draft's signals and the request's own past rounds, neither the family nor later
    tokens; but its settings are fitted to the very trace it is scored on.

    For several cells make one `Study`, which fits once.
    """
    return Study(trace).informed(cell).best


def shares(
    trace: Trace,
    costs: CostTable,
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
        for family in (*dict.fromkeys(trace.families), "all"):
            chosen = np.full(trace.prompts, True) if family == "all" else families == family
            spreads = {n: geometric(limit[chosen] / seconds[chosen]) for n, limit in best.items()}
            out.append({"family": family, "controller": spec, **spreads})
    return {"cost_ratio": cell.ratio, "prompts": trace.prompts, "cells": out}


def _look_ahead(price: float) -> FloatArray:
    """Draft on while the next token's chance is worth its cost."""
    weights = np.zeros(COLUMNS)
    weights[:2] = -1, price
    return weights
