"""The seam between the engine and whatever executes a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch


class Runtime(Protocol):
    """All the engine asks of a model: rows that join and leave, `feed`, and a length to move.

    One invariant: row `r`'s cache covers `context[:lengths[r]]`, and the next forward feeds
    `context[lengths[r]:]`. So "everything was accepted" is no special case.
    """

    device: torch.device
    limit: int
    """Most tokens of context, prompt and output together."""
    seconds: float
    """Wall time spent in forward passes so far."""

    @property
    def lengths(self) -> list[int]:
        """Tokens covered per row."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    def join(
        self, prompts: Sequence[Sequence[int]], room: int = 0, leave_end: bool = False
    ) -> None:
        """Add a row per prompt, covered but for its last token; `room` more tokens will come.

        With `leave_end`, it may cover less of a prompt: the next `feed` takes the rest along.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; drop the others."""

    def rollback(self, row: int, length: int) -> None:
        """Forget what a row holds beyond `length` tokens."""

    def feed(
        self,
        pieces: Sequence[Sequence[int]],
        first: int = 0,
        want: Literal["all", "last", "none"] = "all",
        skip: int = 0,
    ) -> torch.Tensor:
        """Feed each row its next tokens; logits `(rows, width - skip, V)`, `(rows, V)` or none."""
