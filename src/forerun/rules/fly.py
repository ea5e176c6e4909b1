"""`fly`: forgive a greedy mismatch at high entropy if the next tokens match."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from forerun.arrays import by_torch, cast, entropy, softmax
from forerun.checks import Whole, Within
from forerun.rules.base import ComparedRow, PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.types import Array


@dataclass(frozen=True)
class FLy(PositionRule):
    """FLy's two tiers for greedy requests: an entropy gate, then a deferred window.

    Args:
        entropy: θ, in [0, 1], of the entropy over `log|V|` (0.3 in the paper).
        window: W, tokens, ≥ 0 (6 in the paper).
        top: n ≥ 1 takes the entropy terms of the n most likely tokens only, in nats (3 in the
            authors' code, against the same θ); 0, the default, is the paper's normalised entropy.

    Reference: Li et al. 2025 (FLy) [fly2025], §3.
    """

    entropy: Annotated[float, Within(0, 10)] = 0.3
    window: Whole = 6
    top: Whole = 0

    def weigh(self, odds: Odds) -> Weighed:
        """`standard`, and 1 where a greedy mismatch is forgiven."""
        most = math.log(odds.logits.shape[-1])
        match = odds.match & odds.inside
        seen = match.cumsum(-1)
        # Positions behind the end of the draft match nothing: their window does not fit.
        ahead = seen[:, (odds.place + self.window).clip(None, odds.width - 1)] - seen
        asked = ~match & (ahead == self.window) & odds.greedy
        asked &= odds.tokens.logits[..., 0] > -np.inf
        forgiven = odds.lib.zeros_like(asked)
        if asked.any():
            forgiven[asked] = self._unsure(odds.take(asked), most)[:, 0]
        return Weighed(
            odds.lib.where(forgiven, 1, odds.ratio), lambda at: cast(at.at(forgiven), at.dtype)
        )

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Where the window behind the first token that is not the arg-max matches."""
        first, last = compared.accepted + 1, compared.accepted + 1 + self.window
        drafted = compared.drafted
        return len(drafted) >= last and list(drafted[first:last]) == list(compared.best[first:last])

    def _unsure(self, odds: Odds, most: float) -> Array:
        """`(rows, K)` whether the target's entropy, `most` nats at most, is above the gate."""
        probs = softmax(odds.logits)
        if self.top:
            n = min(self.top, probs.shape[-1])
            return entropy(by_torch(lambda x: x.topk(n).values, probs)) >= self.entropy
        return entropy(probs) >= self.entropy * most
