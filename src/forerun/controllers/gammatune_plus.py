"""`gammatune+`: gammatune, and stop when the drafter's top probability is low."""

from dataclasses import dataclass

from forerun.checks import Share
from forerun.controllers.base import Threshold
from forerun.controllers.gammatune import GammaTuneState, Window


@dataclass(frozen=True)
class GammaTunePlus(Window, Threshold):
    """GammaTune between rounds, a confidence threshold within the round.

    Args:
        length: γ̄ of the first round, tokens, `low ≤ length ≤ high` (ours; see `gammatune`).
        eta: η, weight of the newest round, in (0, 1] (ours; see `gammatune`).
        delta: δ, tokens added to a fully accepted round, ≥ 0 (ours; see `gammatune`).
        low: γ_min, tokens, ≥ 1 (ours; see `gammatune`).
        high: γ_max, tokens (the paper's largest start; see `gammatune`).
        literal: run Algorithm 1 as printed (see `gammatune`).
        early_stop: what a fully accepted draft teaches that ended early: `"update"`, `"expand"`
            or `"skip"` (see `gammatune`).
        expand: what a fully accepted round lengthens: `"average"` or `"next"` (see `gammatune`).
        persistent: whether a request starts from the window of the one before (see `gammatune`).
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
