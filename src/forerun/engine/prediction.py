"""Drafts from a text that a request predicts; they change when tokens come, never which."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.drafters.base import Proposal
from forerun.types import Stop

MATCH = 3
"""Tokens of the output that must occur in the prediction for it to be followed there."""
SHORTEST, LONGEST = 4, 32
"""Tokens drafted: doubled after a draft that was kept whole, shortest after any other."""


class PredictionCursor:
    """Follows a predicted text, and finds the way back to it after a difference.

    Args:
        tokens: the prediction.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._length = SHORTEST
        self._place = 0
        """Where in the prediction the output has got to."""
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(MATCH, len(self._tokens) + 1):
            self._ends.setdefault(tuple(self._tokens[end - MATCH : end]), []).append(end)

    def propose(self, output: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that follow the output; none where it left the prediction.

        Of several places, the first after the one that was followed last.
        """
        count = len(output)
        if count < MATCH:
            ends = [count] if list(output) == self._tokens[:count] else []
        else:
            ends = self._ends.get(tuple(output[-MATCH:]), [])
        if not ends:
            return []
        self._place = next((end for end in ends if end > self._place), ends[-1])
        return self._tokens[self._place : self._place + min(room, self._length)]

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        self._length = min(2 * self._length, LONGEST) if drafted == accepted else SHORTEST


def insert(proposal: Proposal, drafts: dict[int, list[int]]) -> None:
    """Put predicted tokens by row among the drafter's.

    Where others come with a distribution, theirs is all on the token, so that rules judge them as
    they judge a lookup.
    """
    for row, tokens in drafts.items():
        proposal.tokens[row], proposal.stopped_by[row] = tokens, Stop.LIMIT
        proposal.predicted.add(row)
    if not proposal.logits or not drafts:
        return
    for _ in range(max(map(len, drafts.values())) - len(proposal.logits)):
        proposal.logits.append(torch.zeros_like(proposal.logits[0]))
    for row, tokens in drafts.items():
        for logits, token in zip(proposal.logits, tokens, strict=False):
            logits[row] = -torch.inf
            logits[row, token] = 0.0


def prepend(proposal: Proposal, forced: dict[int, list[int]]) -> None:
    """Put forced tokens by row before the drafter's, likewise certain."""
    for row, tokens in forced.items():
        proposal.tokens[row] = [*tokens, *proposal.tokens[row]]
        proposal.forced[row] = len(tokens)
    if not proposal.logits or not forced:
        return
    steps = [logits.clone() for logits in proposal.logits]
    for _ in range(max(map(len, proposal.tokens)) - len(steps)):
        steps.append(torch.zeros_like(steps[0]))
    for row, tokens in forced.items():
        for place in range(len(tokens), len(proposal.tokens[row])):
            steps[place][row] = proposal.logits[place - len(tokens)][row]
        for place, token in enumerate(tokens):
            steps[place][row] = -torch.inf
            steps[place][row, token] = 0.0
    proposal.logits = steps
