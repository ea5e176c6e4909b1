"""Drafts from a text that a request predicts; they change when tokens come, never which."""

from __future__ import annotations

from collections.abc import Sequence

MATCH = 3  # tokens of the output that must occur in the prediction for it to be followed there
SHORTEST, LONGEST = 4, 32  # tokens drafted: doubled after a draft kept whole, else shortest


class PredictionCursor:
    """Follows a predicted text, and finds the way back to it after a difference."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._length = SHORTEST
        self._place = 0  # where in the prediction the output has got to
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(MATCH, len(self._tokens) + 1):
            self._ends.setdefault(tuple(self._tokens[end - MATCH : end]), []).append(end)

    def propose(self, output: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that follow the output; none where it left the prediction. Of
        several places, the first after the one that was followed last."""
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
