"""`hf-threshold`: stop drafting when the drafter becomes unsure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from forerun.checks import between, flag, whole
from forerun.citations import bibtex
from forerun.controllers.base import LengthController, State
from forerun.types import BoolArray, FloatArray, IntArray, RoundOutcome, Signals

MISS_WEIGHT = 3  # of a false negative against a false positive, as transformers sets it
MORE_SAMPLES_THAN = 5


@dataclass(frozen=True)
class HFThresholdState(State):
    """State of `HFThreshold`; the ring buffers have width 0 when the threshold is static."""

    threshold: FloatArray
    """`(rows,)` the threshold in force."""
    probs: FloatArray
    """`(rows, history)` ring buffer: probability of each judged draft token."""
    matched: BoolArray
    """`(rows, history)` ring buffer: whether the target agreed."""
    count: IntArray
    """`(rows,)` samples ever written; the next goes to `count % history`."""


@dataclass(frozen=True)
class HFThreshold(LengthController):
    """Stop at the first drafted token whose probability is below a threshold.

    *Helps* when the drafter's confidence predicts acceptance: it sees difficulty coming, inside
    the round, where history-based controllers only react after it. *Hurts* with an over- or
    under-confident drafter and at high temperature, where the probability of the sampled token is
    low although it will be accepted; the dynamic form repairs some of it. Drafters without
    probabilities (lookup) are never stopped.

    Rule: after drafting `x` stop if `draft(x) < τ`; `x` stays in the draft. Dynamic form: after
    each round append (`draft(x)`, matched) for every accepted token and for the first rejected
    one; with more than five samples, of both kinds, `τ ← argmin_t fpr(t) + 3·fnr(t)` over the
    ROC curve of these samples, i.e. over the probabilities seen.

    Args:
        threshold: τ (its starting value in the dynamic form), a probability in [0, 1]
            (`assistant_confidence_threshold`, 0.4 in `transformers`).
        dynamic: update τ after each round (`transformers` does whenever scikit-learn is
            installed).
        length: the most tokens per round, ≥ 0 (`num_assistant_tokens`, 20 in `transformers`).
        history: samples kept per row by the dynamic form, newest first, > 5 (ours).

    Deviations: `transformers` keeps all samples of all requests for ever, here each row keeps its
    own last `history`. Fully accepted drafts that were cut short from outside are not learned
    from. Costs are compared as exact integers, so ties always go to the highest threshold;
    `transformers` decides them by rounding error. Confidence is taken at temperature 1,
    `transformers` takes it after the logits processors.

    Reference: `ConfidenceCriteria` and `AssistedCandidateGenerator` in `transformers`; Mamou et
    al. 2024; the baseline "Assistant-Threshold" of Gautam et al. 2025.
    """

    threshold: float = 0.4
    dynamic: bool = False
    length: int = 20
    history: int = 512

    summary: ClassVar[str] = "stop when the drafted token's probability falls below a threshold"
    paper: ClassVar[str] = "Mamou et al. 2024; Gante 2023 (transformers)"
    bibtex: ClassVar[str] = bibtex("mamou2024", "gante2023")

    def __post_init__(self) -> None:
        between("threshold", self.threshold, 0, 1)
        flag("dynamic", self.dynamic)
        whole("length", self.length)
        whole("history", self.history, MORE_SAMPLES_THAN + 1)

    @property
    def signals(self) -> frozenset[str]:
        """The probability of the drafted token."""
        return frozenset({"chosen"})

    def start(self, rows: int) -> HFThresholdState:
        """State for `rows` new sequences."""
        shape = (rows, self.history if self.dynamic else 0)
        return HFThresholdState(
            rounds=np.zeros(rows, dtype=np.int64),
            threshold=np.full(rows, float(self.threshold)),
            probs=np.zeros(shape),
            matched=np.zeros(shape, dtype=bool),
            count=np.zeros(rows, dtype=np.int64),
        )

    def limit(self, state: HFThresholdState) -> IntArray:
        """`(rows,)` the most tokens per round."""
        return np.full(len(state), self.length, dtype=np.int64)

    def keep_going(self, state: HFThresholdState, drafted: IntArray, signals: Signals) -> BoolArray:
        """Whether the newest token was probable enough."""
        if signals.chosen is None:
            return np.ones(len(drafted), dtype=bool)
        return signals.chosen[:, -1] >= state.threshold

    def observe(self, state: HFThresholdState, outcome: RoundOutcome) -> HFThresholdState:
        """Extend the history and move the threshold (dynamic form)."""
        state = replace(state, rounds=state.rounds + 1)
        chosen = outcome.signals.chosen
        if not self.dynamic or chosen is None or chosen.shape[1] == 0:
            return state
        judged = np.minimum(outcome.accepted + 1, outcome.drafted)
        judged = np.where(outcome.censored, 0, judged)
        column = np.arange(chosen.shape[1])
        fits = column >= judged[:, None] - self.history
        row, at = np.nonzero((column < judged[:, None]) & fits)
        slot = (state.count[row] + at) % self.history
        probs, matched = state.probs.copy(), state.matched.copy()
        probs[row, slot] = chosen[row, at]
        matched[row, slot] = at < outcome.accepted[row]
        count = state.count + judged
        used = min(self.history, int(count.max(initial=0)))
        hits, valid = matched[:, :used], np.arange(used) < count[:, None]
        enough = (judged > 0) & (count > MORE_SAMPLES_THAN)
        enough &= (hits & valid).any(1) & (~hits & valid).any(1)
        threshold = state.threshold.copy()
        if enough.any():
            threshold[enough] = best_threshold(probs[enough, :used], hits[enough], valid[enough])
        return replace(state, threshold=threshold, probs=probs, matched=matched, count=count)


def best_threshold(probs: FloatArray, matched: BoolArray, valid: BoolArray) -> FloatArray:
    """`argmin_t fpr(t) + 3·fnr(t)` per row, where `prob ≥ t` predicts a match.

    The candidates are the valid probabilities of the row. A ROC curve also has the point "nothing
    is predicted to match" (threshold ∞), whose cost 3 can never win: predicting everything to
    match costs 1. Both kinds of samples must be present.

    >>> probs = np.array([[0.9, 0.8, 0.3, 0.2]])
    >>> matched = np.array([[True, True, False, False]])
    >>> best_threshold(probs, matched, np.ones((1, 4), dtype=bool))
    array([0.8])
    """
    order = np.argsort(np.where(valid, -probs, np.inf), axis=1, kind="stable")
    probs = np.take_along_axis(probs, order, 1)
    matched = np.take_along_axis(matched, order, 1)
    valid = np.take_along_axis(valid, order, 1)
    hits = (matched & valid).cumsum(1)
    alarms = (~matched & valid).cumsum(1)
    positives, negatives = hits[:, -1:], alarms[:, -1:]
    # fpr + 3·fnr multiplied by both class sizes: exact in integers.
    cost = alarms * positives + MISS_WEIGHT * (positives - hits) * negatives
    # Equal probabilities pass a threshold together: only the last of them is a point of the curve.
    point = valid.copy()
    point[:, :-1] &= (probs[:, :-1] != probs[:, 1:]) | ~valid[:, 1:]
    index = np.where(point, cost, np.iinfo(np.int64).max).argmin(1)
    return probs[np.arange(len(probs)), index]
