"""`bounded`: another policy's length, clipped to a range."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from forerun.checks import Named, Whole
from forerun.controllers.base import LengthPolicy, Wrapper
from forerun.controllers.elementwise import maximum, minimum


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

    inner: Annotated[LengthPolicy, Named("a length policy; auto has `high` of its own")]
    low: Whole = 0
    high: Whole | None = None
    rising: ClassVar[tuple[str, ...]] = ("low", "high")

    def limit(self, state: Any) -> int:
        limit = self.inner.limit(state)
        if self.high is not None:
            limit = minimum(limit, self.high)
        return maximum(limit, self.low)
