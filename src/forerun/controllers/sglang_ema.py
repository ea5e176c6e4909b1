"""`sglang-ema`: one step beyond the accepted tokens, in tiers, changed slowly."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from forerun.checks import Count, Whole, Within
from forerun.controllers.base import LengthPolicy
from forerun.controllers.elementwise import maximum, minimum, picked, where
from forerun.errors import require
from forerun.types import RoundOutcome


class SGLangEMAState(NamedTuple):
    """State of `SGLangEMA`."""

    rounds: int  # rounds so far
    tier: int  # index into the candidate steps
    ema: float  # moving average of the accepted tokens
    learned: int  # rounds that moved the average
    resting: int  # the first round of the newest stretch of plain decoding, counted from 0


@dataclass(frozen=True)
class SGLangEMA(LengthPolicy):
    """Move between a few lengths, slowly, so that one step more than accepted is drafted.

    Args:
        length: γ of the first round, one of the candidates; ema starts at `length − 1`. 5, the
            middle of the default candidates, is what SGLang falls back to.
        candidate_steps: the lengths γ may take, ≥ 0, rising, separated by commas; 0 is plain
            decoding. `"1,3,5,7"` in SGLang for small batches.
        ema_alpha: α, weight of the newest round, in (0, 1]; 0.2 in SGLang.
        update_interval: rounds between changes of γ, ≥ 1; 5 in SGLang.
        warmup_batches: rounds before the first interval, ≥ 0; 10 in SGLang.
        up_hysteresis: up, tokens the average must exceed its threshold by to go up, in [−10, 10];
            0 in SGLang.
        down_hysteresis: down, tokens added to the threshold to go down, in [−10, 10]; −0.25 in
            SGLang.

    Reference: SGLang 2026 (adaptive speculative decoding) [sglang2026], `AdaptiveStepSlot` in
    `speculative/adaptive_spec_params.py`.
    """

    length: Whole = 5
    candidate_steps: str = "1,3,5,7"
    ema_alpha: Annotated[float, Within(0, above=True)] = 0.2
    update_interval: Count = 5
    warmup_batches: Whole = 10
    up_hysteresis: Annotated[float, Within(-10, 10)] = 0.0
    down_hysteresis: Annotated[float, Within(-10, 10)] = -0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        text = self.candidate_steps
        wanted = "rising whole numbers separated by commas"
        good = isinstance(text, str) and all(s.strip().isdecimal() for s in text.split(","))
        require(good, "candidate_steps", text, wanted)
        steps = list(self.steps)
        require(steps == sorted(set(steps)), "candidate_steps", text, wanted)
        require(self.length in steps, "length", self.length, f"one of {text}")

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(int(step) for step in self.candidate_steps.split(","))

    @property
    def high(self) -> int:
        return self.steps[-1]

    def start(self, certain: bool = True, before: Any = None) -> SGLangEMAState:
        steps = self.steps
        # Plain rounds do not move the average, so a start at 0 is that of its first probe, whose
        # warm-up the plain rounds have served.
        first = self.length or steps[min(1, len(steps) - 1)]
        warm = 0 if self.length else self.warmup_batches
        return SGLangEMAState(0, steps.index(self.length), float(first - 1), warm, warm)

    def limit(self, state: SGLangEMAState) -> int:
        return picked(self.steps, self._tier(state))

    def observe(self, state: SGLangEMAState, round: RoundOutcome) -> SGLangEMAState:
        """Move the average, and the tier when it is time."""
        learn = round.teaches
        ema = state.ema + self.ema_alpha * (round.accepted - state.ema)
        ema = where(learn, ema, state.ema)
        learned = state.learned + learn
        since = learned - self.warmup_batches
        due = learn & (since > 0) & (since % self.update_interval == 0)
        tier = where(due, self._moved(self._tier(state), ema), state.tier)
        rest = due & (picked(self.steps, tier) == 0)
        rounds = state.rounds + 1
        resting = where(rest, rounds, state.resting)
        return SGLangEMAState(rounds, tier, ema, learned, resting)

    def _tier(self, state: SGLangEMAState) -> int:
        """The tier in use: the next one where plain decoding has lasted an interval."""
        rested = state.rounds - state.resting >= self.update_interval
        probe = rested & (picked(self.steps, state.tier) == 0)
        return minimum(state.tier + probe, len(self.steps) - 1)

    def _moved(self, tier: int, ema: float) -> int:
        """The tier the average calls for."""
        down = up = 0
        # Both thresholds rise, so counting those an average exceeds is walking from tier to tier.
        for below in self.steps[:-1]:
            down = down + (ema > (below - 0.5 if below else 0.5) + self.down_hysteresis)
            up = up + (ema > below - 0.5 + self.up_hysteresis)
        return where(down < tier, down, maximum(tier, up))
