"""`spec-verification`: keep what the target ranks high and likes nearly as much as its best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.checks import between, whole
from forerun.citations import bibtex
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed


@dataclass(frozen=True)
class SpecVerification(PositionRule):
    """SpecDec's relaxed verification: among the target's top β, and within τ of its best.

    Args:
        top: β, ranks that count, ≥ 1; ties count together (ours).
        tau: τ, largest gap in nats, ≥ 0; 0 keeps only the arg-max (ours: about the mean margin of
            `cm-asd` with its defaults).

    Reference: Xia et al. 2023 (SpecDec), §3.2; the baseline of CM-ASD, §III.A.
    """

    top: int = 3
    tau: float = 0.3

    summary: ClassVar[str] = "keep a token of the target's top ranks, close enough to its best"
    paper: ClassVar[str] = "Xia et al. 2023 (SpecDec)"
    bibtex: ClassVar[str] = bibtex("specdec2023")
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole("top", self.top, 1)
        between("tau", self.tau, 0, 100)

    def weigh(self, odds: Odds) -> Weighed:
        return within(odds, self.top, torch.tensor(self.tau, dtype=odds.dtype))


def within(odds: Odds, top: int, tau: torch.Tensor) -> Weighed:
    """Keep tokens of the top `top` ranks whose gap to the best is at most `tau`.

    Args:
        odds: the two models' word.
        top: β.
        tau: `(rows, K, 1)` or a scalar, in nats.
    """
    logits = odds.target.logits[:, : odds.width]
    last = logits.topk(min(top, logits.shape[-1]), dim=-1).values[..., -1:]
    # A difference of logits is a difference of log-probabilities.
    return odds.replaced(
        lambda view: (
            (view.logits >= last) & (odds.best_logit - view.logits <= tau.to(logits.device))
        ).to(odds.dtype)
    )
