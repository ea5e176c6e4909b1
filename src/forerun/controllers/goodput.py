"""`goodput`: draft on while the next token is expected to pay for itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from forerun.checks import between, whole
from forerun.citations import bibtex
from forerun.controllers.base import LengthController, State
from forerun.errors import require
from forerun.types import BoolArray, FloatArray, IntArray, RoundOutcome, Signals

MAX_LOG_ODDS = 6.0


@dataclass(frozen=True)
class GoodputState(State):
    """State of `Goodput`: two estimates of acceptance, and what each has seen (fading)."""

    slope: FloatArray
    """`(rows,)` ω."""
    bias: FloatArray
    """`(rows, high)` b by position."""
    slope_info: FloatArray
    """`(rows,)` `Σ w·f²`: how much is known of ω (entries of `XᵀWX`, as the next two)."""
    cross_info: FloatArray
    """`(rows, high)` `Σ w·f` by position."""
    bias_info: FloatArray
    """`(rows, high)` `Σ w` by position."""
    hits: FloatArray
    """`(rows,)` tokens accepted."""
    tries: FloatArray
    """`(rows,)` tokens judged."""


@dataclass(frozen=True)
class Goodput(LengthController):
    """Stop at the length with the most tokens per time, by learned acceptance and given costs.

    *Helps* when confidence predicts acceptance but is off in scale: it is calibrated to what was
    accepted, per row, and weighed against cost, so there is no threshold to tune. *Hurts* when the
    costs given are not those of the machine, and a little in short requests, which end before the
    calibration has learned much. It always drafts one token, so it never becomes plain decoding.

    Rule, with `f = logit(max_v draft(v))`: `p̂_k = σ(ω·f_k + b_k)`; survival `a_j = Π_{k≤j} p̂_k`;
    `Θ(γ) = (1 + Σ_{j≤γ} a_j) / (1 + γ·(1/c + v))`, committed tokens per target pass of time; after
    n tokens draft another while `Θ(n + 1) > Θ(n)`. The next token's own f is not known before it
    is drafted: its `p̂_{n+1}` is α, the row's mean acceptance. As `a_j` never rises, Θ has one
    peak, and the first length that gains nothing is the best. Drafters without a distribution
    (lookup) have `p̂ = α` throughout: `Θ(γ) = (1 − α^(γ+1)) / ((1 − α)·(1 + γ·(1/c + v)))`.

    After each round one Newton step of ridge logistic regression on its judged tokens, with
    `w = p̂·(1 − p̂)`: `(ω, b) ← (ω, b) + (XᵀWX + κ/4·I)⁻¹·Xᵀ(matched − p̂)`, ω shared by the
    positions and at least 0; `α ← (κ·α₀ + accepted) / (κ + judged)`; the sums fade by
    `1 − 1/window` a round.

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

    Deviations: DSpark and vLLM draft a whole block and then choose, over the whole batch, which
    (row, position) slots to verify. Rows never influence each other here, so each chooses for
    itself, and as every drafted token costs a step it is chosen before it is drafted; the token
    just drafted stays. Their cost is a table profiled at start-up, ours a line. vLLM fits one
    model to all requests every 100 steps, starting from ω = 0 and untrimmed drafts; ours is fitted
    per row every round and starts from `p̂ = max_v draft(v)` (ω = 1, b = 0). vLLM clips f to ±40,
    we to ±6, as in a single row one surprise at f = 40 would outweigh all else. vLLM takes f at
    the request's temperature, we at 1. Only the first `high` tokens of a round teach.

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

    def start(self, rows: int) -> GoodputState:
        """State for `rows` new sequences."""
        flat, wide = np.zeros(rows), np.zeros((rows, self.high))
        return GoodputState(
            rounds=np.zeros(rows, dtype=np.int64),
            slope=np.ones(rows),
            bias=wide,
            slope_info=flat,
            cross_info=wide,
            bias_info=wide,
            hits=flat,
            tries=flat,
        )

    def limit(self, state: GoodputState) -> IntArray:
        """`(rows,)` the most tokens per round."""
        return np.full(len(state), self.high, dtype=np.int64)

    def keep_going(self, state: GoodputState, drafted: IntArray, signals: Signals) -> BoolArray:
        """Whether another token is expected to raise the tokens per time."""
        mean = (self.damping * self.acceptance + state.hits) / (self.damping + state.tries)
        if signals.top1 is None:
            chance = np.repeat(mean[:, None], self.high, 1)
        else:
            chance = predicted(state, log_odds(signals.top1, self.high))
        inside = np.arange(self.high) < drafted[:, None]
        survival = np.where(inside, chance, 1).cumprod(1)
        expected = 1 + (survival * inside).sum(1)
        step = 1 / self.cost + self.width_cost
        # Θ(n + 1) > Θ(n), both multiplied by their times.
        better: BoolArray = survival[:, -1] * mean * (1 + drafted * step) > expected * step
        return better

    def observe(self, state: GoodputState, outcome: RoundOutcome) -> GoodputState:
        """Fade what was seen, add this round, and take one Newton step."""
        judged = np.minimum(np.minimum(outcome.accepted + 1, outcome.drafted), self.high)
        judged = np.where(outcome.censored, 0, judged)
        accepted = np.minimum(outcome.accepted, judged)
        fade = np.where(judged > 0, 1 - 1 / self.window, 1)
        state = replace(
            state,
            rounds=state.rounds + 1,
            hits=fade * state.hits + accepted,
            tries=fade * state.tries + judged,
        )
        top1 = outcome.signals.top1
        if top1 is None or not judged.any():
            return state
        seen = np.arange(self.high) < judged[:, None]
        matched = np.arange(self.high) < accepted[:, None]
        f = log_odds(top1, self.high)
        chance = predicted(state, f)
        weight = np.where(seen, chance * (1 - chance), 0)
        miss = np.where(seen, matched - chance, 0)
        slope_info = fade * state.slope_info + (weight * f * f).sum(1)
        cross_info = fade[:, None] * state.cross_info + weight * f
        bias_info = fade[:, None] * state.bias_info + weight
        # XᵀWX + κ/4 is an arrowhead (one ω, each b alone), solved by eliminating the b. An
        # observation tells at most ¼ about b, so κ of them tell κ/4.
        known = bias_info + self.damping / 4
        left = slope_info + self.damping / 4 - (cross_info**2 / known).sum(1)
        turn = ((miss * f).sum(1) - (cross_info * miss / known).sum(1)) / left
        turn = np.maximum(turn, -state.slope)
        shift = (miss - cross_info * turn[:, None]) / known
        learn = judged > 0
        return replace(
            state,
            slope=np.where(learn, state.slope + turn, state.slope),
            bias=np.where(learn[:, None], state.bias + shift, state.bias),
            slope_info=slope_info,
            cross_info=cross_info,
            bias_info=bias_info,
        )


def log_odds(top1: FloatArray, width: int) -> FloatArray:
    """`(rows, width)` log-odds of the probabilities, clipped; 0 beyond those given.

    A fixed width keeps sums exactly the same whoever shares the batch.

    >>> log_odds(np.array([[0.5, 1.0]]), 3)
    array([[0., 6., 0.]])
    """
    edge = 1 / (1 + np.exp(-MAX_LOG_ODDS))
    inside = np.clip(top1[:, :width], 1 - edge, edge)
    out = np.zeros((len(top1), width))
    out[:, : inside.shape[1]] = np.log(inside / (1 - inside))
    return out


def predicted(state: GoodputState, f: FloatArray) -> FloatArray:
    """`(rows, high)` `p̂ = σ(ω·f + b)`."""
    chance: FloatArray = 1 / (1 + np.exp(-(state.slope[:, None] * f + state.bias)))
    return chance
