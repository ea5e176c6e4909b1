"""`ears`: standard, with a tolerance where the target is unsure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.checks import Share
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, View, Weighed
from forerun.types import Array

SMALLEST = 1e-10  # draft probability, as the paper guards its division


@dataclass(frozen=True)
class EARS(PositionRule):
    """Standard sampling with a tolerance that grows with the target's uncertainty.

    Args:
        beta: β, in [0, 1]; the paper uses 0.05 to 0.2 and 0.1 by default.
        correction: what replaces a rejected token: `residual` draws it from
            `max(0, target − draft)`, as the authors' own port does; `target` from the target, as
            §3.1 says (the target generates from the rejected position on), which is lossy even with
            β = 0 and several times further from the target.
        excluded: whether also tokens that the target excludes (top-k, bans) are kept where
            `U < tol`, as printed. By default they never are: a ban would not be one.

    Reference: Sun et al. 2025 (EARS) [ears2025], §3.1 to §3.3; probabilities are those after the
    sampling transform.
    """

    beta: Share = 0.1
    correction: Literal["residual", "target"] = "residual"
    excluded: bool = False

    matches_greedy = True

    def weigh(self, odds: Odds) -> Weighed:
        residual = self.correction == "residual"
        if self.beta == 0 and residual:
            return Weighed(odds.ratio)

        def chance(at: Odds, view: View) -> Array:
            chance = view.target / view.draft.clip(SMALLEST) + self.beta * (1 - at.top)
            return chance if self.excluded else chance * (view.target > 0)

        return odds.lenient(chance, residual, self.excluded)
