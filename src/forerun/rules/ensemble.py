"""`ensemble`: sample from a mixture of target and draft."""

from dataclasses import dataclass

from forerun.checks import Share
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed


@dataclass(frozen=True)
class Ensemble(PositionRule):
    """Standard sampling from `w·target + (1 − w)·draft` instead of the target.

    Args:
        weight: w, the target's share, in [0, 1] (`assistant_ensemble_weight` in `transformers`,
            which has no default; ours).

    Reference: the static ensemble of Wang et al. 2026 (DIVERSED) [diverse2026];
    `_speculative_sampling` in `transformers`.
    """

    weight: Share = 0.9

    matches_greedy = True

    def weigh(self, odds: Odds) -> Weighed:
        """`min(1, 1 − w + w·target/draft)`."""
        if self.weight == 1:
            return Weighed(odds.ratio)
        rest = 1 - self.weight
        # min(1, 1 − w + w·r) = 1 − w + w·min(1, r).
        return odds.lenient(
            lambda at, view: (rest + self.weight * view.ratio) * (view.target > 0),
            residual=True,
        )
