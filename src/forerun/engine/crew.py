"""The controllers of the rows that are decoded together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from forerun.controllers.base import LengthController, Memo
from forerun.costs import Costs
from forerun.engine.meter import Meter
from forerun.types import SIGNALS, Round, Token

MOST_UNTIMED = 12
"""Most tokens to draft by a controller that weighs costs before any were measured."""

MOST_NAP = 256
"""Most plain rounds before controllers are asked again."""

Memory = dict[LengthController, Any]
"""Per controller the state of the newest request that left; see `LengthController.carry`."""


@dataclass
class _Member:
    """One row."""

    controller: LengthController
    state: Any
    given: Costs | None
    """Its own costs, if it decides for itself."""
    asks: bool
    weighs: bool
    shares: bool
    """Whether it drafts on as long as that is worth it for all in sum."""
    certain: bool
    loss: float = 0.0
    memo: Memo = None


class Crew:
    """Asks each row's controller, and sums up what rows that share the pass say.

    An exception of a controller ends its row's drafting and is kept in `failed`; the others go on.

    Args:
        meter: what rounds cost.
        memory: of requests before; kept up to date.
    """

    def __init__(self, meter: Meter, memory: Memory | None = None) -> None:
        self._meter = meter
        self._memory = {} if memory is None else memory
        self._members: list[_Member] = []
        self._costs: Costs | None = None
        self._timing = False
        """Whether the round's draft is there to be timed."""
        self.failed: dict[int, Exception] = {}
        """By row, since the rows last changed."""
        self._able: Sequence[bool] = ()
        """Whose draft the newest round had room for."""
        self._nap = 0
        """Rounds that stay plain while neither that nor the costs change."""
        self._slept = 0
        """Such rounds of which nobody was told."""
        self._seen: Sequence[Round | None] = ()
        """The newest round that they were told of."""
        self._changed()

    def join(
        self, controller: LengthController, repeatable: Costs | None = None, certain: bool = False
    ) -> None:
        """Add a row at the end.

        Args:
            controller: whom to ask.
            repeatable: costs to decide by, for a request whose draft must not depend on the clock,
                on earlier requests or on its neighbours.
            certain: whether its draft is, so that tokens may be left out for what they are.
        """
        self._wake()
        carries = controller.carries and repeatable is None and controller in self._memory
        state = controller.carry(self._memory[controller]) if carries else controller.start()
        state = controller.begin(state, certain)
        given = controller.own_costs or repeatable
        weighs = controller.weighs
        self._members.append(
            _Member(
                controller, state, given, controller.asks, weighs, weighs and given is None, certain
            )
        )
        self._changed()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._wake()
        stay = set(rows)
        for row, member in enumerate(self._members):
            good = row not in stay and row not in self.failed
            if good and member.given is None and member.controller.carries:
                self._memory[member.controller] = member.state
        self._members = [self._members[row] for row in rows]
        self.failed = {new: self.failed[old] for new, old in enumerate(rows) if old in self.failed}
        self._changed()

    def _changed(self) -> None:
        controllers = [member.controller for member in self._members]
        signals = (
            member.controller.certain_signals if member.certain else member.controller.signals
            for member in self._members
        )
        self.signals: frozenset[str] = frozenset(SIGNALS).intersection(chain.from_iterable(signals))
        """Everything any row's controller reads of the draft's distribution."""
        self.asks = any(c.asks for c in controllers)
        """Whether any may end a draft early."""
        self.previews = [c.previews for c in controllers]
        """Whose length is planned from a preview."""
        self.left_out = [int(c.drops_last) for c in controllers]
        """How many of its newest tokens a row leaves out that stopped."""

    def limits(self, able: Sequence[bool] | None = None, timed: bool = True) -> list[int]:
        """Most tokens to draft per row; begins a round.

        Args:
            able: per row whether it has room for a draft and its prompt is read; default: all.
            timed: whether the meter will be told of the round.
        """
        rows = len(self._members)
        wanted = self._meter.wants(rows)
        costs, self._timing = self._meter.costs(rows), wanted == "draft"
        limits, shared, worth = [0] * rows, [], 0.0
        able = [True] * rows if able is None else able
        forced = wanted if timed else None
        if self._nap and costs is self._costs and able == self._able and forced != "draft":
            self._nap -= 1
            self._slept += 1
            return limits
        self._wake()
        self._costs, self._able = costs, able
        rising, due = 0.0, math.inf

        def open_(row: int, member: _Member) -> None:
            nonlocal worth, rising, due
            begin = member.controller.look if self._looks(member) else member.controller.open
            opening = begin(member.state, member.given or costs)
            member.memo = opening.memo
            if member.shares:
                member.loss, limits[row] = opening.loss, opening.most
                shared.append(row)
                gain = opening.worth if able[row] else opening.idle
                worth += gain
                due = min(due, opening.due)
                rising -= min(gain, 0.0) / (opening.due or 1.0)
            else:
                limits[row] = opening.alone

        self._each(open_)
        if self._timing:
            for row in shared:
                limits[row] = min(limits[row], MOST_UNTIMED)
        rests = forced == "plain" or (worth < 0 and forced != "draft")
        if rests and any(able[row] for row in shared):
            for row in shared:
                limits[row] = 0
            if worth < 0 and len(shared) == rows:
                below_0 = math.ceil(-worth / rising) - 1 if rising else MOST_NAP
                self._nap = int(min(due, below_0, MOST_NAP))
        return limits

    def go(self, tokens: Sequence[Token | None]) -> list[bool]:
        """Whether each row drafts another token.

        Args:
            tokens: per row the newest one, None where it no longer drafts.
        """
        answers, shared, worth = [False] * len(tokens), [], 0.0

        for row, (member, token) in enumerate(zip(self._members, tokens, strict=True)):
            if row in self.failed:
                continue
            if token is None:
                worth -= member.loss
                continue
            if not member.asks:
                answers[row] = True
                continue
            controller, state, costs = member.controller, member.state, member.given or self._costs
            assert costs is not None, "limits begins a round"
            try:
                memo = member.memo = controller.fold(state, member.memo, token)
                if member.shares:
                    worth += controller.worth(state, costs, memo)
                    shared.append(row)
                else:
                    answers[row] = bool(controller.keep_going(state, costs, memo))
            except Exception as error:  # a policy of anybody's
                self.failed[row] = error
        for row in shared:
            answers[row] = worth > 0
        for row, member in enumerate(self._members):
            if tokens[row] is not None and not answers[row]:
                self.left_out[row] = self._leaves_out(row, member)
        return answers

    def _looks(self, member: _Member) -> bool:
        """Whether a row's draft may be thrown away for what is in it."""
        shares = member.shares and (len(self._members) > 1 or self._timing)
        return member.certain and not shares

    def _leaves_out(self, row: int, member: _Member) -> int:
        """How many of its newest tokens a row that stops leaves out."""
        if row in self.failed or not self._looks(member):
            return int(member.controller.drops_last)
        costs = member.given or self._costs
        assert costs is not None, "limits begins a round"
        try:
            return int(member.controller.left_out(member.state, costs, member.memo))
        except Exception as error:  # a policy of anybody's
            self.failed[row] = error
            return 0

    def plan(self, tokens: Sequence[Sequence[Token]]) -> list[int]:
        """How many of its previewed tokens each row drafts after all; all, unless it previews."""
        planned = [len(shown) for shown in tokens]

        def ask(row: int, member: _Member) -> None:
            if not self.previews[row] or not planned[row]:
                return
            controller, state, costs = member.controller, member.state, member.given or self._costs
            assert costs is not None, "limits begins a round"
            memo = member.memo
            for token in tokens[row]:
                memo = controller.fold(state, memo, token)
            planned[row] = min(planned[row], controller.plan(state, costs, memo))

        self._each(ask)
        return planned

    def observe(self, rounds: Sequence[Round | None]) -> None:
        """What became of every row's draft; None of a row that only read its prompt."""
        if self._slept:
            if rounds == self._seen:
                return
            self._slept -= 1
            self._wake()
        self._seen = rounds
        self._learn(rounds)

    def _wake(self) -> None:
        """Tell all of the rounds that nobody was told of."""
        slept, self._slept, self._nap = self._slept, 0, 0
        if slept:
            self._learn([seen and seen._replace(repeated=slept) for seen in self._seen])

    def _learn(self, rounds: Sequence[Round | None]) -> None:
        longest = max((round.drafted for round in rounds if round is not None), default=0)

        def learn(row: int, member: _Member) -> None:
            costs = member.given or self._costs
            assert costs is not None, "limits begins a round"
            seen = rounds[row]
            if seen is None:
                return
            if member.shares and longest > seen.drafted:
                seen = seen._replace(longest=longest)
            member.state = member.controller.observe(member.state, costs, seen)

        self._each(learn)

    def _each(self, ask: Callable[[int, _Member], None]) -> None:
        """Ask every row that has not failed."""
        for row, member in enumerate(self._members):
            if row not in self.failed:
                try:
                    ask(row, member)
                except Exception as error:  # a policy of anybody's
                    self.failed[row] = error
