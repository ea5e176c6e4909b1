"""`budget`: another rule, while its mean drift stays within a budget."""

from dataclasses import dataclass

from forerun.checks import Share
from forerun.rules.base import WrappedRule
from forerun.rules.odds import Odds, Weighed
from forerun.types import Array


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

    drift: Share = 0.01

    def weigh(self, odds: Odds) -> Weighed:
        """The inner rule's opinion where the budget allows it, `standard`'s elsewhere."""
        inner = super().weigh(odds)
        # Which positions may be reached depends on it, so here all positions have it.
        where, drift = odds.lib.where, odds.lib.zeros_like(inner.accept)
        if inner.drift is not None:
            drift = where(odds.inside, inner.drift(odds).clip(0, 1), 0)
        allowed = self._allowed(odds, drift)
        return Weighed(
            where(allowed, inner.accept, odds.ratio),
            lambda at: at.at(where(allowed, drift, 0)),
            ~allowed | inner.residual,
            None if inner.struck is None else where(allowed, inner.struck, -1),
        )

    def _allowed(self, odds: Odds, drift: Array) -> Array:
        """`(rows, K)` bool: the running mean stays within the budget."""
        total, tokens = odds.spent
        columns = []
        for i in range(odds.width):
            after = total + drift[:, i]
            columns.append(after <= self.drift * (tokens + i + 1))
            total = odds.lib.where(columns[-1], after, total)
        return odds.lib.stack(columns, -1)
