"""`standard`: accept with min(1, target/draft), correct from the residual."""

from dataclasses import dataclass
from typing import ClassVar

from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed


@dataclass(frozen=True)
class Standard(PositionRule):
    """Speculative sampling: the output has exactly the target's distribution.

    Reference: Leviathan et al. 2023 [leviathan2023], Algorithm 1; Chen et al. 2023 [chen2023],
    Algorithm 2.
    """

    lossless: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True
    takes_leaves: ClassVar[bool] = True

    def weigh(self, odds: Odds) -> Weighed:
        return Weighed(odds.ratio)
