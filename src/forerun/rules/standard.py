"""`standard`: speculative sampling, lossless for any draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.citations import bibtex
from forerun.rules.base import AcceptanceRule, sample
from forerun.rules.exact import match_greedy
from forerun.signals import float_type
from forerun.types import Draft, Target, Verdict


@dataclass(frozen=True)
class Standard(AcceptanceRule):
    """Speculative sampling: the output has exactly the target's distribution.

    *Helps* every request, greedy or sampling; it is the default. *Hurts* nothing in quality; at
    high temperature a good draft can still be rejected on bad luck (lossy rules relax that).

    Rule: accept `x` with probability `min(1, target(x)/draft(x))`; after a rejection draw the
    correction from `norm(max(0, target − draft))`; after none draw the bonus from `target`.

    Rows that decode greedily have all of the target's mass on its arg-max, so the same rule
    reduces to `exact` for them; a batch of such rows takes that shorter path. A draft without
    logits had all of its mass on the drafted token.

    Deviations: probabilities are computed in float32 (float64 if the target's logits are); if
    rounding leaves nothing of the residual, the correction is drawn from the target.

    Reference: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2.
    """

    summary: ClassVar[str] = "accept with min(1, target/draft), correct from the residual"
    paper: ClassVar[str] = "Leviathan et al. 2023; Chen et al. 2023"
    bibtex: ClassVar[str] = bibtex("leviathan2023", "chen2023")
    lossless: ClassVar[bool] = True

    def judge(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Accept a prefix by coins, draw the next token."""
        if target.greedy.all():
            return match_greedy(draft, target.logits)
        some_greedy = bool(target.greedy.any())
        greedy = target.greedy.to(target.logits.device, non_blocking=True)
        width = draft.tokens.shape[1]

        accept = _ratio(draft, target)
        if some_greedy:
            match = draft.tokens == target.logits[:, :width].argmax(-1)
            accept = torch.where(greedy.unsqueeze(-1), match.to(accept.dtype), accept)
        inside = torch.arange(width, device=accept.device) < draft.lengths.unsqueeze(-1)
        accept = accept * inside
        accepted = (uniforms[:, :width] < accept).cumprod(-1).sum(-1)

        row = torch.arange(len(accepted), device=accept.device)
        logits = target.logits[row, accepted]
        probs = logits.softmax(-1, dtype=accept.dtype)
        if width:
            probs = _corrected(probs, draft, row, accepted)
        if some_greedy:
            certain = torch.zeros_like(probs).scatter(1, logits.argmax(-1, keepdim=True), 1)
            probs = torch.where(greedy.unsqueeze(-1), certain, probs)
        return Verdict(accepted, sample(probs, uniforms[:, -1]), accept, probs)


def _ratio(draft: Draft, target: Target) -> torch.Tensor:
    """`(rows, K)` `min(1, target/draft)` of the drafted tokens."""
    dtype, width = float_type(target.logits), draft.tokens.shape[1]
    token = draft.tokens.unsqueeze(-1)
    log = target.logits[:, :width].log_softmax(-1, dtype=dtype).gather(-1, token)
    if draft.logits is not None:
        log = log - draft.logits.log_softmax(-1, dtype=dtype).gather(-1, token)
    # A token that neither model allows gives −inf + inf: not a number, and not acceptable.
    return log.squeeze(-1).clamp(max=0).exp().nan_to_num(0)


def _corrected(
    probs: torch.Tensor, draft: Draft, row: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """The residual in rows that rejected a token, the target's `probs` in the others."""
    at = accepted.clamp(max=draft.tokens.shape[1] - 1)
    if draft.logits is None:
        residual = probs.scatter(1, draft.tokens[row, at].unsqueeze(-1), 0)
    else:
        residual = (probs - draft.logits[row, at].softmax(-1, dtype=probs.dtype)).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    rejected = (accepted < draft.lengths).unsqueeze(-1) & (mass > 0)
    return torch.where(rejected, residual / mass, probs)
