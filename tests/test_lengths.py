"""Rows that share a pass: each has its own policy, and what is wrong with one ends no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from forerun.controllers import CONTROLLERS, LengthPolicy
from forerun.controllers.base import Chance, Forecaster, Outlook
from forerun.costs import Costs
from forerun.engine.lengths import Lengths
from forerun.governors import Outcome, Seat
from forerun.governors.renewal import Renewal
from forerun.types import RoundOutcome, Token

COSTS = Costs.synthetic(5, 0.02)
SURE, UNSURE = (Token(logit_margin=m, chosen=p, top1=p) for m, p in ((9.0, 0.99), (0.1, 0.3)))


def lengths_of(*specs, memory=None, certain=True):
    lengths = Lengths({} if memory is None else memory)
    for spec in specs:
        lengths.join(CONTROLLERS.make(spec) if isinstance(spec, str) else spec, certain)
    return lengths


def observe(lengths, rounds, seconds=None, costs=COSTS):
    outcome = Outcome(
        {i: seen.accepted + 1 for i, seen in enumerate(rounds)},
        {i: seen.drafted for i, seen in enumerate(rounds)},
        max(seen.drafted for seen in rounds), seconds,
    )  # fmt: skip
    lengths.observe(costs, rounds, outcome)


def test_each_row_has_its_own_policy():
    lengths = lengths_of("fixed(3)", "gammatune+(threshold=0.5,keep=false)", "fixed(0)", "svip")
    assert lengths.signals == {"top1", "entropy"}
    assert lengths.stops_early
    assert lengths.limits(COSTS, [Seat()] * 4) == [3, 7, 0, 40]
    sure, unsure = Token(top1=0.9, entropy=0.1), Token(top1=0.1, entropy=5.0)
    assert lengths.go([sure, sure, None, sure]) == [True, True, False, True]
    assert lengths.go([unsure, unsure, None, unsure]) == [True, False, False, False]
    assert [lengths.trim(i) for i in range(4)] == [0, 1, 0, 0]
    lengths.keep([1, 0])
    assert lengths.signals == {"top1"}
    assert lengths.limits(COSTS, [Seat()] * 2) == [7, 3]
    lengths.keep([1])
    assert not lengths.stops_early
    assert lengths.limits(COSTS, [None]) == [3], "what it would draft had it room"
    lengths.keep([])
    assert lengths.signals == frozenset()


@dataclass(frozen=True)
class Nosy(LengthPolicy):
    """Stops at token 0, whatever it declares, and leaves it out."""

    declared: frozenset[str] = frozenset()
    stops_early: ClassVar[bool] = True

    def signals(self, certain):
        return self.declared

    def limit(self, state):
        return 4

    def step(self, state, memo, token):
        return token.id != 0, token.id == 0

    def trim(self, state, memo):
        return int(memo)


def test_a_policy_is_shown_what_it_declares():
    """Also beside one that is shown more; see `test_hole` for why."""
    lengths = lengths_of(Nosy(), Nosy(frozenset({"id"})), certain=False)
    lengths.limits(COSTS, [Seat()] * 2)
    assert lengths.go([Token(id=0, previous=3)] * 2) == [True, False]
    assert lengths.trim(1) == 0, "where coins decide, nothing is left out for what it is"
    greedy = lengths_of(Nosy(frozenset({"id"})))
    greedy.limits(COSTS, [Seat()])
    greedy.go([Token(id=0)])
    assert greedy.trim(0) == 1


def test_states_follow_their_rows():
    lengths = lengths_of(*["hf-heuristic(length=4)"] * 3)
    lengths.limits(COSTS, [Seat()] * 3)
    observe(lengths, [RoundOutcome(4, n, [1.0] * 4, tokens=[SURE] * 4) for n in (4, 0, 4)])
    assert lengths.limits(COSTS, [Seat()] * 3) == [6, 3, 6]
    lengths.keep([2, 1])
    lengths.join(CONTROLLERS.make("hf-heuristic(length=4)"), True)
    assert lengths.limits(COSTS, [Seat()] * 3) == [6, 3, 4]


def test_the_newest_request_that_left_is_remembered():
    memory: dict[Any, Any] = {}
    auto = CONTROLLERS.make("auto")
    lengths = lengths_of(auto, auto, memory=memory)
    lengths.limits(COSTS, [Seat()] * 2)
    observe(
        lengths, [RoundOutcome(4, n, [1.0] * n + [0.0] * (4 - n), 0, [SURE] * 4) for n in (0, 4)]
    )
    lengths.keep([1])
    assert set(memory) == {auto, ("pace", auto)}
    first = memory[auto]
    lengths.keep([])
    assert memory[auto].shift > first.shift
    later = lengths_of(auto, memory=memory)
    assert later._groups[0].pace.reserve == memory["pace", auto].reserve
    # Costs of its own: it starts from nothing, and leaves nothing.
    alone = Lengths(memory)
    alone.join(auto, True, given=COSTS)
    assert alone._groups[0].pace == Renewal().join(Renewal().start(), 1.0)
    before = dict(memory)
    alone.keep([])
    assert memory == before


@dataclass(frozen=True)
class Broken(Forecaster):
    """Fails in one of its methods."""

    where: str
    threshold: float = 0.5

    def _do(self, method: str, answer: Any) -> Any:
        if method == self.where:
            raise RuntimeError(f"no {method}")
        return answer

    def limit(self, state):
        return self._do("limit", 4)

    def outlook(self, state):
        return self._do("outlook", Outlook(0.5, 0.5))

    def forecast(self, state, memo, token):
        return self._do("forecast", Chance(0.5, 0.5)), None

    def trim(self, state, memo):
        return self._do("trim", 0)

    def observe(self, state, round):
        return self._do("observe", state)


@pytest.mark.parametrize("governed", [True, False])
@pytest.mark.parametrize("where", ["limit", "outlook", "forecast", "trim", "observe"])
def test_what_is_wrong_with_one_row_ends_no_other(where, governed):
    if where in (("limit", "trim") if governed else ("outlook",)):
        pytest.skip("not asked")
    memory: dict[Any, Any] = {}
    broken = Renewal(Broken(where)) if governed else Broken(where)
    lengths = lengths_of("fixed(2)", broken, "auto", memory=memory)
    for _ in range(3):
        limits = lengths.limits(COSTS, [Seat()] * 3)
        assert limits[0] == 2
        assert limits[2] == 32
        answers = lengths.go([SURE] * 3)
        assert answers[0]
        assert answers[2]
        for i in range(3):
            lengths.trim(i)
        observe(lengths, [RoundOutcome(1, 1, [1.0], 0, [SURE])] * 3)
    assert list(lengths.failed) == [1]
    assert str(lengths.failed[1]) == f"no {where}"
    assert lengths.go([SURE] * 3)[1] is False
    lengths.keep([1, 2])
    assert list(lengths.failed) == [0]
    lengths.keep([1])
    assert lengths.failed == {}
    assert broken not in memory, "what a broken policy had learned is not for the next request"


def test_what_others_draft_in_any_case_costs_a_governor_nothing():
    """A step and a width that are taken anyway."""
    dear = Costs.synthetic(1.2, 0.5)
    governor = Renewal()
    poor = governor.start()._replace(budget=0.0)
    seats = {1: Seat(outlook=Outlook(0.5, 0.5))}
    alone, beside = (governor.open(poor, dear, seats, 2, paid) for paid in (0, 4))
    assert (alone.most, beside.most) == ({1: 0}, {1: 32})
    for _ in range(3):
        assert beside.go({1: Chance(0.6, 0.6)}) == [1]
    assert beside.go({1: Chance(0.6, 0.6)}) == []
