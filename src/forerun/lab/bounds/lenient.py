"""The bound with rules: length and leniency of every round chosen together, at a price of drift.

Knowing a run's acceptance ratios, but not the coins, a round drafts k tokens and keeps each for
sure or by its coin. Kept for sure, a token costs a drift of 1 less its ratio. Dynamic programming
finds the cheapest such policy in seconds and price · drift, from the end of a text backwards; the
price is the least at which the mean drift a token stays within a budget (docs/bounds.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.costs import Costs
from forerun.errors import SettingError, require
from forerun.lab.bounds.bounds import reach
from forerun.lab.traces.costs import passes
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

BUDGETS = (0.0, 0.01, 0.02, 0.05)  # mean drifts per token that are asked for
SEARCHED = 16  # prices tried


@dataclass(frozen=True)
class LenientBound:
    """The best at one budget; arrays `(prompts,)`, expectations over the coins."""

    budget: float
    seconds: FloatArray
    plain_seconds: FloatArray
    drift: float  # mean per token
    price: float  # seconds that a unit of drift costs

    @property
    def speedup(self) -> FloatArray:
        return self.plain_seconds / self.seconds


def lenient_bounds(
    trace: Trace, cell: Costs, budgets: tuple[float, ...] = BUDGETS
) -> list[LenientBound]:
    """The bound at each budget, the mean drift per token, in [0, 1]; `SettingError` for a trace
    without what rules read."""
    if np.isnan(trace.judged["ratio"]).any():
        raise SettingError("bounds of rules need what rules read; record with a draft model")
    plain = trace.sizes.astype(np.float64) * cell.plain
    tokens = trace.sizes.sum()

    def priced(price: float, budget: float) -> LenientBound:
        seconds, drift = _cheapest(trace, cell, price)
        return LenientBound(budget, seconds, plain, float(drift.sum() / tokens), price)

    out = []
    for budget in budgets:
        require(0 <= budget <= 1, "drift", budget, "in [0, 1]")
        low, high = 0.0, float(cell.plain) * 64
        best = priced(np.inf, budget)
        for _ in range(SEARCHED if budget else 0):
            tried = priced((low + high) / 2, budget)
            if tried.drift <= budget:
                best, high = tried, tried.price
            else:
                low = tried.price
        out.append(best)
    return out


def _cheapest(trace: Trace, cell: Costs, price: float) -> tuple[FloatArray, FloatArray]:
    """`(prompts,)` expected seconds and drift of the policy that is cheapest at a price."""
    (prompts, size), depth = trace.tokens.shape, trace.depth
    count = np.arange(depth + 1)
    taken = cell.draft_seconds(count) + passes(cell, depth)
    most, ratio, finite = reach(trace), trace.judged["ratio"], np.isfinite(price)
    # (what, prompts, position): seconds and drift yet to come; behind the end nothing is.
    ahead = np.zeros((2, prompts, size + depth + 2))
    weight = np.array([1.0, price if finite else 0.0])
    for at in reversed(range(size)):
        value = ahead[:, :, at + 1 : at + depth + 2].copy()  # by length, all kept
        for j in reversed(range(depth)):
            chance, kept = ratio[:, at, j, None], value[:, :, j + 1 :]
            tossed = chance * kept + (1 - chance) * ahead[:, :, at + j + 1, None]
            if finite:
                sure = kept.copy()
                sure[1] += 1 - chance
                better = np.tensordot(weight, sure - tossed, 1) < 0
                tossed = np.where(better, sure, tossed)
            value[:, :, j + 1 :] = tossed
        value[0] += taken
        total = np.tensordot(weight, value, 1)
        total[count > most[:, at, None]] = np.inf
        best = total.argmin(1)[None, :, None]
        chosen = np.take_along_axis(value, np.broadcast_to(best, (2, prompts, 1)), 2)[..., 0]
        ahead[:, :, at] = np.where(at < trace.sizes, chosen, 0.0)
    return ahead[0, :, 0], ahead[1, :, 0]
