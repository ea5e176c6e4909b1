"""`goodput`: draft on while expected tokens per time rise, calibrated online."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.checks import Count
from forerun.controllers.base import Chance
from forerun.controllers.calibrated import Calibrated
from forerun.costs import Costs
from forerun.governors.base import Governor, Plan, Policy, Seat


@dataclass(frozen=True)
class Goodput(Governor):
    """Stop each row at the length with the most tokens per time.

    Args:
        policy: what forecasts acceptance (`calibrated`; `survival` does, too).
        high: the most tokens per round, ≥ 1 (ours).

    Reference: Liu et al. 2024 (TurboSpec) [turbospec2024] (goodput as the objective); Cheng et al.
    2026 (DSpark) [dspark2026], Algorithm 1 (cost table, stop at the first that gains nothing).
    """

    policy: Policy = field(default_factory=Calibrated)
    high: Count = 20

    def open(
        self, pace: Any, costs: Costs, seats: Mapping[int, Seat], rows: int, paid: int
    ) -> _Rising:
        """Every row may draft, up to `high`."""
        return _Rising(costs, seats, self.high)


class _Rising(Plan):
    """The lengths at which Θ still rises, each seat by itself."""

    def __init__(self, costs: Costs, seats: Mapping[int, Seat], high: int) -> None:
        self._seconds, self._tokens = costs.seconds, 0
        self._expected = dict.fromkeys(seats, 1.0)
        self.most = {
            i: self._before(seat, high) if seat.blind else high for i, seat in seats.items()
        }

    def _before(self, seat: Seat, high: int) -> int:
        """The length where nothing is seen of a draft until it is judged."""
        tokens, expected, kept = 1, 1 + seat.outlook.first, seat.outlook.first
        while tokens < high and self._rises(tokens, expected, kept := kept * seat.outlook.later):
            tokens, expected = tokens + 1, expected + kept
        return tokens

    def _rises(self, tokens: int, expected: float, gain: float) -> bool:
        """Whether Θ(n + 1) > Θ(n), both multiplied by their times."""
        return (expected + gain) * self._seconds(tokens) > expected * self._seconds(tokens + 1)

    def go(self, chances: Mapping[int, Chance]) -> list[int]:
        """Those of which one more token raises the tokens per time."""
        self._tokens += 1
        for i, chance in chances.items():
            self._expected[i] += chance.kept
        return [
            i for i, (kept, following) in chances.items()
            if self._rises(self._tokens, self._expected[i], kept * following)
        ]  # fmt: skip
