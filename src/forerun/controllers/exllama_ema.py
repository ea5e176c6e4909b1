"""`exllama-ema`: just above the accepted tokens; rest where none are accepted."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from forerun.checks import Count, Within
from forerun.controllers.base import LengthPolicy
from forerun.controllers.elementwise import ceil, clip, where
from forerun.types import RoundOutcome


class ExLlamaEMAState(NamedTuple):
    """State of `ExLlamaEMA`."""

    rounds: int  # rounds so far
    ema: float  # moving average of the accepted tokens; γ is its ceiling
    tried: int  # the last round, counted from 0, that drafted something and taught something


@dataclass(frozen=True)
class ExLlamaEMA(LengthPolicy):
    """Follow the accepted tokens at once, up faster than down, and stop drafting where it is vain.

    Args:
        length: ema of the first round, tokens, ≤ high. Ours: the ceiling, so that the first round
            shows what can be had.
        alpha_up: α_up, weight of a round that raises the average, in (0, 2]; 1.30 in exllamav3.
        alpha_down: α_down, weight of a round that lowers it, in (0, 1]; 0.65 in exllamav3.
        skip_ema: rest while the average is below this, tokens, in [0, 1000]; 0.3 in exllamav3. 0
            never rests.
        probe: γ of a probe, tokens, ≥ 1; 2 in exllamav3.
        probe_interval: rounds from one probe to the next, ≥ 1; 16 in exllamav3.
        high: the most tokens per round, ≥ 1 (`num_draft_tokens`, 4 in exllamav3).

    Reference: turboderp 2026 (exllamav3) [exllamav3], `dynamic_draft_tokens` in
    `generator/generator.py`.
    """

    length: Count = 4
    alpha_up: Annotated[float, Within(0, 2, above=True)] = 1.3
    alpha_down: Annotated[float, Within(0, above=True)] = 0.65
    skip_ema: Annotated[float, Within(0, 1000)] = 0.3
    probe: Count = 2
    probe_interval: Count = 16
    high: Count = 4

    rising = ("length", "high")

    def start(self, certain: bool = True, before: Any = None) -> ExLlamaEMAState:
        # A start below `skip_ema` rests like any other average: the first probe is due later.
        return ExLlamaEMAState(0, float(self.length), 0)

    def limit(self, state: ExLlamaEMAState) -> int:
        """γ = ⌈ema⌉; 0 or a probe while the average is low."""
        gamma = clip(ceil(state.ema), 1, self.high)
        due = state.rounds - state.tried >= self.probe_interval
        resting = where(due, min(self.probe, self.high), 0)
        return where(state.ema < self.skip_ema, resting, gamma)

    def observe(self, state: ExLlamaEMAState, round: RoundOutcome) -> ExLlamaEMAState:
        """Move the average to what was accepted."""
        seen = round.accepted + round.full
        alpha = where(seen > state.ema, self.alpha_up, self.alpha_down)
        ema = alpha * seen + (1 - alpha) * state.ema
        return ExLlamaEMAState(
            state.rounds + 1,
            where(round.teaches, ema, state.ema),
            where(round.teaches, state.rounds, state.tried),
        )
