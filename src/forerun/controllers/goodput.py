"""`goodput`: draft on while the next token is expected to pay for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from forerun.checks import between, whole
from forerun.citations import bibtex
from forerun.controllers.base import LengthController
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
from forerun.costs import Costs
from forerun.errors import require
from forerun.types import FloatArray, Round, Token

EDGE = sigmoid(6.0)
"""Probabilities above it, and below one less it, count as it."""


class GoodputState(NamedTuple):
    """State of `Goodput`: two estimates of acceptance, and what each has seen (fading)."""

    slope: float
    """ω."""
    bias: FloatArray
    """`(high,)` b by position."""
    slope_info: float
    """`Σ w·f²`: how much is known of ω (entries of `XᵀWX`, as the next two)."""
    cross_info: FloatArray
    """`(high,)` `Σ w·f` by position."""
    bias_info: FloatArray
    """`(high,)` `Σ w` by position."""
    hits: float
    """Tokens accepted."""
    tries: float
    """Tokens judged."""
    deepest: int
    """Most positions of a round that were judged: nothing is known of those beyond."""


class Drafted(NamedTuple):
    """Of a round so far."""

    tokens: int
    """n, how many."""
    survival: float
    """`a_n`; beyond `high` tokens that of the last of them."""
    expected: float
    """`1 + Σ_{j≤n} a_j`."""


@dataclass(frozen=True)
class Goodput(LengthController):
    """Stop at the length with the most tokens per time, by learned acceptance and given costs.

    Args:
        cost: c, one target pass over one draft step, > 0 (ours: 4.2, measured for the shipped
            pair, `benchmarks/results/overhead.md`).
        width_cost: v, what each further token to verify adds to a target pass, in target passes,
            ≥ 0 (ours).
        high: the most tokens per round, ≥ 1 (ours).
        acceptance: α₀, in [0, 1] (ours; vLLM starts every `p̂` at σ(1.5) = 0.82).
        damping: κ, weight of the starting values in observations, > 0 (vLLM: a Newton step is
            shortened by n/(n + 50)).
        window: rounds over which what was seen fades, ≥ 1 (vLLM fits to the last 100 steps).

    Reference: Liu et al. 2024, "TurboSpec" (goodput as the objective); Cheng et al. 2026,
    "DSpark", §3.2 and Algorithm 1 (survival, cost table, stop at the first that gains nothing);
    `OnlineAcceptanceEstimator` in vLLM (`p̂`, from its "adaptive verification").
    """

    cost: float = 4.2
    width_cost: float = 0.02
    high: int = 20
    acceptance: float = 0.8
    damping: float = 50
    window: float = 100

    summary: ClassVar[str] = "draft on while expected tokens per time rise, calibrated online"
    paper: ClassVar[str] = "Liu et al. 2024 (TurboSpec); Cheng et al. 2026 (DSpark)"
    bibtex: ClassVar[str] = bibtex("turbospec2024", "dspark2026")

    def __post_init__(self) -> None:
        between("cost", self.cost, 0, 1e9)
        require(self.cost > 0, "cost", self.cost, "above 0: a draft step costs something")
        between("width_cost", self.width_cost, 0, 1000)
        whole("high", self.high, 1)
        between("acceptance", self.acceptance, 0, 1)
        between("damping", self.damping, 0, 1e9)
        require(self.damping > 0, "damping", self.damping, "above 0, or nothing holds the start")
        between("window", self.window, 1, 1e9)

    @property
    def signals(self) -> frozenset[str]:
        """The probability of the most likely token."""
        return frozenset({"top1"})

    @property
    def asks(self) -> bool:
        """Always."""
        return True

    def start(self) -> GoodputState:
        """`p̂ = max_v draft(v)`, and nothing seen."""
        zeros = np.zeros(self.high)
        return GoodputState(1.0, zeros, 0.0, zeros, zeros, 0.0, 0.0, 0)

    def limit(self, state: GoodputState, costs: Costs) -> int:
        """The most tokens per round."""
        return self.high

    def fold(self, state: GoodputState, memo: Drafted | None, token: Token) -> Drafted:
        """Survival of the drafted tokens and the sum of survivals, with one more."""
        count, survival, expected = memo or Drafted(0, 1.0, 1.0)
        if count < self.high:
            survival = survival * (
                self._mean(state)
                if token.top1 is None
                else sigmoid(state.slope * log_odds(token.top1) + state.bias[count])
            )
            expected = expected + survival
        return Drafted(count + 1, survival, expected)

    def keep_going(self, state: GoodputState, costs: Costs, memo: Drafted) -> bool:
        """Whether another token is expected to raise the tokens per time."""
        step = 1 / self.cost + self.width_cost
        # Θ(n + 1) > Θ(n), both multiplied by their times.
        gain = memo.survival * self._mean(state) * (1 + memo.tokens * step)
        better: bool = gain > memo.expected * step
        return better

    def observe(self, state: GoodputState, costs: Costs, round: Round) -> GoodputState:
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

    def _mean(self, state: GoodputState) -> float:
        """α, the mean acceptance."""
        return (self.damping * self.acceptance + state.hits) / (self.damping + state.tries)


def log_odds(top1: Any) -> Any:
    """Log-odds of a probability, clipped.

    >>> log_odds(0.5), round(log_odds(1.0), 9)
    (0.0, 6.0)
    """
    inside = clip(top1, 1 - EDGE, EDGE)
    return log(inside / (1 - inside))
