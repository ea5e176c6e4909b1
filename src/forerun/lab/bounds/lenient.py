"""The bound with rules: length and leniency of every round chosen together, at a price of drift.

Knowing a run's acceptance ratios, but not the coins, a round drafts k tokens and keeps each for
sure or by its coin. Kept for sure, a token costs a drift of 1 less its ratio. Dynamic programming
finds the cheapest such policy in seconds and price · drift, from the end of a text backwards; the
price is the least at which the mean drift a token stays within a budget (docs/bounds.md).
"""

from typing import Any

import numpy as np

from forerun.costs import Costs
from forerun.errors import SettingError, require
from forerun.lab.bounds.bounds import reach
from forerun.lab.traces.costs import passes
from forerun.lab.traces.results import geometric
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

BUDGETS = (0.0, 0.01, 0.02, 0.05)  # mean drifts per token that are asked for
SEARCHED = 16  # prices tried


def lenient_bounds(
    trace: Trace, cell: Costs, budgets: tuple[float, ...] = BUDGETS
) -> list[dict[str, Any]]:
    """The bound at each budget, a mean drift per token in [0, 1]: `lenient_bound` of the document
    of `replay --json`. `SettingError` for a trace without what rules read."""
    if np.isnan(trace.judged["ratio"]).any():
        raise SettingError("bounds of rules need what rules read; record with a draft model")
    plain = trace.sizes.astype(np.float64) * cell.plain
    tokens = trace.sizes.sum()

    def priced(price: float) -> tuple[float, FloatArray, float]:
        """The price of a unit of drift, `(prompts,)` seconds, and the mean drift."""
        seconds, drift = _cheapest(trace, cell, price)
        return price, seconds, float(drift.sum() / tokens)

    out = []
    for budget in budgets:
        require(0 <= budget <= 1, "drift", budget, "in [0, 1]")
        low, high = 0.0, float(cell.plain) * 64
        best = priced(np.inf)
        for _ in range(SEARCHED if budget else 0):
            tried = priced((low + high) / 2)
            if tried[2] <= budget:
                best, high = tried, tried[0]
            else:
                low = tried[0]
        price, seconds, drift = best
        shown = price / cell.plain if budget else None
        speedup = geometric(plain / seconds)
        out.append({"budget": budget, "drift": drift, "price": shown, "speedup": speedup})
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
