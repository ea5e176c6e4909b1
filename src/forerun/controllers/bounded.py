"""`bounded`: another controller's length, clipped."""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.checks import Whole
from forerun.controllers.base import LengthPolicy, Wrapper
from forerun.controllers.elementwise import maximum, minimum
from forerun.errors import require


@dataclass(frozen=True)
class Bounded(Wrapper):
    """Clip the lengths another policy asks for.

    Args:
        inner: the policy to clip; a governor clips itself, as `auto(high=8)`.
        low: smallest γ, ≥ 0. The default 0 leaves small lengths alone.
        high: largest γ, ≥ low, or none for no bound (the default).

    >>> from forerun.controllers import CONTROLLERS
    >>> controller = CONTROLLERS.make("bounded(fixed(20), high=8)")
    >>> controller.limit(controller.start())
    8
    """

    inner: LengthPolicy
    low: Whole = 0
    high: Whole | None = None

    summary: ClassVar[str] = "another policy's length, clipped to a range"

    def __post_init__(self) -> None:
        require(
            isinstance(self.inner, LengthPolicy),
            "inner",
            self.inner,
            "a length policy; a governor like auto has `high` of its own",
        )
        super().__post_init__()
        if self.high is not None:
            require(self.low <= self.high, "low", self.low, f"at most high={self.high}")

    def limit(self, state: Any) -> int:
        limit = self.inner.limit(state)
        if self.high is not None:
            limit = minimum(limit, self.high)
        return maximum(limit, self.low)
