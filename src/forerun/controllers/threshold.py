"""The building block of policies that stop where the drafter is unsure."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from forerun.controllers.base import LengthController
from forerun.costs import Costs
from forerun.types import Token


class Threshold(LengthController):
    """Draft on while one signal of the newest token is good enough.

    A drafter without a distribution (lookup) says nothing, and is never stopped. A policy with a
    setting `keep` may leave the token out at which the draft stopped.
    """

    signal: ClassVar[str]
    """The field of `Token` it goes by."""

    @abstractmethod
    def sure(self, state: Any, signal: float) -> bool:
        """Whether the signal is good enough."""

    @property
    def signals(self) -> frozenset[str]:
        """The one signal."""
        return frozenset({self.signal})

    @property
    def asks(self) -> bool:
        """Always."""
        return True

    @property
    def drops_last(self) -> bool:
        """Whether the uncertain token is left out."""
        return not getattr(self, "keep", True)

    def keep_going(self, state: Any, costs: Costs, memo: Token) -> bool:
        """Whether the newest token's signal is good enough."""
        signal = getattr(memo, self.signal)
        return True if signal is None else self.sure(state, signal)
