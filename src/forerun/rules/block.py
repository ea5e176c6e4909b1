"""`block`: judge the draft as a whole; lossless, and never accepts fewer than `standard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.rules.base import AcceptanceRule, sample
from forerun.rules.exact import match_greedy
from forerun.rules.odds import one_hot, sound_length
from forerun.signals import float_type
from forerun.types import Draft, Target, Verdict


@dataclass(frozen=True)
class Block(AcceptanceRule):
    """Block verification: the longest prefix that the joint probabilities allow.

    Reference: Sun et al. 2024, Block Verification Accelerates Speculative Decoding, Algorithm 2.
    """

    summary: ClassVar[str] = "judge the draft as a whole; accepts no fewer than standard"
    paper: ClassVar[str] = "Sun et al. 2024 (block verification)"
    bibtex: ClassVar[str] = "block2024"
    lossless: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True

    def decide(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Keep the longest prefix whose coin allows it, draw the next token."""
        if target.greedy.all():
            return match_greedy(draft, target.logits)
        dtype, width = float_type(target.logits), draft.tokens.shape[1]
        tokens = draft.tokens.unsqueeze(-1)
        goal = target.logits.softmax(-1, dtype=dtype)
        sound = goal[:, :width].gather(-1, tokens) >= 0  # a NaN is not
        if target.greedy.any():
            greedy = target.greedy.to(goal.device).view(-1, 1, 1)
            goal = torch.where(greedy, one_hot(target.logits), goal)
        if draft.logits is None:
            guess = torch.zeros_like(goal[:, :width]).scatter_(-1, tokens, 1)
        else:
            guess = draft.logits.softmax(-1, dtype=dtype)
            sound &= guess.gather(-1, tokens) > 0
        lengths = sound_length(draft.lengths, sound.squeeze(-1))

        joint = _joint(goal[:, :width].gather(-1, tokens), guess.gather(-1, tokens))
        residual = (joint[:, :width].unsqueeze(-1) * goal[:, :width] - guess).clamp(min=0)
        mass = residual.sum(-1)
        whole = mass + 1 - joint[:, :width]
        # Where joint is 1 and nothing is left over, both models agree from here on.
        inner = torch.where(whole > 0, mass / whole, torch.ones_like(mass))
        place = torch.arange(1, width + 1, device=goal.device)
        last, inside = (place == lengths.unsqueeze(-1), place <= lengths.unsqueeze(-1))
        stop = torch.where(last, joint[:, 1:], torch.nn.functional.pad(inner[:, 1:], (0, 1)))
        stop = stop * inside

        kept = (uniforms[:, :width] < stop) * place
        accepted = torch.nn.functional.pad(kept, (1, 0)).amax(-1)
        row = torch.arange(len(accepted), device=goal.device)
        probs = goal[row, accepted]
        if width:
            at = accepted.clamp(max=width - 1)
            use = (accepted < lengths) & (mass[row, at] > 0)
            drawn = residual[row, at] / mass[row, at].unsqueeze(-1)
            probs = torch.where(use.unsqueeze(-1), drawn, probs)
        chance = _reached(stop)
        if target.greedy.any():  # as if alone: also behind what cannot be reached
            match = match_greedy(draft, target.logits).accept_prob
            chance = torch.where(greedy.view(-1, 1), match, chance)
        return Verdict(accepted, sample(probs, uniforms[:, -1]), chance, probs)


def _joint(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """`(rows, K + 1)` p_0 … p_K from `(rows, K, 1)` probabilities of the drafted tokens."""
    ratio = (target / draft).squeeze(-1).nan_to_num(0, posinf=torch.finfo(target.dtype).max)
    joint = [torch.ones_like(ratio[:, :1])]
    for i in range(ratio.shape[1]):
        joint.append((joint[-1] * ratio[:, i : i + 1]).clamp(max=1))
    return torch.cat(joint, -1)


def _reached(stop: torch.Tensor) -> torch.Tensor:
    """`(rows, K)` probability of keeping token i given that those before it are kept."""
    none = (1 - stop).flip(-1).cumprod(-1).flip(-1)
    reach = torch.nn.functional.pad(1 - none, (1, 0), value=1.0)
    return torch.where(reach[:, :-1] > 0, reach[:, 1:] / reach[:, :-1], torch.zeros_like(stop))
