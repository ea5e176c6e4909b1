"""Is a greedy output that differs a floating-point near-tie, or a bug?

A verify pass multiplies matrices of another shape than a one-token pass, so the same logits come
out a few roundings apart. Where the two best tokens are closer than that, either may win and the
texts part. That is all that may ever differ: `explain` recomputes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.runtime.base import Runtime

SAFETY = 4.0
"""A margin within this many times the observed spread of the logits counts as a near-tie."""


@dataclass(frozen=True)
class Difference:
    """The first place where two greedy outputs of one prompt part."""

    position: int
    """Output tokens the two have in common."""
    tokens: tuple[int | None, int | None]
    """What each went on with; None where it ended."""
    margin: float
    """Smallest gap between the logits of the two tokens, over the shapes recomputed."""
    bound: float
    """How much a logit's difference may move between shapes: measured at this very prefix, and
    never less than rounding the largest logit in the model's dtype."""
    near_tie: bool

    @property
    def message(self) -> str:
        """One line for a person."""
        kind = "a floating-point near-tie" if self.near_tie else "NOT a near-tie: this is a bug"
        return (
            f"differs from output token {self.position} on ({self.tokens[0]} / {self.tokens[1]}): "
            f"{kind} (margin {self.margin:.2e}, bound {self.bound:.2e})"
        )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None if they are equal."""
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def explain(model: Any, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Difference:
    """Recompute the logits at the first difference in several shapes and classify it.

    Args:
        model: a `forerun.Model` (or anything with a `target` runtime) that is not generating.
        prompt: token ids.
        a: one greedy output.
        b: the other; they must differ.
    """
    at = first_difference(a, b)
    assert at is not None, "the outputs are equal"
    left = a[at] if at < len(a) else None
    right = b[at] if at < len(b) else None
    if left is None or right is None:  # one ended although the other went on: never a rounding
        return Difference(at, (left, right), float("inf"), 0.0, False)
    shapes = [
        _logits(model.target, [*prompt, *a[:at]], width).double()
        for width in (1, 2, 3, 5, 9, 17)
        if width <= len(prompt) + at
    ]
    gaps = torch.stack([logits[left] - logits[right] for logits in shapes])
    size = max(float(logits.abs().max()) for logits in shapes)
    rounding = size * torch.finfo(_dtype(model.target)).eps
    bound = SAFETY * max(float(gaps.max() - gaps.min()), rounding)
    margin = float(gaps.abs().min())
    best = shapes[0].max()
    tied_at_top = all(float(best - shapes[0][t]) <= bound for t in (left, right))
    return Difference(at, (left, right), margin, bound, margin <= bound and tied_at_top)


def _logits(target: Runtime, context: list[int], width: int) -> torch.Tensor:
    """The logits after `context` when its last `width` tokens are fed in one pass."""
    target.join([context[: len(context) - width + 1]])
    row = len(target.lengths) - 1
    try:
        return target.feed([context[target.lengths[row] :]], first=row, want="last")[0]
    finally:
        target.keep(list(range(row)))


def _dtype(target: Any) -> torch.dtype:
    return getattr(target, "dtype", torch.float32)
