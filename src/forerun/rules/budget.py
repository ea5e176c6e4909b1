"""`budget`: another rule, for as long as its drift stays within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.checks import between
from forerun.rules.base import WrappedRule
from forerun.rules.odds import Odds, Weighed


@dataclass(frozen=True)
class Budget(WrappedRule):
    """A lossy rule whose mean drift per token never exceeds a budget.

    Args:
        rule: the lossy rule; one that decides position by position (all of ours do).
        drift: the budget, mean total-variation distance per token, in [0, 1].

    >>> from forerun.rules import RULES
    >>> RULES.make("budget(ears(beta=0.3), drift=0.02)").drift
    0.02
    """

    drift: float = 0.01

    summary: ClassVar[str] = "another rule, while its mean drift stays within a budget"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("drift", self.drift, 0, 1)

    def weigh(self, odds: Odds) -> Weighed:
        """The inner rule's opinion where the budget allows it, `standard`'s elsewhere."""
        inner = super().weigh(odds)
        # Which positions may be reached depends on it, so here all positions have it.
        drift = torch.zeros_like(inner.accept) if inner.drift is None else inner.drift(odds)
        drift = torch.where(odds.inside, drift.clamp(0, 1), 0)
        allowed = self._allowed(odds, drift)
        return Weighed(
            torch.where(allowed, inner.accept, odds.ratio),
            lambda at: at.at(torch.where(allowed, drift, 0)),
            ~allowed | inner.residual,
            None if inner.struck is None else torch.where(allowed, inner.struck, -1),
        )

    def _allowed(self, odds: Odds, drift: torch.Tensor) -> torch.Tensor:
        """`(rows, K)` bool: the running mean stays within the budget."""
        rows, width = drift.shape
        spent = odds.target.spent
        if spent is None:
            spent = torch.zeros(rows, 2, dtype=torch.float64)
        total, tokens = spent.to(drift.device, torch.float64).unbind(-1)
        columns = []
        for i in range(width):
            after = total + drift[:, i]
            columns.append(after <= self.drift * (tokens + i + 1))
            total = torch.where(columns[-1], after, total)
        return torch.stack(columns, -1)
