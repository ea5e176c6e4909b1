"""`adaedl`: stop by an entropy bound, adapted to a wanted acceptance rate."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from forerun.checks import Share, Whole, Within
from forerun.controllers.base import Threshold
from forerun.controllers.elementwise import clip, maximum, sqrt, where
from forerun.types import RoundOutcome


class AdaEDLState(NamedTuple):
    """State of `AdaEDL`."""

    threshold: float  # λ, the threshold in force
    rate: float  # aR, the smoothed acceptance rate


@dataclass(frozen=True)
class AdaEDL(Threshold):
    """Stop when a lower bound on the probability of acceptance falls below a moving threshold.

    Args:
        threshold: λ of the first round, a probability in [0, 1]. The paper tries 0.3 to 0.9 and
            settles on none; 0.6, in the middle, is ours.
        factor: γ, in [0, 10], which turns entropy into a bound; 0.2 in the paper. 0 never stops.
        target: α, the wanted acceptance rate in [0, 1]; 0.9 in the paper.
        epsilon: ε, the step of λ', in [0, 1]; 0.01 in the paper.
        beta1: β₁, weight of the past in AR, in [0, 1]; 0.5 in the paper.
        beta2: β₂, weight of the past in λ, in [0, 1]; 0.9 in the paper.
        length: L, the most tokens per round, ≥ 0; 20 is ours, as in `hf-threshold`.
        keep: whether the token at which the draft stopped stays in it. The paper asks before the
            token is drafted, which is `keep=False`; but a round may then draft nothing, `n/d` has
            no value and a λ that is too high never falls. So the default True is ours.

    Reference: Agrawal et al. 2024 (AdaEDL) [adaedl2024], §3 and Algorithm 1; α, β₁, β₂ and ε, and
    the form of the update, are those of Zhang et al. 2023 (Draft & Verify) [zhang2023].
    """

    threshold: Share = 0.6
    factor: Annotated[float, Within(0, 10)] = 0.2
    target: Share = 0.9
    epsilon: Share = 0.01
    beta1: Share = 0.5
    beta2: Share = 0.9
    length: Whole = 20
    keep: bool = True

    signal = "entropy"

    def start(self, certain: bool = True, before: Any = None) -> AdaEDLState:
        return AdaEDLState(float(self.threshold), float(self.target))

    def sure(self, state: AdaEDLState, signal: float) -> bool:
        """Whether the bound on the newest token's acceptance is high enough."""
        # Rounding can leave the entropy of a one-hot distribution a little below 0.
        return 1 - sqrt(maximum(self.factor * signal, 0.0)) >= state.threshold

    def observe(self, state: AdaEDLState, round: RoundOutcome) -> AdaEDLState:
        """Move the threshold towards the wanted acceptance rate."""
        share = round.accepted / maximum(round.drafted, 1)
        rate = self.beta1 * state.rate + (1 - self.beta1) * share
        relaxed = where(round.accepted == self.length, 0.0, -self.epsilon)
        nudge = where(rate < self.target, self.epsilon, relaxed)
        # β₂·λ + (1 − β₂)·(λ + nudge), written so that a nudge of 0 leaves λ exactly where it is.
        threshold = clip(state.threshold + (1 - self.beta2) * nudge, 0.0, 1.0)
        return where(round.teaches, AdaEDLState(threshold, rate), state)
