"""`easd`: reject what both models are unsure of, although they agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.checks import between, choice, flag, whole
from forerun.citations import bibtex
from forerun.errors import require
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.signals import entropy, float_type

EMPTY = 1e-12
"""A residual of no more mass than this is rounding."""


@dataclass(frozen=True)
class EASD(PositionRule):
    """Entropy-aware speculative decoding: standard, with a penalty on shared uncertainty.

    *Helps*, the paper says, reasoning tasks: where both models waver between the same few tokens
    the first choice is often wrong, and the second is tried. *Hurts* when it is not; and costs
    speed, as every penalty is a rejection. It is meant to change the output: watch accuracy, not
    only drift. It needs the draft's entropy, so a drafter without a distribution is refused.

    Rule: with `H_d`, `H_t` the entropies of draft and target in nats and `overlap` the share of
    their n most likely tokens they have in common: if `H_d > τ_H`, `H_t > τ_H` and
    `overlap ≥ τ_O`, the target's probability of the drafted token is set to 0 and the rest is
    renormalised. Then the usual test: accept with `min(1, target/draft)`, so a penalised token is
    always rejected. Greedy requests take the best of the other tokens instead.

    Entropies and ranks are those of temperature 1, before the sampling transform: the paper runs
    at temperature 0, where nothing else could be meant.

    Args:
        entropy: τ_H in nats, ≥ 0; infinite never penalises (2 in the paper; `forerun calibrate
            easd` computes it for a pair as the paper does).
        overlap: τ_O, in [0, 1]; 0 ignores the overlap (0.8 in the paper).
        n: ranks compared, ≥ 1 (5 in the paper).
        correction: what replaces a rejected token: `target` draws it from the (penalised) target,
            as in the paper's Algorithm 1, line 21; `residual` from `max(0, target − draft)`, which
            is lossless wherever no penalty fires. `target` is lossy even then, unless greedy.
        draft_entropy: whether `H_d` counts; without it and with `overlap=0` the target alone
            decides, and any drafter will do (the paper's ablations).

    Deviations: `≥` for the overlap (the formula prints `>`, but 4 of 5 at τ_O = 0.8 is meant and
    Table 7 has penalties at 1.0). The bonus token after a fully accepted draft is emitted, the
    pseudo-code leaves it out. The only token the target allows is not penalised.

    Reference: Su et al. 2025 (EASD), §3 and Algorithm 1.
    """

    entropy: float = 2.0
    overlap: float = 0.8
    n: int = 5
    correction: str = "target"
    draft_entropy: bool = True

    summary: ClassVar[str] = "standard, but reject what both models are unsure of"
    paper: ClassVar[str] = "Su et al. 2025 (EASD)"
    bibtex: ClassVar[str] = bibtex("easd2025")
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        good = isinstance(self.entropy, (int, float)) and not isinstance(self.entropy, bool)
        require(good and self.entropy >= 0, "entropy", self.entropy, "a number ≥ 0, in nats")
        between("overlap", self.overlap, 0, 1)
        whole("n", self.n, 1)
        choice("correction", self.correction, ("target", "residual"))
        flag("draft_entropy", self.draft_entropy)

    @property
    def signals(self) -> frozenset[str]:
        """The draft's entropy."""
        return frozenset({"entropy"} if self.draft_entropy else ())

    @property
    def ranks(self) -> int:
        """The draft's n best tokens."""
        return self.n if self.overlap else 0

    def weigh(self, odds: Odds) -> Weighed:
        """`min(1, target/draft)`, 0 where the penalty fires."""
        fires = self.fires(odds)
        accept = torch.where(fires, torch.zeros_like(odds.ratio), odds.ratio)
        residual = self.correction == "residual"
        usual = None if residual else odds.replaced(lambda view: view.ratio).drift
        drift = torch.zeros_like(accept) if usual is None else usual
        if fires.any():
            drift = torch.where(fires, _penalised_drift(odds, fires, residual), drift)
        return Weighed(accept, drift, residual, barred=fires)

    def fires(self, odds: Odds) -> torch.Tensor:
        """`(rows, K)` bool: where the penalty applies."""
        target = odds.target
        raw = (target.logits if target.raw is None else target.raw)[:, : odds.width]
        fires = entropy(raw.log_softmax(-1, dtype=float_type(raw))) > self.entropy
        if self.draft_entropy:
            fires &= odds.draft.signals["entropy"] > self.entropy
        if self.overlap:
            assert odds.draft.ranked is not None
            best = raw.topk(min(self.n, raw.shape[-1]), dim=-1).indices
            guess = odds.draft.ranked[..., : self.n]
            shared = (guess.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).sum(-1)
            fires &= shared >= math.ceil(self.overlap * self.n - 1e-9)
        # Something must be left: the second best logit, or in sampling rows mass beside the best.
        logits = odds.target.logits[:, : odds.width]
        second = logits.topk(min(2, logits.shape[-1]), dim=-1).values[..., -1]
        others = second > -torch.inf
        if logits.shape[-1] == 1:
            others = torch.zeros_like(others)
        return fires & odds.inside & others


def _penalised_drift(odds: Odds, fires: torch.Tensor, residual: bool) -> torch.Tensor:
    """`(rows, K)` distance of what is emitted where the penalty fires.

    A drafted `x` is rejected for sure, and `v ≠ x` is emitted with `target(v) / (1 − target(x))`,
    or with its residual over the draft. Certain drafts leave `target(x)`, and nothing else, undone.
    """
    certain = odds.tokens.target.squeeze(-1)
    if odds.draft.logits is None:
        return certain
    drift = torch.where(odds.greedy, certain, torch.zeros_like(certain))
    where = fires & ~odds.greedy
    # Few positions: afford float64.
    logits = odds.target.logits[:, : odds.width][where].double()
    target, draft = logits.softmax(-1), odds.draft.logits[where].softmax(-1, dtype=torch.float64)
    # `1 − target(x)` has no digits left for an x that is nearly sure: the best token goes apart.
    best = logits.argmax(-1, keepdim=True)
    others = logits.scatter(-1, best, -torch.inf).softmax(-1)
    scale = 1 / (1 - target).scatter(-1, best, 1)
    drawn = draft.scatter(-1, best, 0)
    if residual:
        emitted = _emitted_residual(target, draft, scale, drawn)
        left = (others - draft).clamp(min=0)
        mass = left.sum(-1, keepdim=True)
        others = torch.where(mass > EMPTY, left / mass, others)
    else:
        share = drawn * scale
        emitted = target * (share.sum(-1, keepdim=True) - share)
    emitted = emitted + draft.gather(-1, best) * others
    drift[where] = ((emitted - target).abs().sum(-1) / 2).to(drift.dtype)
    return drift


def _emitted_residual(
    target: torch.Tensor, draft: torch.Tensor, scale: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    """`Σ_x drawn(x)·norm(max(0, target·scale(x) − draft))(v)` without `x` itself, in V log V.

    For a given `x` the tokens with a residual are those with `draft/target < scale(x)`: a prefix
    of the tokens in the order of that quotient. So the normaliser is a difference of two prefix
    sums, and the sum over `x` is one of suffix sums.
    """
    quotient = torch.where(target > 0, draft / target, torch.inf)
    order = quotient.argsort(-1)
    ranked = quotient.gather(-1, order)
    count = torch.searchsorted(ranked, scale)  # tokens with a residual, given x; includes x if any
    mass_target = _before(target.gather(-1, order), count)
    mass_draft = _before(draft.gather(-1, order), count)
    own = (target * scale - draft).clamp(min=0)
    norm = scale * mass_target - mass_draft - own
    # Nothing left: the penalised target itself is drawn from.
    empty = norm <= EMPTY
    weight = torch.where(empty, torch.zeros_like(draft), drawn / norm)
    # Of all x: the suffix sums of weight·scale and weight, over x by scale, seen from each v.
    by_scale = scale.argsort(-1)
    scales = scale.gather(-1, by_scale)
    first = torch.searchsorted(scales, quotient.clamp(max=torch.finfo(scale.dtype).max), right=True)
    up = _from((weight * scale).gather(-1, by_scale), first)
    down = _from(weight.gather(-1, by_scale), first)
    emitted = target * up - draft * down - weight * own
    alone = torch.where(empty, drawn * scale, torch.zeros_like(draft))
    return emitted.clamp(min=0) + target * (alone.sum(-1, keepdim=True) - alone)


def _before(values: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Sum of the first `count` values."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0)).gather(-1, count)


def _from(values: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Sum of the values from index `first` on."""
    return values.sum(-1, keepdim=True) - _before(values, first)
