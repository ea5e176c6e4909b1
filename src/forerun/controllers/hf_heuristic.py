"""`hf-heuristic`: all accepted: γ + 2, otherwise γ − 1 (transformers' heuristic)."""

from dataclasses import dataclass
from typing import NamedTuple

from forerun.checks import Count, Whole
from forerun.controllers.base import Persistent
from forerun.controllers.elementwise import maximum, minimum, where
from forerun.types import RoundOutcome


class HFHeuristicState(NamedTuple):
    """State of `HFHeuristic`."""

    length: int  # γ of the next round


@dataclass(frozen=True)
class HFHeuristic(Persistent):
    """Additive increase, additive decrease: the heuristic schedule of `transformers`.

    Args:
        length: γ of the first round, `low ≤ length ≤ high` (`num_assistant_tokens`, 20 in
            `transformers`).
        up: tokens added after a fully accepted round, ≥ 0 (2 in `transformers`).
        down: tokens taken off after a rejection, ≥ 0 (1 in `transformers`).
        low: smallest γ, ≥ 1 (1 in `transformers`; at 0 it could never learn again).
        high: largest γ (ours).
        persistent: whether a request starts from the γ of the one that ended last (`heuristic` in
            `transformers`), instead of afresh (`heuristic_transient`). Requests with a seed that
            are sampled always start afresh.

    Reference: Gante 2023 (transformers) [gante2023], its assisted generation; the baseline
    "HFHeuristic" of Gautam et al. 2025.
    """

    length: Count = 20
    up: Whole = 2
    down: Whole = 1
    low: Count = 1
    high: Count = 64
    persistent: bool = False

    rising = ("low", "length", "high")

    def first(self) -> HFHeuristicState:
        return HFHeuristicState(self.length)

    def limit(self, state: HFHeuristicState) -> int:
        return state.length

    def observe(self, state: HFHeuristicState, round: RoundOutcome) -> HFHeuristicState:
        longer = minimum(state.length + self.up, self.high)
        shorter = maximum(state.length - self.down, self.low)
        length = where(round.full, longer, shorter)
        return HFHeuristicState(where(round.teaches, length, state.length))
