"""How far the rows of a pass draft: by each row's own policy, or a governor of several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.controllers.base import Controller, LengthPolicy
from forerun.costs import Costs
from forerun.governors.base import Governor, Outcome, Plan, Seat
from forerun.types import DRAWN, RoundOutcome, Token

Memory = dict[Any, Any]
"""Per controller the newest state of a request that left, and per governor its pace."""


@dataclass
class _Row:
    """What decides for one row."""

    controller: Controller
    policy: Any  # a `LengthPolicy`; of a governed row a `Forecaster`
    state: Any
    signals: frozenset[str]  # what its policy is shown
    certain: bool
    given: Costs | None  # to decide by, if it decides for itself
    group: _Group | None
    memo: Any = None


@dataclass
class _Group:
    """Rows whose tokens one governor weighs."""

    governor: Governor
    pace: Any
    given: Costs | None  # to decide by, of a row that decides for itself
    rows: list[int] = field(default_factory=list)
    plan: Plan | None = None  # of the round


class Lengths:
    """Asks each row's policy, and the governors of rows that have one. What a policy raises is kept
    in `failed`, and ends its row's drafting.

    Args:
        memory: of requests before; kept up to date.
        blind: whether the drafter says nothing of its tokens, and proposes them at once.
    """

    def __init__(self, memory: Memory, blind: bool = False) -> None:
        self._memory, self._blind = memory, blind
        self._rows: list[_Row] = []
        self._groups: list[_Group] = []
        self.failed: dict[int, Exception] = {}  # by row, since the rows last changed
        self._changed()

    def join(self, controller: Controller, certain: bool, given: Costs | None = None) -> None:
        """Add a row at the end.

        Args:
            controller: of the request.
            certain: whether no coins are tossed over its tokens.
            given: costs to decide by, for a request that must not depend on the clock, on earlier
                requests or on its neighbours.
        """
        governor = controller if isinstance(controller, Governor) else None
        policy = governor.policy if governor else controller
        assert isinstance(policy, LengthPolicy), "a request is checked when it is submitted"
        given = given or (governor.given if governor else None)
        before = None if given else self._memory.get(controller)
        state = policy.start(certain, before)
        group = None if governor is None else self._joined(governor, given)
        signals = policy.signals(certain)
        self._rows.append(_Row(controller, policy, state, signals, certain, given, group))
        self._changed()

    def _joined(self, governor: Governor, given: Costs | None) -> _Group:
        """The group of a governor with one more row, a new one if that decides for itself."""
        same = (own for own in self._groups if own.governor == governor and own.given is None)
        if given or (group := next(same, None)) is None:
            before = None if given else self._memory.get(("pace", governor))
            group = _Group(governor, governor.start() if before is None else before, given)
            self._groups.append(group)
        group.rows.append(len(self._rows))
        group.pace = governor.join(group.pace, 1 / len(group.rows))
        return group

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        for i, row in enumerate(self._rows):
            if i not in rows and i not in self.failed and row.given is None:
                self._memory[row.controller] = row.state
                if row.group is not None:
                    self._memory["pace", row.group.governor] = row.group.pace
        self._rows = [self._rows[row] for row in rows]
        self.failed = {new: self.failed[old] for new, old in enumerate(rows) if old in self.failed}
        for group in self._groups:
            group.rows = [i for i, row in enumerate(self._rows) if row.group is group]
        self._groups = [group for group in self._groups if group.rows]
        self._changed()

    def _changed(self) -> None:
        self.signals: frozenset[str] = frozenset().union(
            *(row.signals for row in self._rows),
            *(group.governor.signals for group in self._groups),
        )
        """Everything that any row's policy is shown, or its governor wants."""
        self._hidden = [dict.fromkeys(self.signals - row.signals) for row in self._rows]
        self._alone = [i for i, row in enumerate(self._rows) if row.group is None]
        self.stops_early = any(row.policy.stops_early for row in self._rows)
        """Whether any may end a draft early."""

    def governs(self, i: int) -> bool:
        """Whether a governor decides for a row."""
        return self._rows[i].group is not None

    def resting(self, costs: Costs) -> bool:
        """Whether no row drafts in this round, whoever can; else `limits` begins it."""
        asked = ((group, group.given or costs) for group in self._groups)
        rests = all(group.governor.rests(group.pace, by) for group, by in asked)
        return rests and bool(self._groups) and not self._alone

    def reads(self, i: int, costs: Costs, seat: Seat) -> bool:
        """Whether the drafter may read along a row's prompt that takes the target several rounds;
        arguments as of `limits`."""
        group, rows = self._rows[i].group, len(self._rows)
        return group is None or group.governor.reads(group.pace, group.given or costs, seat, rows)

    def limits(self, costs: Costs, able: Sequence[Seat | None]) -> list[int]:
        """Most tokens to draft per row; begins a round.

        Args:
            costs: of a pass of these rows.
            able: per row what a governor needs to know but for its outlook; None of rows that
                cannot draft, for which policies of their own say their limits all the same.
        """
        limits = [0] * len(self._rows)
        for row in self._rows:
            row.memo = None
        for i in self._alone:
            limits[i] = self._asked(i, self._rows[i].policy.limit, self._rows[i].state) or 0
        paid = max(n * (seat is not None) for n, seat in zip(limits, able, strict=True))
        for group in self._groups:
            seats = {i: seat for i in group.rows if (seat := self._seat(i, able[i])) is not None}
            if seats:
                by, rows, width = costs, len(self._rows), paid
                if group.given is not None:
                    by, rows, width = group.given, 1, 0
                group.plan = group.governor.open(group.pace, by, seats, rows, width)
                for i, most in group.plan.most.items():
                    limits[i] = most
        return limits

    def _seat(self, i: int, seat: Seat | None) -> Seat | None:
        row = self._rows[i]
        if seat is None or (outlook := self._asked(i, row.policy.outlook, row.state)) is None:
            return None
        return seat._replace(outlook=outlook, trims=row.certain, blind=self._blind)

    def go(self, tokens: Sequence[Token | None], free: bool = False) -> list[bool]:
        """Whether each row drafts another token.

        Args:
            tokens: per row the newest one, None where it no longer drafts.
            free: whether these cost no step of a model: then governors have decided before.
        """
        out = [False] * len(tokens)
        for i in self._alone:
            if tokens[i] is not None:
                policy = self._rows[i].policy
                out[i] = not policy.stops_early or bool(self._behind(i, policy.step, tokens[i]))
        for group in self._groups:
            if group.plan is None:
                continue
            going: Collection[int] = group.rows
            if not free:
                asked = {
                    i: self._behind(i, self._rows[i].policy.forecast, tokens[i]) for i in going
                }
                going = group.plan.go({i: own for i, own in asked.items() if own is not None})
            for i in going:
                out[i] = True
        return out

    def free(self, drafts: Mapping[int, Sequence[float]], enough: float) -> dict[int, int]:
        """How many tokens of free drafts to take, of rows that take one; see `StepContext`."""
        out = {i: len(drafts[i]) for i in self._alone if sum(drafts.get(i, ())) >= enough}
        for group in self._groups:
            own = {i: drafts[i] for i in group.rows if i in drafts}
            if own and group.plan is not None:
                out |= group.plan.free(own)
        return out

    def _behind(self, i: int, question: Callable[..., Any], token: Token | None) -> Any:
        """A policy's answer about what follows a token, whose memo is kept; None if it fails."""
        if token is None:
            return None
        row = self._rows[i]
        answer = self._asked(i, question, row.state, row.memo, self._shown(i, token))
        answer, row.memo = answer or (None, None)
        return answer

    def _shown(self, i: int, token: Token) -> Token:
        """What a row's policy may see of a token."""
        hidden = self._hidden[i]
        return token._replace(**hidden) if hidden else token

    def trees(self) -> list[int]:
        """Per row the most nodes of a tree in this round; 0: a chain."""
        by = (row.controller if row.group is None else row.group.plan for row in self._rows)
        return [0 if own is None else own.tree for own in by]

    def nodes(
        self, drafted: Sequence[int], grown: Mapping[int, Sequence[float]]
    ) -> list[list[int]]:
        """Per row what `Plan.nodes` says; a policy without a governor takes all of a tree."""
        out = [list(range(len(grown.get(i, ())))) for i in range(len(self._rows))]
        for group in self._groups:
            chosen = {} if group.plan is None else group.plan.nodes(drafted, grown)
            for i in group.rows:
                out[i] = chosen.get(i, [])
        return out

    def trim(self, i: int) -> int:
        """How many of its newest tokens a row that has ended leaves out."""
        row = self._rows[i]
        if row.group is not None:
            return row.group.plan.trim(i) if row.certain and row.group.plan is not None else 0
        if not row.policy.stops_early:
            return 0
        count = int(self._asked(i, row.policy.trim, row.state, row.memo) or 0)
        # Where coins decide tokens, keeping some because of what they are is a bias: there it is
        # the newest alone, if all that the policy is shown of it was known before it was drawn.
        return count if row.certain else min(count, int(not row.signals & DRAWN))

    def observe(
        self, costs: Costs, rounds: Sequence[RoundOutcome | None], outcome: Outcome,
        free: Collection[int] = (),
    ) -> None:  # fmt: skip
        """What became of every row's draft.

        Args:
            costs: of the pass.
            rounds: None of a row that only read its prompt, or was drafted for by others; with all
                tokens that were drafted, those left out included.
            outcome: of the pass.
            free: rows whose draft cost no step of a model; forecasts are of the model's.
        """
        for i, (row, seen) in enumerate(zip(self._rows, rounds, strict=True)):
            if seen is None or i in self.failed:
                continue
            if row.group is not None and (i in free or not seen.drafted):
                continue  # it teaches no forecaster anything
            if seen.drafted:
                if self._hidden[i]:
                    shown = [self._shown(i, token) for token in seen.tokens[: seen.drafted]]
                    seen = seen._replace(tokens=shown)
                if row.group is None:  # forecasts know no costs
                    by = row.given or costs
                    took = by.round_seconds(seen.drafted, seen.drafted + 1) / by.plain
                    seen = seen._replace(took=took)
            state = self._asked(i, row.policy.observe, row.state, seen)
            row.state = row.state if state is None else state
        for group in self._groups:
            plan, group.plan = group.plan, None
            first, given, own = group.rows[0], group.given, outcome
            if given:  # neither the clock nor neighbours have a say
                if (seen := rounds[first]) is None:
                    continue
                committed, judged, leaves = (
                    {first: of[first]} if first in of else {}
                    for of in (outcome.committed, outcome.judged, outcome.leaves)
                )
                own = Outcome(committed, judged, len(seen.tokens), leaves=leaves)
            if own.committed or own.reading:
                group.pace = group.governor.observe(group.pace, given or costs, plan, own)

    def _asked(self, i: int, question: Callable[..., Any], *about: Any) -> Any:
        """A policy's answer; None if it fails, as from then on."""
        if i in self.failed:
            return None
        try:
            return question(*about)
        except Exception as error:  # of anybody's policy
            self.failed[i] = error
            return None
