"""`typical`: keep what is likely enough for the target's own uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.arrays import cast
from forerun.checks import Share
from forerun.rules.base import ComparedRow, PositionRule
from forerun.rules.odds import Odds, View, Weighed
from forerun.types import Array


@dataclass(frozen=True)
class Typical(PositionRule):
    """Medusa's typical acceptance: a threshold on the target's probability that falls with its
    entropy.

    Args:
        epsilon: ε, in [0, 1] (0.09, `posterior_threshold` in Medusa's code).
        delta: δ, in [0, 1] (0.3 = √0.09, `posterior_alpha` in Medusa's code).

    Reference: Cai et al. 2024 (Medusa) [medusa2024], §2.3.1.
    """

    epsilon: Share = 0.09
    delta: Share = 0.3

    def weigh(self, odds: Odds) -> Weighed:
        def chance(at: Odds, view: View) -> Array:
            threshold = self.delta * at.lib.exp(-at.target_entropy)
            return cast(view.target > threshold.clip(None, self.epsilon), at.dtype)

        return odds.lenient(chance, residual=False)

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Where not even a probability of 1 is above the threshold."""
        return min(self.epsilon, self.delta) == 1
