"""How much memory running requests take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Memory:
    """A budget of bytes for the caches and logits of running requests.

    Caches are as wide as their longest row, so what a row takes depends on the others.

    Args:
        budget: bytes; None: no bound.
        per_token: bytes that one token of one row takes in all caches.
        per_row: bytes that a row takes besides: the logits of a pass.
    """

    budget: int | None = None
    per_token: int = 0
    per_row: int = 0
    used: int = 0
    """Bytes that the running requests may come to take."""

    def bytes(self, columns: Sequence[int]) -> int:
        """Of rows that may grow to these lengths."""
        return len(columns) * (max(columns, default=0) * self.per_token + self.per_row)

    def fits(self, columns: Sequence[int], more: int) -> bool:
        """Whether another row may join."""
        return self.budget is None or self.bytes([*columns, more]) <= self.budget

    @property
    def share(self) -> float:
        """Of the budget in use, in [0, 1]; 0 without a budget."""
        return min(self.used / self.budget, 1.0) if self.budget else 0.0


def measure(model: Any, budget: int | None, width: int = 8) -> Memory:
    """The budget for a loaded model and its drafter.

    Args:
        model: a `forerun.Model`.
        budget: bytes; None: no bound.
        width: positions whose logits a pass holds, per row.
    """
    facts = [model.target.facts]
    if (rows := getattr(model.drafter, "rows", None)) is not None:
        facts.append(rows.facts)
    logits = 4 * width * facts[0].vocab_size
    return Memory(budget, sum(one.token_bytes for one in facts), logits)
