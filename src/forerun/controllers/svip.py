"""`svip`: stop when the entropy of the draft distribution is high."""

from dataclasses import dataclass
from typing import Annotated

from forerun.checks import Whole, Within
from forerun.controllers.base import State, Threshold
from forerun.controllers.elementwise import maximum, sqrt


@dataclass(frozen=True)
class SVIP(Threshold):
    """Stop at the first token whose draft distribution has a high entropy.

    Args:
        threshold: h, ≥ 0 and at most 10; 0.3 in the authors' code, which with their c stops above
            0.6 nats.
        factor: c, in [0, 10]; 0.15 in the authors' code. 0 never stops.
        length: the most tokens per round, ≥ 0; 40 in the authors' code.
        keep: whether the token at which the draft stopped stays in it, as it does in the authors'
            code. With `keep=False` a round may draft nothing.

    Reference: Zhang et al. 2024 (SVIP) [svip2024]; `vanilla-sd/eval_specbench.py` in the authors'
    repository (Geralt-Targaryen/SVIP).

    >>> [SVIP().sure((), entropy) for entropy in (0.59, 0.61)]
    [True, False]
    """

    threshold: Annotated[float, Within(0, 10)] = 0.3
    factor: Annotated[float, Within(0, 10)] = 0.15
    length: Whole = 40
    keep: bool = True

    signal = "entropy"

    def sure(self, state: State, signal: float) -> bool:
        """Whether the newest token's distribution was certain enough."""
        # Rounding can leave the entropy of a one-hot distribution a little below 0.
        return sqrt(maximum(self.factor * signal, 0.0)) <= self.threshold
