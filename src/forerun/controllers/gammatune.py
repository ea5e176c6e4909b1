"""`gammatune`: follow the number of accepted tokens by a moving average."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from forerun.checks import between, flag, whole
from forerun.citations import bibtex
from forerun.controllers.base import LengthController, State
from forerun.errors import require
from forerun.types import FloatArray, IntArray, RoundOutcome, Stop

if TYPE_CHECKING:
    from forerun.controllers.gammatune_plus import GammaTunePlus

EARLY_STOP = ("update", "expand", "skip")


@dataclass(frozen=True)
class GammaTuneState(State):
    """State of `GammaTune` and `GammaTunePlus`."""

    window: FloatArray
    """`(rows,)` γ̄, the smoothed window; γ is its ceiling."""


@dataclass(frozen=True)
class GammaTune(LengthController):
    """Set γ to a moving average of the accepted tokens, and reach further when all were accepted.

    *Helps* when predictability drifts and the best length is unknown: the result hardly depends
    on the starting length. *Hurts* when difficulty changes within a round, which it learns too
    late (`gammatune+` looks at the draft itself), and when speculation does not pay at all: it
    never drafts less than `low` tokens.

    Rule, with `A` accepted tokens in the round: if `A = γ` then `A ← A + δ`;
    `γ̄ ← min(γ_max, max(γ_min, (1 − η)·γ̄ + η·A))`; `γ ← ⌈γ̄⌉`.

    Args:
        length: γ̄ of the first round, tokens, `low ≤ length ≤ high`. The paper averages over
            starts from 1 to 24; 7 is ours (see `eta`).
        eta: η, weight of the newest round, in (0, 1]. The paper gives no value; ours, by a
            sweep over validation prompts (`benchmarks/results/sweep.md`).
        delta: δ, tokens added to a fully accepted round, ≥ 0. The paper gives no value; ours, by
            the same sweep.
        low: γ_min, tokens, ≥ 1. The paper gives no value; 1 is the smallest that can learn.
        high: γ_max, tokens. The paper gives no value; 24 is its largest starting length.
        literal: run Algorithm 1 as printed (see below).
        early_stop: what a fully accepted draft teaches that ended before γ by somebody's decision
            (the confidence threshold of `gammatune+`, a difficult token). The paper does not say.
            `"expand"`: `A + δ`, taking "all drafted were accepted" for "A = γ" (the default, best
            in the sweep); `"update"`: `A` as it is, which is below γ and so pulls the window down
            (the algorithm taken at its word); `"skip"`: nothing, as a longer draft was never
            tried.

    Deviations: the printed algorithm writes the expansion as `γ ← A + δ` and overwrites γ two
    lines later, so it has no effect; by default we follow the prose, which expands `A`
    (`literal=True` runs it as printed). Rounds cut short from outside with everything accepted
    (end of text, token budget, drafter exhausted) and rounds without a draft change nothing.

    Reference: Gautam et al. 2025, "Token-Driven GammaTune", §4.1 and Algorithm 1.
    """

    length: int = 7
    eta: float = 0.3
    delta: float = 4
    low: int = 1
    high: int = 24
    literal: bool = False
    early_stop: str = "expand"

    summary: ClassVar[str] = "moving average of accepted tokens, longer when all were accepted"
    paper: ClassVar[str] = "Gautam et al. 2025 (GammaTune)"
    bibtex: ClassVar[str] = bibtex("gammatune2025")

    def __post_init__(self) -> None:
        check(self)

    def start(self, rows: int) -> GammaTuneState:
        """State for `rows` new sequences."""
        return GammaTuneState(np.zeros(rows, dtype=np.int64), np.full(rows, float(self.length)))

    def limit(self, state: GammaTuneState) -> IntArray:
        """`(rows,)` γ = ⌈γ̄⌉."""
        return np.ceil(state.window).astype(np.int64)

    def observe(self, state: GammaTuneState, outcome: RoundOutcome) -> GammaTuneState:
        """Move the window towards what was accepted."""
        return updated(self, state, outcome)


def check(settings: GammaTune | GammaTunePlus) -> None:
    """Refuse settings out of range."""
    between("eta", settings.eta, 0, 1)
    require(settings.eta > 0, "eta", settings.eta, "above 0, or the window never moves")
    between("delta", settings.delta, 0, 1000)
    for name in ("length", "low", "high"):
        whole(name, getattr(settings, name), 1)
    low, high = settings.low, settings.high
    require(low <= high, "low", low, f"at most high={high}")
    require(low <= settings.length <= high, "length", settings.length, f"in {low}..{high}")
    flag("literal", settings.literal)
    known = ", ".join(EARLY_STOP)
    require(settings.early_stop in EARLY_STOP, "early_stop", settings.early_stop, f"one of {known}")


def updated(
    settings: GammaTune | GammaTunePlus, state: GammaTuneState, outcome: RoundOutcome
) -> GammaTuneState:
    """The state after a round, by the rule in `GammaTune`."""
    reached = (outcome.stopped_by == Stop.LIMIT) | (outcome.accepted >= state.window)
    early = outcome.full & ~reached
    learn = (outcome.drafted > 0) & ~outcome.censored
    expand = outcome.full
    if settings.early_stop == "skip":
        learn &= ~early
    elif settings.early_stop == "update":
        expand = expand & ~early
    accepted = outcome.accepted.astype(np.float64)
    if not settings.literal:
        accepted += np.where(expand, settings.delta, 0)
    # (1 − η)·γ̄ + η·A, written so that A = γ̄ leaves γ̄ exactly where it is.
    moved = state.window + settings.eta * (accepted - state.window)
    window = np.where(learn, np.clip(moved, settings.low, settings.high), state.window)
    return replace(state, rounds=state.rounds + 1, window=window)
