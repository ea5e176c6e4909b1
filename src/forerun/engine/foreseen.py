"""Tokens of a round that need no drafter: those a constraint forces, or a request predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forerun.drafters.base import Drafter, Proposal
from forerun.engine.row import Row
from forerun.types import Stop


class Foreseen(NamedTuple):
    """By row, the tokens known ahead of the drafter; none of a row is in both."""

    forced: Mapping[int, list[int]]
    """By its constraint; a drafter may go on behind them."""
    predicted: Mapping[int, list[int]]
    """By its request, in place of a draft."""

    @classmethod
    def of(cls, rows: Sequence[Row], ready: Sequence[bool]) -> Foreseen:
        """Of rows that are ready; a request that is to run plainly takes what it predicts only."""
        forced, predicted = {}, {}
        for i, (row, on) in enumerate(zip(rows, ready, strict=True)):
            if not on or not (room := row.room(row.limit)):
                continue
            output = row.context[row.prompt :]
            if row.place is not None and not row.plain:
                forced[i] = row.place.forced(output)[:room]
            if row.prediction is not None:
                tokens = row.prediction.propose(output, room)
                predicted[i] = [] if forced.get(i) else tokens
        return cls(
            {i: tokens for i, tokens in forced.items() if tokens},
            {i: tokens for i, tokens in predicted.items() if tokens},
        )

    def rooms(self, rooms: Sequence[int], drafter: Drafter) -> list[int]:
        """What they leave of each row's room to the drafter.

        A target that drafts cannot go on from tokens that it has not verified.
        """
        idle = {*self.predicted, *(self.forced if drafter.target is not None else ())}
        return [
            0 if i in idle else max(room - len(self.forced.get(i, ())), 0)
            for i, room in enumerate(rooms)
        ]

    def prepend(self, proposal: Proposal) -> None:
        """Put them before what was drafted, and count them."""
        for i in self.predicted:
            proposal.stopped_by[i] = Stop.LIMIT
        proposal.predicted.update(self.predicted)
        proposal.forced = {i: len(tokens) for i, tokens in self.forced.items()}
        proposal.prepend({**self.predicted, **self.forced})


NOTHING = Foreseen({}, {})
