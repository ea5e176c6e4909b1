"""The autoregressive loop: a token at a time, until every row has stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from forerun.drafters.base import Proposal, Step, StepContext, Texts

if TYPE_CHECKING:
    import torch


class Stepper(Protocol):
    """Something that says what may come next."""

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """What follows each text; `greedy` as `StepContext.greedy`. None texts get no answer."""


class ByPlace:
    """Steps through a block: `(rows, V)` logits by the place in it, from 0 on, and the texts."""

    def __init__(self, ask: Callable[[int, Texts], torch.Tensor]) -> None:
        self._ask, self._place = ask, -1

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        self._place += 1
        return Step(self._ask(self._place, texts))


def step_by_step(
    stepper: Stepper,
    texts: Texts,
    most: Sequence[int],
    guide: StepContext,
    since: float | None = None,
) -> Proposal:
    """Draft for every row until its limit, its controller, the stepper or the text says stop. The
    first step began at `since`, by the guide's clock, if texts were read before it."""
    out = Proposal.none(len(texts))
    ahead: list[list[int] | None] = [None if t is None else list(t) for t in texts]
    active = [row for row, text in enumerate(ahead) if text is not None]
    began = guide.clock() if since is None else since
    while active:
        step = stepper.step(ahead, guide.greedy)
        drawing = active
        if step.ended is not None:
            # A row that ends here draws nothing: neither a token nor a coin.
            for row in active:
                out.stopped_by[row] = step.ended[row]
            drawing = [row for row in active if step.ended[row] is None]
        if drawing:
            drawing = guide.choose(step, ahead, drawing, out)
        if step.ran:
            out.first_seconds = out.first_seconds or guide.clock() - began
            out.steps += 1
        going = guide.settle(drawing, most, out)
        if going != active:
            ahead = [text if row in going else None for row, text in enumerate(ahead)]
        active = going
    return out
