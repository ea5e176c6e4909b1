"""`easd`: standard, but reject what both models are unsure of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from forerun.arrays import cast, put, softmax
from forerun.checks import Count, Share, Within
from forerun.rules.base import ComparedRow, PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.rules.spec_verification import SLACK
from forerun.types import Array, Draft, Target


@dataclass(frozen=True)
class EASD(PositionRule):
    """Entropy-aware speculative decoding: standard, with a penalty on shared uncertainty.

    Args:
        entropy: τ_H in nats, ≥ 0; infinite never penalises (2 in the paper; `forerun calibrate
            easd` computes it for a pair as the paper does).
        overlap: τ_O, in [0, 1]; 0 ignores the overlap (0.8 in the paper).
        n: ranks compared, ≥ 1 (5 in the paper).
        correction: what replaces a token that is rejected without a penalty: `target` draws it from
            the target, as in the paper's Algorithm 1, line 21, which is lossy even then, unless
            greedy; `residual` from `max(0, target − draft)`, which is lossless. A penalised one is
            always replaced from the penalised target.
        draft_entropy: whether `H_d` counts; without it and with `overlap=0` the target alone
            decides, and any drafter will do (the paper's ablations).
        bonus: what follows a draft that is kept whole. `off`: nothing, as in Algorithm 1: every
            token is tested, and a greedy text does not depend on how far was drafted (as long as
            something was: a plain round is the target's own). `untested`: a token of the target's
            own, which escapes the penalty.
        penalty: which token's probability is set to 0: the `drafted` one, as in the formula, or the
            draft's `top` one, as the text says. They differ only when sampling.
        processed: whether entropies are those after the sampling transform; then nothing is ever
            penalised in greedy requests.

    Reference: Su et al. 2025 (EASD) [easd2025], §3 and Algorithm 1.
    """

    entropy: Annotated[float, Within(0, math.inf)] = 2.0
    overlap: Share = 0.8
    n: Count = 5
    correction: Literal["target", "residual"] = "target"
    draft_entropy: bool = True
    bonus: Literal["off", "untested"] = "off"
    penalty: Literal["drafted", "top"] = "drafted"
    processed: bool = False

    @property
    def has_bonus(self) -> bool:
        return self.bonus != "off"

    @property
    def reads_draft(self) -> bool:
        """Its entropy, its n best tokens, or its best."""
        return bool(
            (self.draft_entropy and not self.processed) or self.overlap or self.penalty == "top"
        )

    def weigh(self, odds: Odds) -> Weighed:
        """`min(1, target/draft)`, 0 where the penalty fires."""
        fires = self.fires(odds)
        replaced = self.correction == "target"
        usual = odds.lenient(lambda _, view: view.ratio, False).drift if replaced else None
        if not fires.any():
            return Weighed(odds.ratio, usual, not replaced)
        where, token, chance = odds.lib.where, odds.draft.tokens, 0.0
        if self.penalty == "top":
            token = odds.raw_draft.argmax(-1)
            chance = _without(odds, token)[0]

        def drift(at: Odds) -> Array:
            penalised = at.lib.zeros_like(at.ratio) if usual is None else usual(at)
            here = at.at(fires)
            if not here.any():
                return penalised
            if self.penalty == "top":
                return where(here, _without(at, at.at(token))[1], penalised)
            return where(here, _penalised_drift(at, here), penalised)

        accept = where(fires, chance, odds.ratio)
        residual = False if replaced else ~fires
        return Weighed(accept, drift, residual, where(fires, token, -1))

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Where the draft is unsure of a token that would be kept."""
        kept = compared.accepted
        if self.processed or not kept:  # the processed target is sure
            return False
        if not self.draft_entropy:
            return True
        return any(compared.draft_entropy(i) > self.entropy - SLACK for i in range(kept))

    def fires(self, odds: Odds) -> Array:
        """`(rows, K)` bool: where the penalty applies."""
        fires = odds.inside
        if self.draft_entropy:
            own = odds.draft_entropy if self.processed else odds.raw_draft_entropy
            fires = fires & (own > self.entropy)
        if not fires.any():  # the draft is sure: spare the target's distribution
            return fires
        at, out = odds.take(fires), odds.lib.zeros_like(fires)
        both = at.target_entropy[..., 0] if self.processed else at.raw_entropy
        both = (both > self.entropy) & at.open
        if self.overlap:
            both &= at.shared(self.n) >= math.ceil(self.overlap * self.n - 1e-9)
        out[fires] = both[:, 0]
        return out


def _without(odds: Odds, token: Array) -> tuple[Array, Array]:
    """Chance of keeping what was drafted, and drift, `(rows, K)` each, by the usual test against
    the target without some `(rows, K)` tokens."""
    logits = put(odds.logits, token[..., None], -np.inf)
    draft = Draft(odds.draft.tokens, odds.draft.lengths, None if odds.certain else odds.draft_probs)
    left = Odds(draft, Target(logits, odds.target.greedy))
    kept = odds.lib.minimum(odds.drawn, left.emitted)
    emitted = kept + (1 - kept.sum(-1)[..., None]) * left.emitted
    return left.ratio, abs(emitted - odds.emitted).sum(-1) / 2


def _penalised_drift(odds: Odds, fires: Array) -> Array:
    """`(rows, K)` distance of what is emitted where the penalty fires.

    A drafted `x` is rejected for sure, and `v ≠ x` is emitted with `target(v) / (1 − target(x))`.
    Certain drafts leave `target(x)`, and nothing else, undone.
    """
    certain = odds.tokens.target[..., 0]
    if odds.certain:
        return certain
    drift = odds.lib.where(odds.greedy, certain, 0)
    where, double = fires & ~odds.greedy, odds.lib.float64
    # Few positions: afford float64.
    logits = cast(odds.logits[where], double)
    target, draft = softmax(logits), cast(odds.draft_probs[where], double)
    # `1 − target(x)` has no digits left for an x that is nearly sure: the best token goes apart.
    best = logits.argmax(-1)[:, None]
    others = softmax(put(logits, best, -np.inf))
    share = put(draft, best, 0) / put(1 - target, best, 1)
    row = odds.lib.where(best >= 0)[0]
    sure = draft[row, best[:, 0]][:, None]
    emitted = target * (share.sum(-1)[:, None] - share) + sure * others
    drift[where] = cast(abs(emitted - target).sum(-1) / 2, drift.dtype)
    return drift
