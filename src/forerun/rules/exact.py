"""`exact`: keep what the target would have said itself, greedily."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.errors import SettingError
from forerun.rules.base import AcceptanceRule
from forerun.rules.odds import finite
from forerun.signals import float_type
from forerun.types import Draft, Target, Verdict


@dataclass(frozen=True)
class Exact(AcceptanceRule):
    """Accept a drafted token while it is the target's most likely token.

    Reference: Stern et al. 2018 (blockwise decoding); the greedy case of Leviathan et al. 2023.
    """

    summary: ClassVar[str] = "accept while the draft is the target's arg-max; greedy requests only"
    paper: ClassVar[str] = "greedy case of Leviathan et al. 2023"
    bibtex: ClassVar[str] = "leviathan2023"
    lossless: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True
    takes_leaves: ClassVar[bool] = True
    greedy_only: ClassVar[bool] = True

    def decide(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Compare with the arg-max; `uniforms` is not read."""
        if (row := sampled_row(target)) is not None:
            raise SettingError(
                f"rule 'exact' needs temperature 0, got a sampling request in row {row}; "
                "use rule 'standard'"
            )
        return match_greedy(draft, target.logits)


def sampled_row(target: Target) -> int | None:
    """The first row for which the arg-max is not the only token, if any."""
    return None if target.greedy.all() else int(target.greedy.logical_not().nonzero()[0])


def match_greedy(draft: Draft, logits: torch.Tensor) -> Verdict:
    """The verdict when every row decodes greedily: no softmax, no host synchronisation."""
    choice = logits.argmax(-1)
    width = draft.tokens.shape[1]
    sound = finite(logits.gather(-1, choice.unsqueeze(-1)).squeeze(-1))
    if width == 0:  # plain decoding: nothing to compare
        nothing = choice.new_zeros(len(choice), 0, dtype=float_type(logits))
        return Verdict(torch.zeros_like(draft.lengths), choice[:, 0], nothing, failed=~sound[:, 0])
    inside = torch.arange(width, device=choice.device) < draft.lengths.unsqueeze(-1)
    match = (draft.tokens == choice[:, :width]) & inside & sound[:, :width]
    if draft.logits is not None:  # sampled neighbours: greedy rows on their own have none
        match &= finite(draft.logits.amax(-1))
    accepted = match.cumprod(-1).sum(-1)
    at = accepted.unsqueeze(-1)
    return Verdict(
        accepted,
        choice.gather(1, at).squeeze(-1),
        match.to(float_type(logits)),
        failed=~sound.gather(1, at).squeeze(-1),
    )
