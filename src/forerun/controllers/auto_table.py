"""The tokens a draft errs at: what `auto` learns of them from request to request.

A draft has habits that its confidence does not show: one token is kept more often than it says,
another after a certain one hardly ever. Like a branch predictor, a table holds a correction of the
log-odds for each drafted token and for each pair of it and the token before. They are weights of a
logistic regression on hashed features (Weinberger et al. 2009, "Feature Hashing for Large Scale
Multitask Learning"), each learned by ridge Newton steps from what was left unexplained.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from forerun.controllers.elementwise import at, entries, entry, minimum
from forerun.types import Token

SLOTS = 1021
"""Entries for single tokens, and as many for pairs; tokens that fall into one share it. A prime."""
HASH, HASH_BEFORE = 31_337, 1_000_003
"""Factors of the drafted token and the one before it."""
PRIOR_WEIGHT = 2.0
"""Prior weight of a correction of 0, in `Σ w`."""
MOST_WEIGHT = 50.0
"""Most of it that counts, so that a correction never stops to follow."""


def _empty() -> Any:
    table = np.zeros(2 * SLOTS)
    table.flags.writeable = False
    return table


class Table(NamedTuple):
    """Corrections of the log-odds of being kept."""

    corrections: Any = _empty()
    """`(2·SLOTS,)`, in a replay `(2·SLOTS, prompts)`: of tokens, then of pairs."""
    weights: Any = _empty()
    """`Σ w` they were learned from."""

    def __call__(self, token: Token) -> float:
        """What a drafted token and its pair say in sum."""
        one, pair = _places(token)
        both: float = entry(self.corrections, one) + entry(self.corrections, pair)
        return both

    def learned(self, judged: list[tuple[Token, float, float]]) -> Table:
        """After some tokens: each with its weight `w`, and the chance it was short of."""
        after = Table(self.corrections.copy(), self.weights.copy())
        corrections, weights = map(entries, after)
        for token, weight, miss in judged:
            for place in map(at, _places(token)):
                known = weights[place] = minimum(weights[place] + weight, MOST_WEIGHT)
                corrections[place] += miss / (known + PRIOR_WEIGHT)
        return after


def _places(token: Token) -> tuple[Any, Any]:
    pair = token.id * HASH + token.previous * HASH_BEFORE
    return token.id % SLOTS, SLOTS + pair % SLOTS
