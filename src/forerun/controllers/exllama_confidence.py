"""`exllama-confidence`: stop when a rejection is likely, by bins of confidence counted online."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from forerun.checks import Count, Share, Within
from forerun.controllers.base import Persistent
from forerun.controllers.calibrated import log_odds
from forerun.controllers.elementwise import entry, floor, largest, where
from forerun.types import FloatArray, RoundOutcome, Token

BINS = 13  # of log-odds, one unit each, of which those beyond ±6 are the first's and the last's

ROUNDING = 1e-9  # of the logarithm, which must not move the odds of its ends into bins beyond


class ExLlamaConfidenceState(NamedTuple):
    """State of `ExLlamaConfidence`; arrays are `(BINS,)`."""

    tested: FloatArray  # tokens judged, fading
    accepted: FloatArray  # of these kept
    chances: FloatArray  # what they say: chance that a token is kept if all before it are


@dataclass(frozen=True)
class ExLlamaConfidence(Persistent):
    """Stop when the chance that all drafted tokens are kept, by what was kept of tokens as sure.

    Args:
        confidence: c, the chance below which a draft stops, in [0, 1]; 0.4 in exllamav3.
        decay: λ, share of the counts that is left after a round, in [0, 1]; 0.995 in exllamav3.
        least: count of a bin that is believed, > 0; 8 in exllamav3.
        burn_in: count of all bins from which drafts are stopped at all, ≥ 0; 64 in exllamav3.
        high: the most tokens per round, ≥ 1 (`num_draft_tokens`, 4 in exllamav3).
        persistent: start from what the last request has counted, as exllamav3 does.

    Reference: turboderp 2026 (exllamav3) [exllamav3], `DraftConfidenceCalibrator` in version 1.6.5,
    `generator/draft_confidence.py`.
    """

    confidence: Share = 0.4
    decay: Share = 0.995
    least: Annotated[float, Within(0, 1e9, above=True)] = 8
    burn_in: Annotated[float, Within(0, 1e9)] = 64
    high: Count = 4
    persistent: bool = True

    stops_early = True

    def signals(self, certain: bool) -> frozenset[str]:
        """The probability of the most likely token."""
        return frozenset({"top1"})

    def first(self) -> ExLlamaConfidenceState:
        return ExLlamaConfidenceState(np.zeros(BINS), np.zeros(BINS), np.ones(BINS))

    def limit(self, state: ExLlamaConfidenceState) -> int:
        return self.high

    def step(
        self, state: ExLlamaConfidenceState, memo: float | None, token: Token
    ) -> tuple[bool, float]:
        """Whether all drafted tokens are likely enough to be kept; the chance is the memo."""
        reach = 1.0 if memo is None else memo
        if token.top1 is not None:
            reach = reach * entry(state.chances, bin_of(token.top1))
        return reach >= self.confidence, reach

    def observe(self, state: ExLlamaConfidenceState, round: RoundOutcome) -> ExLlamaConfidenceState:
        """Count the judged tokens, then let the counts fade."""
        judged = round.judged
        if not (most := largest(judged)) or not round.shows("top1"):
            return state
        tested, accepted = state.tested, state.accepted
        for place in range(most):
            own = np.equal.outer(np.arange(BINS), bin_of(round.tokens[place].top1))
            tested = tested + (own & (place < judged))
            accepted = accepted + (own & (place < judged) & (place < round.accepted))
        fade = where(judged > 0, self.decay, 1.0)
        return self._counted(fade * tested, fade * accepted)

    def _counted(self, tested: FloatArray, accepted: FloatArray) -> ExLlamaConfidenceState:
        """With the rate of the nearest bin that is believed, at or below each, else above."""
        believed = tested >= self.least
        rates = accepted / np.maximum(tested, self.least)
        places = np.arange(BINS).reshape(-1, *[1] * (tested.ndim - 1))
        below = np.maximum.accumulate(np.where(believed, places, -1), 0)
        nearest = np.where(below < 0, believed.argmax(0), below)
        ready = (tested.sum(0) >= self.burn_in) & believed.any(0)
        chances = np.where(ready, np.take_along_axis(rates, nearest, 0), 1.0)
        return ExLlamaConfidenceState(tested, accepted, chances)


def bin_of(top1: Any) -> Any:
    """The bin of a probability, from 0 on.

    >>> bin_of(0.5), bin_of(1.0), bin_of(0.001)
    (6, 12, 0)
    """
    odds = log_odds(where(top1 == top1, top1, 0.0))  # what is no number is not sure
    return floor(odds + ROUNDING) + BINS // 2
