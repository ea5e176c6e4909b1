"""`bounded`: another controller's length, clipped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from forerun.checks import whole
from forerun.controllers.base import LengthController, State
from forerun.errors import require
from forerun.types import BoolArray, IntArray, RoundOutcome, Signals


@dataclass(frozen=True)
class Bounded(LengthController):
    """Clip the lengths another controller asks for.

    *Helps* an operator to cap what any policy may do (memory, latency, widths that were compiled)
    without knowing the policy. *Hurts* when the cap hides the region the policy would learn from.

    Rule: `γ ← min(high, max(low, γ_inner))`. A 0 of the inner controller, plain decoding this
    round, stays 0 with the default `low=0`; `low ≥ 1` overrules it. `high=0` is plain decoding
    always.

    Args:
        inner: the controller to clip.
        low: smallest γ, ≥ 0. The default 0 leaves small lengths alone.
        high: largest γ, ≥ low, or none for no bound (the default).

    The inner controller learns from what was really drafted, so a round that used the whole
    clipped length and was accepted counts as fully accepted.

    >>> from forerun.controllers import CONTROLLERS
    >>> controller = CONTROLLERS.make("bounded(fixed(20), high=8)")
    >>> controller.limit(controller.start(1))
    array([8])
    """

    inner: LengthController
    low: int = 0
    high: int | None = None

    summary: ClassVar[str] = "another controller's length, clipped to a range"
    paper: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""

    def __post_init__(self) -> None:
        require(isinstance(self.inner, LengthController), "inner", self.inner, "a controller")
        whole("low", self.low)
        if self.high is not None:
            whole("high", self.high)
            require(self.low <= self.high, "low", self.low, f"at most high={self.high}")

    @property
    def signals(self) -> frozenset[str]:
        """What the inner controller reads."""
        return self.inner.signals

    @property
    def drops_last(self) -> bool:
        """As the inner controller has it."""
        return self.inner.drops_last

    @property
    def previews(self) -> bool:
        """As the inner controller has it."""
        return self.inner.previews

    def plan(self, state: Any, drafted: IntArray, signals: Signals) -> IntArray:
        """What the inner controller plans of the clipped preview."""
        return self.inner.plan(state, drafted, signals)

    def start(self, rows: int) -> State:
        """The inner controller's state."""
        state: State = self.inner.start(rows)
        return state

    def renew(self, state: Any) -> State:
        """As the inner controller has it."""
        new: State = self.inner.renew(state)
        return new

    def timeless(self, cost: float) -> LengthController:
        """Likewise, with the same bounds."""
        return replace(self, inner=self.inner.timeless(cost))

    def together(self) -> LengthController:
        """Likewise."""
        return replace(self, inner=self.inner.together())

    def regrouped(self, state: Any) -> Any:
        """As the inner controller has it."""
        return self.inner.regrouped(state)

    def limit(self, state: Any) -> IntArray:
        """`(rows,)` the inner length, clipped."""
        limit: IntArray = np.clip(self.inner.limit(state), self.low, self.high)
        return limit

    def keep_going(self, state: Any, drafted: IntArray, signals: Signals) -> BoolArray:
        """As the inner controller says."""
        return self.inner.keep_going(state, drafted, signals)

    def observe(self, state: Any, outcome: RoundOutcome) -> State:
        """The inner controller learns."""
        new: State = self.inner.observe(state, outcome)
        return new
