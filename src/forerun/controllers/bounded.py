"""`bounded`: another policy's length, clipped to a range."""

from dataclasses import dataclass
from typing import Annotated, Any

from forerun.checks import Named, Whole
from forerun.controllers.base import LengthPolicy, Memo, State
from forerun.controllers.elementwise import maximum, minimum
from forerun.types import RoundOutcome, Token


@dataclass(frozen=True)
class Bounded(LengthPolicy):
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
    rising = ("low", "high")

    @property
    def stops_early(self) -> bool:  # type: ignore[override]
        return self.inner.stops_early

    def signals(self, certain: bool) -> frozenset[str]:
        return self.inner.signals(certain)

    def start(self, certain: bool = True, before: Any = None) -> State:
        return self.inner.start(certain, before)

    def limit(self, state: Any) -> int:
        limit = self.inner.limit(state)
        if self.high is not None:
            limit = minimum(limit, self.high)
        return maximum(limit, self.low)

    def step(self, state: Any, memo: Memo, token: Token) -> tuple[bool, Memo]:
        return self.inner.step(state, memo, token)

    def trim(self, state: Any, memo: Memo) -> int:
        return self.inner.trim(state, memo)

    def observe(self, state: Any, round: RoundOutcome) -> State:
        return self.inner.observe(state, round)
