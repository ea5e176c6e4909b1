"""`gammatune+`: gammatune, and stop when the drafter's top probability is low."""

from dataclasses import dataclass

from forerun.checks import Share
from forerun.controllers.base import Threshold
from forerun.controllers.gammatune import GammaTuneState, Window


@dataclass(frozen=True)
class GammaTunePlus(Window, Threshold):
    """GammaTune between rounds, a confidence threshold within the round.

    Args:
        threshold: τ, a probability in [0, 1]; 0 never stops. The paper gives no value (its code
            base, `transformers`, has 0.4); ours, by a sweep over validation prompts
            (`benchmarks/results/sweep.md`).
        keep: whether the token at which the draft stopped stays in it. The paper does not say;
            `transformers` keeps it, and in the sweep keeping was better throughout. With
            `keep=False` a round may draft nothing.

    Reference: Gautam et al. 2025 (GammaTune+) [gammatune2025], §4.2.
    """

    threshold: Share = 0.3
    keep: bool = True

    signal = "top1"

    def sure(self, state: GammaTuneState, signal: float) -> bool:
        """Whether the drafter was sure enough of its newest token."""
        return signal >= self.threshold
