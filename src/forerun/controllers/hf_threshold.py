"""`hf-threshold`: stop when the drafted token's probability falls below a threshold."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from forerun.checks import Share, Whole, Within
from forerun.controllers.base import Persistent, Threshold
from forerun.controllers.elementwise import anywhere, largest, where
from forerun.types import BoolArray, FloatArray, RoundOutcome

MISS_WEIGHT = 3  # of a false negative against a false positive, as transformers sets it
MORE_SAMPLES_THAN = 5


class HFThresholdState(NamedTuple):
    """State of `HFThreshold`; there are no samples when the threshold is static."""

    threshold: float  # the threshold in force
    probs: FloatArray
    """`(history,)` probability of each judged draft token, newest first; −1 where there is none."""
    matched: BoolArray  # `(history,)` whether the target agreed


@dataclass(frozen=True)
class HFThreshold(Persistent, Threshold):
    """Stop at the first drafted token whose probability is below a threshold.

    Args:
        threshold: τ (its starting value in the dynamic form), a probability in [0, 1]
            (`assistant_confidence_threshold`, 0.4 in `transformers`).
        dynamic: update τ after each round (`transformers` does whenever scikit-learn is
            installed).
        length: the most tokens per round, ≥ 0 (`num_assistant_tokens`, 20 in `transformers`).
        history: samples kept per row by the dynamic form, newest first, > 5 (ours).
        persistent: whether a request starts from the threshold and samples of the one that ended
            last, instead of afresh. Requests with a seed that are sampled always start afresh.

    Reference: Mamou et al. 2024 [mamou2024]; Gante 2023 (transformers) [gante2023], its
    `ConfidenceCriteria` and `AssistedCandidateGenerator`; the baseline "Assistant-Threshold" of
    Gautam et al. 2025.
    """

    threshold: Share = 0.4
    dynamic: bool = False
    length: Whole = 20
    history: Annotated[int, Within(MORE_SAMPLES_THAN + 1)] = 512
    persistent: bool = False

    signal = "chosen"

    def first(self) -> HFThresholdState:
        kept = self.history if self.dynamic else 0
        return HFThresholdState(
            float(self.threshold), np.full(kept, -1.0), np.zeros(kept, dtype=bool)
        )

    def sure(self, state: HFThresholdState, signal: float) -> bool:
        """Whether the newest token was probable enough."""
        return signal >= state.threshold

    def observe(self, state: HFThresholdState, round: RoundOutcome) -> HFThresholdState:
        """Extend the samples and move the threshold (dynamic form)."""
        judged = round.judged
        most = largest(judged)
        if not self.dynamic or not most or not round.shows("chosen"):
            return state
        newest_first = range(most - 1, -1, -1)
        probs = np.stack([round.tokens[i].chosen for i in newest_first])
        matched = np.stack([i < round.accepted for i in newest_first])
        # The newest tokens of those that judged fewer are further down.
        index = np.add.outer(np.arange(self.history), most - judged)
        probs = np.take_along_axis(np.concatenate([probs, state.probs]), index, 0)
        matched = np.take_along_axis(np.concatenate([matched, state.matched]), index, 0)
        valid = probs >= 0
        enough = (judged > 0) & (valid.sum(0) > MORE_SAMPLES_THAN)
        enough = enough & (matched & valid).any(0) & (~matched & valid).any(0)
        threshold = state.threshold
        if anywhere(enough):
            used = largest(valid.sum(0))
            threshold = where(enough, best_threshold(probs[:used], matched[:used]), threshold)
        return HFThresholdState(threshold, probs, matched)


def best_threshold(probs: FloatArray, matched: BoolArray) -> Any:
    """`argmin_t fpr(t) + 3·fnr(t)`, where `prob ≥ t` predicts a match.

    The candidates are the probabilities, along the first axis; negative ones are no samples. A ROC
    curve also has the point "nothing is predicted to match" (threshold ∞), whose cost 3 can never
    win: predicting everything to match costs 1. Both kinds of samples must be present.

    >>> probs = np.array([0.9, 0.8, 0.3, 0.2])
    >>> float(best_threshold(probs, np.array([True, True, False, False])))
    0.8
    """
    order = np.argsort(-probs, axis=0, kind="stable")
    probs = np.take_along_axis(probs, order, 0)
    matched = np.take_along_axis(matched, order, 0)
    valid = probs >= 0
    hits = (matched & valid).cumsum(0)
    alarms = (~matched & valid).cumsum(0)
    positives, negatives = hits[-1], alarms[-1]
    # fpr + 3·fnr multiplied by both class sizes: exact in integers.
    cost = alarms * positives + MISS_WEIGHT * (positives - hits) * negatives
    # Equal probabilities pass a threshold together: only the last of them is a point of the curve.
    point = valid.copy()
    point[:-1] &= probs[:-1] != probs[1:]
    index = np.where(point, cost, np.iinfo(np.int64).max).argmin(0)
    return np.take_along_axis(probs, index[None], 0)[0]
