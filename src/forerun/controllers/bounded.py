"""`bounded`: another controller's length, clipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.checks import whole
from forerun.controllers.base import LengthController, Memo, Opening, Wrapper
from forerun.controllers.elementwise import maximum, minimum
from forerun.costs import Costs
from forerun.errors import require


@dataclass(frozen=True)
class Bounded(Wrapper):
    """Clip the lengths another controller asks for.

    Args:
        inner: the controller to clip.
        low: smallest γ, ≥ 0. The default 0 leaves small lengths alone.
        high: largest γ, ≥ low, or none for no bound (the default).

    >>> from forerun.controllers import CONTROLLERS
    >>> controller = CONTROLLERS.make("bounded(fixed(20), high=8)")
    >>> controller.limit(controller.start(), Costs.synthetic(5))
    8
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

    def limit(self, state: Any, costs: Costs) -> int:
        """The inner length, clipped."""
        return self.open(state, costs).alone

    def open(self, state: Any, costs: Costs) -> Opening:
        """The inner length, clipped; with `low` above 0 there are no plain rounds."""
        return self._clipped(self.inner.open(state, costs))

    def look(self, state: Any, costs: Costs) -> Opening:
        """Likewise."""
        return self._clipped(self.inner.look(state, costs))

    def left_out(self, state: Any, costs: Costs, memo: Memo) -> int:
        """As the inner controller has it; with `low` above 0 no draft is thrown away."""
        return int(self.drops_last) if self.low else self.inner.left_out(state, costs, memo)

    def _clipped(self, opening: Opening) -> Opening:
        if self.low:
            opening = opening._replace(most=maximum(opening.alone, self.low), worth=math.inf)
        if self.high is not None:
            opening = opening._replace(most=minimum(opening.most, self.high))
        return opening
