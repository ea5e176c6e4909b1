"""`priced`: standard, lenient where that saves rounds, at a price."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from forerun.arrays import library
from forerun.checks import Share, Within
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.types import Array

USUAL, WEIGHT = 0.8, 3.0
"""Overlap of the two models before a draft has shown any, and the tokens that it counts for."""


@dataclass(frozen=True)
class Priced(PositionRule):
    """Standard sampling that keeps a token for sure where that saves more than it costs in drift.

    Args:
        drift: what a request's mean drift per token is steered to, in [0, 1].
        start: the price, rounds a unit of drift must save, before anything was spent, in [0, 2].
        pace: how much a unit of drift spent above the budget adds to the price, ≥ 0.
        horizon: tokens that a draft is taken to have, ≥ 2; how many it has in the end may depend on
            tokens behind the judged one, which must have no say.
    """

    drift: Share = 0.02
    start: Annotated[float, Within(0, 2)] = 0.9
    pace: Annotated[float, Within(0, 100)] = 0.1
    horizon: Annotated[int, Within(2)] = 8

    matches_greedy = True

    def weigh(self, odds: Odds) -> Weighed:
        """1 where keeping the token is worth the price. No token behind it has a say, so what is
        emitted there stays the target's own."""
        ratio = odds.ratio
        asked = odds.inside & (ratio < 1) & (odds.tokens.logits[..., 0] > -np.inf)
        asked[:, -1] = False  # nothing is drafted behind it
        asked[:, :-1] &= odds.inside[:, 1:]
        if not asked.any():
            return Weighed(ratio)
        keep = asked & (self._saved(odds.overlap, odds.place) >= self._price(odds))
        if odds.some_greedy:
            keep &= ~odds.greedy
        # Of the tokens that were not drafted nobody knows whether they would be kept: this is the
        # drift in the mean over drafts.
        return Weighed(odds.lib.where(keep, 1, ratio), lambda at: (1 - at.ratio) * at.at(keep))

    def _saved(self, overlap: Array, place: Array) -> Array:
        """`(rows, K)` rounds that keeping a token for sure saves.

        Kept, it brings itself and, if the next one is kept, too, what follows that; a round brings
        1 / (1 − a) tokens where each is kept by a chance of a, the mean overlap as far as the next
        token's.
        """
        following = library(overlap).roll(overlap, -1, -1)
        chance = (overlap.cumsum(-1) + following + USUAL * WEIGHT) / (place + 2 + WEIGHT)
        return 1 - chance + following * (1 - chance ** (self.horizon - 1 - place).clip(1))

    def _price(self, odds: Odds) -> Array:
        """`(rows, 1)` rounds that a unit of drift must save."""
        total, tokens = odds.spent
        return (self.start + self.pace * (total - self.drift * tokens))[:, None]
