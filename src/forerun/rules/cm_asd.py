"""`cm-asd`: keep near-best tokens, by a margin that follows the confidence."""

from dataclasses import dataclass
from typing import Annotated, Literal

from forerun.arrays import cast
from forerun.checks import Count, Within
from forerun.confidence import Confidence
from forerun.rules.base import ComparedRow, PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.rules.spec_verification import SLACK, within
from forerun.types import Array


@dataclass(frozen=True)
class CMASDRule(Confidence, PositionRule):
    """CM-ASD's confidence-modulated verification: top β, and a gap of at most τ_t.

    Args:
        mode: `prose` (lenient where sure) or `formula` (as printed).
        top: β, ranks of the target that count, ≥ 1 (ours).
        tau: τ_base in nats, ≥ 0 (0.1 in the paper's example).
        gamma: γ in nats, ≥ 0: how much the margin moves (ours).

    Reference: Sen et al. 2025 (CM-ASD) [cmasd2025], §III.B (c).
    """

    mode: Literal["prose", "formula"] = "prose"
    top: Count = 3
    tau: Annotated[float, Within(0, 100)] = 0.1
    gamma: Annotated[float, Within(0, 100)] = 0.4

    reads_draft = True  # the confidence is made of it

    def weigh(self, odds: Odds) -> Weighed:
        return within(odds, self.top, self.tau + self.gamma, self._margin)

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Where the first token that is not the arg-max is within the largest margin of it."""
        return compared.gap <= self.tau + self.gamma + SLACK

    def _margin(self, odds: Odds) -> Array:
        """`(rows, K)` τ_t."""
        sure: Array = cast(self.score(**odds.signals(self.reads)), odds.dtype)
        return self.tau + self.gamma * (sure if self.mode == "prose" else 1 - sure)
