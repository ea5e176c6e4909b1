"""`standard`: accept with min(1, target/draft), correct from the residual."""

from dataclasses import dataclass

from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed


@dataclass(frozen=True)
class Standard(PositionRule):
    """Speculative sampling: the output has exactly the target's distribution.

    Reference: Leviathan et al. 2023 [leviathan2023], Algorithm 1; Chen et al. 2023 [chen2023],
    Algorithm 2.
    """

    lossless = True
    matches_greedy = True
    takes_leaves = True

    def weigh(self, odds: Odds) -> Weighed:
        return Weighed(odds.ratio)
