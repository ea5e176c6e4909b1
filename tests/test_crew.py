"""Rows that share a pass: each has its own controller, and what is wrong with one ends no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from forerun.controllers import CONTROLLERS, LengthController
from forerun.controllers.auto import Auto
from forerun.costs import Costs
from forerun.engine.crew import MOST_UNTIMED, Crew
from forerun.engine.meter import Lap, Meter
from forerun.types import Round, Stop, Token

COSTS = Costs.synthetic(5, 0.02)


def crew_of(*specs, memory=None):
    crew = Crew(Meter.given(COSTS), memory)
    for spec in specs:
        crew.join(CONTROLLERS.make(spec) if isinstance(spec, str) else spec)
    return crew


def test_each_row_has_its_own_policy():
    crew = crew_of("fixed(3)", "gammatune+(threshold=0.5,keep=false)", "fixed(0)", "svip")
    assert crew.signals == {"top1", "entropy"}
    assert crew.asks
    assert crew.left_out == [0, 1, 0, 0]
    assert crew.previews == [False] * 4
    assert crew.limits() == [3, 7, 0, 40]
    sure, unsure = Token(top1=0.9, entropy=0.1), Token(top1=0.1, entropy=5.0)
    assert crew.go([unsure, unsure, None, unsure]) == [True, False, False, False]
    assert crew.go([sure, None, None, sure]) == [True, False, False, True]
    crew.keep([1, 0])
    assert crew.left_out == [1, 0]
    assert crew.signals == {"top1"}
    assert crew.limits() == [7, 3]
    crew.keep([1])
    assert not crew.asks
    assert crew.limits() == [3]
    crew.keep([])
    assert crew.signals == frozenset()


def test_what_only_sampled_rows_need_is_read_while_there_is_one():
    crew, auto = Crew(Meter.given(COSTS)), CONTROLLERS.make("auto")
    crew.join(auto, certain=True)
    assert crew.signals == {"logit_margin"}
    crew.join(auto, certain=False)
    assert crew.signals == {"logit_margin", "chosen"}
    crew.keep([0])
    assert crew.signals == {"logit_margin"}


def test_states_follow_their_rows():
    crew = crew_of(*["hf-heuristic(length=4)"] * 3)
    crew.limits()
    crew.observe([Round(4, accepted, [1.0] * 4) for accepted in (4, 0, 4)])
    assert crew.limits() == [6, 3, 6]
    crew.keep([2, 1])
    crew.join(CONTROLLERS.make("hf-heuristic(length=4)"))
    assert crew.limits() == [6, 3, 4]


def test_the_newest_request_that_left_is_remembered():
    memory: dict[LengthController, Any] = {}
    crew = crew_of("auto", "auto", "gammatune", memory=memory)
    crew.limits()
    tokens = [Token(logit_margin=1.0, chosen=0.5)] * 4
    crew.observe([Round(4, n, [1.0] * 4, 0, tokens) for n in (0, 4, 4)])
    crew.keep([1, 2])
    auto = CONTROLLERS.make("auto")
    assert set(memory) == {auto}
    first = memory[auto]
    crew.keep([])
    assert memory[auto] != first
    assert memory[auto].learned.shift > first.learned.shift


@dataclass(frozen=True)
class Broken(LengthController):
    """Fails in one of its methods."""

    where: str
    asks = True  # type: ignore[assignment]
    previews = True  # type: ignore[assignment]
    carries = True  # type: ignore[assignment]

    def _do(self, method: str, answer: Any) -> Any:
        if method == self.where:
            raise RuntimeError(f"no {method}")
        return answer

    def limit(self, state, costs):
        return self._do("limit", 4)

    def look(self, state, costs):
        return self._do("look", self.open(state, costs))

    def left_out(self, state, costs, memo):
        return self._do("left_out", 0)

    def fold(self, state, memo, token):
        return self._do("fold", token)

    def keep_going(self, state, costs, memo):
        return self._do("keep_going", self.where != "left_out")

    def plan(self, state, costs, memo):
        return self._do("plan", 1)

    def observe(self, state, costs, round):
        return self._do("observe", state)


@pytest.mark.parametrize(
    "where", ["limit", "look", "fold", "keep_going", "left_out", "plan", "observe"]
)
def test_what_is_wrong_with_one_row_ends_no_other(where):
    memory: dict[LengthController, Any] = {}
    crew = Crew(Meter.given(COSTS), memory)
    for controller in (CONTROLLERS.make("fixed(2)"), Broken(where), Auto()):
        crew.join(controller, certain=True)
    token = Token(1, logit_margin=9.0, chosen=0.99, top1=0.9)
    for _ in range(3):
        limits = crew.limits()
        assert limits == [2, 0 if crew.failed else 4, 32]
        answers = crew.go([token] * 3)
        assert answers[0] is True
        assert answers[2] is True
        assert crew.plan([[token]] * 3)[::2] == [1, 1]
        crew.observe([Round(1, 1, [1.0], 0, [token])] * 3)
    assert list(crew.failed) == [1]
    assert str(crew.failed[1]) == f"no {where}"
    assert crew.go([token] * 3)[1] is False
    crew.keep([1, 2])
    assert list(crew.failed) == [0]
    crew.keep([1])
    assert crew.failed == {}
    assert memory == {}, "what a broken controller had learned is not for the next request"


def test_rows_that_cannot_draft_lose_the_time_of_those_that_can():
    """A few rows that gain a little do not make all others wait."""
    costs = Costs.synthetic(4, slope=0.2)
    crew = Crew(Meter.given(costs))
    for _ in range(16):
        crew.join(Auto())
    opening = Auto().open(Auto().start(), costs)
    assert opening.idle < 0 < opening.worth
    assert min(crew.limits()) > 0
    enough = int(16 * opening.idle / (opening.idle - opening.worth)) + 1
    assert 3 < enough < 16
    assert min(crew.limits([i < enough for i in range(16)])) > 0
    assert crew.limits([i < enough - 2 for i in range(16)]) == [0] * 16
    # Where none can, nobody has chosen to rest.
    assert min(crew.limits([False] * 16)) > 0


def test_a_round_that_is_not_timed_is_not_bent_to_be_timed():
    meter = Meter()
    crew = Crew(meter)
    for _ in range(4):
        crew.join(Auto())
    assert max(crew.limits()) == max(crew.limits(timed=False)) == MOST_UNTIMED
    meter.tell(Lap(4, 3, 3, 0.003, 0.001, 0.010))
    assert meter.wants(4) == "plain"
    assert crew.limits() == [0] * 4
    assert min(crew.limits(timed=False)) > 0
    # A draft as slow as its target rests, unless that tells the time.
    crew = Crew(Meter(1.0))
    crew.join(Auto())
    assert crew.limits() == [MOST_UNTIMED]
    assert crew.limits(timed=False) == [0]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_only_a_greedy_row_alone_leaves_out_tokens_for_what_they_are(greedy, rows):
    crew = Crew(Meter.given(Costs.synthetic(10, slope=1.0)))
    for _ in range(rows):
        crew.join(Auto(), certain=greedy)
    crew.limits()
    unsure = Token(id=1, previous=2, logit_margin=0.1, chosen=0.3)
    assert crew.go([unsure] * rows) == [False] * rows
    assert crew.left_out == [int(greedy and rows == 1)] * rows


def test_a_draft_that_is_there_to_be_timed_is_judged():
    crew = Crew(Meter())
    crew.join(Auto(), certain=True)
    assert crew.limits() == [MOST_UNTIMED]
    crew.go([Token(id=1, previous=2, logit_margin=0.01, chosen=0.1)])
    assert crew.left_out == [0]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_that_all_rest_are_not_asked_and_told_in_sum(rows, monkeypatch):
    """As if they had been asked and told every round, though costs, room and rows change."""

    def played():
        random, opened = np.random.default_rng(1), 0
        memory: dict[LengthController, Any] = {}
        costs = [Costs.synthetic(2, 0.8), Costs.synthetic(2, 0.81), Costs.synthetic(3, 0.2)]
        now = costs[0]
        crew = Crew(Meter.given(lambda _: now), memory)
        controller, seen = Auto(), []
        for row in range(rows):
            crew.join(controller, certain=row % 2 == 0)
        for turn in range(600):
            if random.random() < 0.02:
                now = costs[random.integers(3)]
            able = [bool(random.random() > 0.01) for _ in range(rows)]
            limits = [n * on for n, on in zip(crew.limits(able), able, strict=True)]
            opened += crew._slept == 0
            drafted = min(max(limits), 2)
            kept = int(random.integers(2)) * drafted
            shown = [Token(logit_margin=1.0, chosen=0.5, id=3)] * drafted
            why = [Stop.LIMIT if on else Stop.BUDGET for on in able]
            crew.observe(
                [
                    Round(drafted, kept, [1.0] * kept + [0.0] * (drafted - kept), stop, shown)
                    if limit
                    else Round(0, 0, (), stop)
                    for limit, stop in zip(limits, why, strict=True)
                ]
            )
            seen.append(limits)
            if turn % 50 == 49:
                crew.keep(range(1, rows))
                crew.join(controller, certain=True)
        crew.keep([])
        return seen, memory[controller]._replace(table=()), opened

    seen, memory, opened = played()
    monkeypatch.setattr("forerun.engine.crew.MOST_NAP", 0)
    asked, remembered, all_rounds = played()
    assert seen == asked
    assert any(map(any, seen))
    assert memory == remembered
    assert all_rounds == 600
    assert opened < 400
