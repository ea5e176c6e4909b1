"""The contract of an acceptance rule: what to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from forerun.types import Draft, Target, Verdict


class AcceptanceRule(ABC):
    """Judges a draft against the target.

    Subclasses are frozen dataclasses whose fields are the settings; `judge` is pure and rows never
    influence each other.
    """

    summary: ClassVar[str]
    """One line for lists: what it does."""
    paper: ClassVar[str]
    """Short citation; empty if there is none."""
    bibtex: ClassVar[str]
    """BibTeX entries; empty if there are none."""
    lossless: ClassVar[bool]
    """Whether the output has exactly the target's distribution, whatever the draft."""

    @abstractmethod
    def judge(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Accept a prefix of each row's draft and choose the token after it.

        Args:
            draft: `(rows, K)` tokens with their distributions.
            target: `(rows, K + 1, V)` processed logits.
            uniforms: `(rows, K + 1)` float64 coins in [0, 1), each row's from its own stream:
                column `i` decides position `i`, the last column draws the next token.
        """


def sample(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw from each distribution by inverting its cumulative sum.

    Args:
        probs: `(..., V)` non-negative weights, not all zero; they need not sum to one.
        uniform: `(...,)` float64 in [0, 1).

    Returns:
        `(...,)` int64 token ids. A token of weight zero is never drawn.
    """
    cumulative = probs.to(torch.float64).cumsum(-1) * (probs > 0)
    total = cumulative.amax(-1, keepdim=True)
    # Rounding must not put the point on the total, where no token is left above it.
    point = torch.minimum(uniform.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    # The first token strictly above the point, and one of positive weight: not `searchsorted`,
    # since a parallel sum may differ by rounding across tokens of weight zero.
    return (cumulative > point).view(torch.uint8).argmax(-1)
