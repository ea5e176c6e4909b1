"""`spec-verification`: keep a token of the target's top ranks, close enough to its best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from forerun.arrays import by_torch, cast
from forerun.checks import Count, Within
from forerun.rules.base import ComparedRow, PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.types import Array


@dataclass(frozen=True)
class SpecVerification(PositionRule):
    """SpecDec's relaxed verification: among the target's top β, and within τ of its best.

    Args:
        top: β, ranks that count, ≥ 1; ties count together (ours).
        tau: τ, largest gap in nats, ≥ 0; 0 keeps only the arg-max (ours: about the mean margin of
            `cm-asd` with its defaults).

    Reference: Xia et al. 2023 (SpecDec) [specdec2023], §3.2; the baseline of CM-ASD, §III.A.
    """

    top: Count = 3
    tau: Annotated[float, Within(0, 100)] = 0.3

    def weigh(self, odds: Odds) -> Weighed:
        return within(odds, self.top, self.tau)

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Where the first token that is not the arg-max is within τ of it."""
        return compared.gap <= self.tau + SLACK


SLACK = 1e-3  # nats by which a gap, or an entropy, computed by other means may differ


def within(
    odds: Odds, top: int, most: float, tau: Callable[[Odds], Array] | None = None
) -> Weighed:
    """Keep tokens of the top `top` ranks whose gap to the best is at most τ.

    Args:
        odds: the two models' word.
        top: β, ≥ 1.
        most: the largest τ there can be, in nats, ≥ 0.
        tau: of some odds `(rows, K)` τ, in nats; None if it is `most` everywhere.
    """
    most = most if tau is None else most + SLACK
    # A difference of logits is a difference of log-probabilities.
    gap = (odds.best_logit - odds.tokens.logits)[..., 0]
    kept = gap <= most
    # The best token itself is kept by any τ; of others, few are near enough to ask more.
    asked = kept & (gap > 0)
    if asked.any():
        at = odds.take(asked)
        good = at.rank < top
        if tau is not None:
            good &= at.at(gap) <= tau(at).clip(0)
        kept[asked] = good[..., 0]
    accept = cast(kept, odds.dtype)

    def drift(at: Odds) -> Array:
        if at.certain:
            return at.at(accept) * (1 - at.ratio)
        gap = at.best_logit - at.logits
        near = gap <= most
        if (crowded := near.sum(-1) > top).any():
            logits = at.logits[crowded]
            last = by_torch(lambda x: x.topk(min(top, x.shape[-1])).values[..., -1:], logits)
            near[crowded] &= logits >= last
        if tau is not None and (asked := (near & (gap > 0)).any(-1)).any():
            near[asked] &= gap[asked] <= tau(at.take(asked)).clip(0)
        return at.replaced_drift(near)

    return Weighed(accept, drift, residual=False)
