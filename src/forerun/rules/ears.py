"""`ears`: do not reject on bad luck alone where the target is unsure itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.checks import between
from forerun.citations import bibtex
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, View, Weighed

SMALLEST = 1e-10  # draft probability, as the paper guards its division


@dataclass(frozen=True)
class EARS(PositionRule):
    """Standard sampling with a tolerance that grows with the target's uncertainty.

    *Helps* at high temperature and in open text, where good tokens fall to an unlucky coin.
    *Hurts* the output's distribution, by at most `β·(1 − max target)` per position (the drift
    says exactly how much); nothing is gained where the target is sure. Greedy requests are
    untouched: there is no uncertainty left.

    Rule: accept `x` if `target(x)/draft(x) ≥ max(0, U − tol)`, `tol = β·(1 − max_v target(v))`;
    corrections come from the standard residual. With β = 0 it is `standard`, coin by coin.

    Args:
        beta: β, in [0, 1]; the paper uses 0.05 to 0.2 and 0.1 by default.

    Deviations: a token that the target excludes (top-k, bans) is never kept. The paper does not
    say where a correction comes from; the standard residual is what its authors' own port uses.

    Reference: EARS, §3.2 and §3.3; probabilities are those after the sampling transform.
    """

    beta: float = 0.1

    summary: ClassVar[str] = "standard, with a tolerance where the target is unsure"
    paper: ClassVar[str] = "Sun et al. 2025 (EARS)"
    bibtex: ClassVar[str] = bibtex("ears2025")
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        between("beta", self.beta, 0, 1)

    def weigh(self, odds: Odds) -> Weighed:
        """`min(1, target/draft + tol)`."""
        if self.beta == 0:
            return Weighed(odds.ratio)
        tolerance = self.beta * (1 - odds.top)

        def chance(view: View) -> torch.Tensor:
            safe = view.target / view.draft.clamp(min=SMALLEST)
            return (safe + tolerance) * (view.target > 0)

        return odds.relaxed(chance)
