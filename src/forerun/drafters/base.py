"""The contract of a drafter: who runs ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from forerun.types import Stop

if TYPE_CHECKING:
    import torch

    from forerun.runtime.base import Runtime


@dataclass(frozen=True)
class Proposal:
    """What may come next in each row: a distribution, or certain tokens. One of the two is set."""

    logits: torch.Tensor | None = None
    """`(rows, V)` raw logits over the target's vocabulary."""
    tokens: Sequence[int] | None = None
    """`(rows,)` token ids; -1 where the drafter has nothing to propose."""
    ended: Sequence[Stop | None] | None = None
    """`(rows,)` why the drafter ends a row's draft here; None in a row that goes on, or None if all
    do. It must be decided before anyone knows which token would be drawn, or samples are biased."""


class Drafter(ABC):
    """Proposes tokens for the engine's rows, one step at a time.

    A drafter may hold state per row (a cache), under the one invariant of every cache here: it
    covers `context[:n]`, and `step` brings it up to date with whatever context it is shown.
    """

    summary: ClassVar[str]
    paper: ClassVar[str]
    limit: int = 1 << 30
    """Most tokens of context this drafter can follow; beyond it, rows decode plainly."""
    has_distribution: bool = True
    """Whether proposals are logits; rules that read the draft's distribution need them."""
    seconds: float = 0.0
    """Wall time spent in model forward passes so far."""
    target: Runtime | None = None
    """The runtime to verify with, if it is one this drafter made because it shares it."""

    @property
    def counts(self) -> Sequence[tuple[int, int]] | None:
        """Per row, prompts left out: positions × layers of the target run so far, and shallow
        hidden states turned into logits; None from drafters that do not run the target's layers."""
        return None

    def ratio(self, target: Any) -> float:
        """Target passes over draft steps, > 0, by sizes alone: an estimate that never changes."""
        return 100.0  # no model: next to nothing

    @abstractmethod
    def step(self, contexts: Sequence[Sequence[int] | None]) -> Proposal:
        """Propose the next token of each row.

        Args:
            contexts: per row, the committed text followed by what was drafted so far this round;
                None for rows that are not drafting (their answer is ignored).
        """

    def prepare(self, contexts: Sequence[Sequence[int] | None]) -> bool:
        """Rows are about to draft: catch up with long contexts, outside the time of a step.

        Arguments as for `step`. A row that never drafts never comes here, and costs nothing.

        Returns:
            Whether the first step will read the rest: then it counts as catching up, too.
        """
        return False

    def join(self, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Rows were added at the end; each is expected to grow by `room` tokens."""

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay, in this order."""

    def rollback(self, row: int, length: int) -> None:
        """The first `length` tokens of a row stand; what followed them was rejected."""


class DrafterSpec(ABC):
    """The settings of a drafter: a frozen dataclass, built before any model is loaded."""

    summary: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        """Make the drafter for a target `RowModel` and its tokenizer (or None)."""
