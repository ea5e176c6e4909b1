"""`calibrated`: stop when a rejection is likely, by probabilities calibrated online."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from forerun.checks import Count, Share, Within
from forerun.controllers.base import Chance, Forecaster, Outlook
from forerun.controllers.elementwise import (
    clip,
    entries,
    largest,
    log,
    maximum,
    minimum,
    sigmoid,
    where,
)
from forerun.types import FloatArray, RoundOutcome, Token

EDGE = sigmoid(6.0)  # probabilities above it, and below one less it, count as it


class CalibratedState(NamedTuple):
    """State of `Goodput`: two estimates of acceptance, and what each has seen (fading)."""

    slope: float  # ω
    bias: FloatArray  # `(high,)` b by position
    slope_info: float  # `Σ w·f²`: how much is known of ω (entries of `XᵀWX`, as the next two)
    cross_info: FloatArray  # `(high,)` `Σ w·f` by position
    bias_info: FloatArray  # `(high,)` `Σ w` by position
    hits: float  # tokens accepted
    tries: float  # tokens judged
    deepest: int  # most positions of a round that were judged: nothing is known of those beyond


class CalibratedDraft(NamedTuple):
    """Of a round so far."""

    tokens: int  # n, how many
    survival: float  # `a_n`; beyond `high` tokens that of the last of them


@dataclass(frozen=True)
class Calibrated(Forecaster):
    """Forecast by the draft's top probability, calibrated to what is accepted (vLLM).

    Args:
        high: positions that are calibrated, ≥ 1; for its own word the most tokens per round (ours).
        acceptance: α₀, in [0, 1] (ours; vLLM has no such mean).
        damping: κ, weight of the starting values in observations, > 0 (vLLM: a Newton step is
            shortened by n/(n + 50)).
        window: rounds over which what was seen fades, ≥ 1 (vLLM fits to the last 100 steps).
        threshold: for its own word, in [0, 1]; see `survival`.

    Reference: `OnlineAcceptanceEstimator` in vLLM 2026 [vllm2026] (`p̂`, from its "adaptive
    verification"); Cheng et al. 2026 (DSpark) [dspark2026], §3.2 (survival).
    """

    high: Count = 20
    acceptance: Share = 0.8
    damping: Annotated[float, Within(0, 1e9, above=True)] = 50
    window: Annotated[float, Within(1, 1e9)] = 100
    threshold: Share = 0.4

    def signals(self, certain: bool) -> frozenset[str]:
        """The probability of the most likely token."""
        return frozenset({"top1"})

    def start(self, certain: bool = True, before: Any = None) -> CalibratedState:
        """`p̂ = max_v draft(v)`, and nothing seen."""
        zeros = np.zeros(self.high)
        return CalibratedState(1.0, zeros, 0.0, zeros, zeros, 0.0, 0.0, 0)

    def limit(self, state: CalibratedState) -> int:
        return self.high

    def outlook(self, state: CalibratedState) -> Outlook:
        mean = self._mean(state)
        return Outlook(mean, mean)

    def forecast(
        self, state: CalibratedState, memo: CalibratedDraft | None, token: Token
    ) -> tuple[Chance, CalibratedDraft]:
        """Survival of the drafted tokens; the next one is like the mean."""
        count, survival = memo or CalibratedDraft(0, 1.0)
        mean = self._mean(state)
        if count < self.high:
            survival = survival * (
                mean
                if token.top1 is None
                else sigmoid(state.slope * log_odds(token.top1) + state.bias[count])
            )
        return Chance(survival, mean), CalibratedDraft(count + 1, survival)

    def observe(self, state: CalibratedState, round: RoundOutcome) -> CalibratedState:
        """Fade what was seen, add this round, and take one Newton step."""
        judged = minimum(round.judged, self.high)
        accepted = minimum(round.accepted, judged)
        fade = where(judged > 0, 1 - 1 / self.window, 1.0)
        state = state._replace(hits=fade * state.hits + accepted, tries=fade * state.tries + judged)
        most = largest(judged)
        if not most or not round.shows("top1"):
            return state
        deepest = maximum(state.deepest, judged)
        tables = state.bias.copy(), fade * state.cross_info, fade * state.bias_info
        bias, cross, info = map(entries, tables)
        slope_info, gradient = fade * state.slope_info, 0.0
        miss, known = [], []
        for k in range(largest(deepest)):
            miss.append(0.0)
            if k < most:
                f, seen = log_odds(round.tokens[k].top1), k < judged
                chance = sigmoid(state.slope * f + bias[k])
                weight = seen * chance * (1 - chance)
                miss[k] = seen * ((k < accepted) - chance)
                gradient = gradient + miss[k] * f
                moment = weight * f
                slope_info = slope_info + moment * f
                cross[k], info[k] = cross[k] + moment, info[k] + weight
            known.append(info[k] + self.damping / 4)
        # XᵀWX + κ/4 is an arrowhead (one ω, each b alone), solved by eliminating the b. An
        # observation tells at most ¼ about b, so κ of them tell κ/4.
        left = slope_info + self.damping / 4
        for k, own in enumerate(known):
            share = cross[k] / own
            gradient, left = gradient - share * miss[k], left - share * cross[k]
        turn = maximum(gradient / left, -state.slope)
        for k, own in enumerate(known):
            bias[k] = bias[k] + (miss[k] - cross[k] * turn) / own
        return state._replace(
            slope=state.slope + turn,
            bias=tables[0],
            slope_info=slope_info,
            cross_info=tables[1],
            bias_info=tables[2],
            deepest=deepest,
        )

    def _mean(self, state: CalibratedState) -> float:
        return (self.damping * self.acceptance + state.hits) / (self.damping + state.tries)


def log_odds(top1: Any) -> Any:
    """Log-odds of a probability, clipped.

    >>> log_odds(0.5), round(log_odds(1.0), 9)
    (0.0, 6.0)
    """
    inside = clip(top1, 1 - EDGE, EDGE)
    return log(inside / (1 - inside))
