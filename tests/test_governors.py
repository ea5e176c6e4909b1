"""Governors weigh what policies forecast against costs, and lose no more than they may."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from forerun.controllers import CONTROLLERS
from forerun.controllers.base import Chance, Outlook
from forerun.costs import Costs
from forerun.governors import Outcome, Seat
from forerun.governors.renewal import HELD_UP, Renewal
from forerun.governors.renewal import Pace as Paced
from forerun.lab.traces.replay import replay, stream
from made_traces import trace_of
from marks import slow_but

COSTS = Costs.synthetic(5, 0.02)
SPECS = ["auto", "auto(calibrated)", "goodput", "goodput(survival)", "auto(cost=4,high=3)"]
HOPE = Outlook(0.6, 0.8)
FULL = Renewal().start()
RESERVE, BUDGET, INTEREST, MOST = FULL.reserve, FULL.budget, 0.01, 1.0


def Pace(**changes) -> Paced:
    """That of an engine that begins, but for these."""
    return FULL._replace(**changes)


def make(spec):
    return CONTROLLERS.make(spec)


def drafted(governor, chances, costs=COSTS, pace=None, **seat):
    """Tokens that a row alone drafts whose tokens have these chances, and how many are trimmed."""
    pace = governor.start() if pace is None else pace
    plan = governor.open(pace, costs, {0: Seat(outlook=HOPE, **seat)}, 1, 0)
    if not plan.most[0]:
        return 0, 0
    for n, chance in enumerate(chances, 1):
        if n == plan.most[0] or not plan.go({0: Chance(*chance)}):
            return n, plan.trim(0)
    raise AssertionError("more chances")


@pytest.mark.parametrize(
    ("outlooks", "drafts"),
    [((HOPE, HOPE), [True, True]), ((Outlook(0.95, 0.95), Outlook(0.1, 0.1)), [False, True])],
)
def test_a_token_of_a_row_that_keeps_more_is_worth_less(outlooks, drafts):
    """Its text is done sooner by less time; a token of both costs 2 · 0.35, one chance is 0.81."""
    seats = {i: Seat(outlook=outlook) for i, outlook in enumerate(outlooks)}
    for row, wanted in enumerate(drafts):
        plan = Renewal().open(FULL, Costs.synthetic(20, 0.3), seats, 2, 0)
        assert bool(plan.go({i: Chance(0.9 * (i == row), 0.9) for i in seats})) == wanted


@pytest.mark.parametrize("spec", SPECS)
def test_a_governor_is_settings(spec):
    governor = make(spec)
    assert pickle.loads(pickle.dumps(governor)) == governor
    assert hash(governor) == hash(make(spec))
    assert make(CONTROLLERS.text(governor)) == governor
    pace = governor.join(governor.start(), 1.0)
    plan = governor.open(pace, COSTS, dict.fromkeys((0, 2), Seat(outlook=HOPE)), 3, 0)
    assert list(plan.most) == [0, 2]
    assert all(0 < most <= governor.high for most in plan.most.values())
    assert 0 not in plan.go({2: Chance(0.99, 0.99)})
    assert plan.go({2: Chance(0.01, 0.01)}) == []
    after = governor.observe(pace, COSTS, plan, Outcome({0: 2, 1: 1, 2: 1}, {0: 2, 1: 1, 2: 0}, 2))
    assert type(after) is type(pace)


def test_the_rule_by_hand():
    """Draft on while `S·ŝ > λ·(d + v)`: at c = 5, v = 0.02 a token costs 0.22 plain tokens."""
    high = [(0.9, 0.9), (0.7, 0.5), (0.5, 0.4)]
    assert drafted(Renewal(), high, trims=False) == (3, 0)  # 0.81, 0.35 > 0.22 ≥ 0.2
    dear = Pace(tokens=30.0, time=10.0)  # λ is 34/14: a token costs 0.53
    assert drafted(Renewal(), high, pace=dear, trims=False) == (2, 0)
    assert drafted(Renewal(), [(0.2, 0.5)], trims=False) == (1, 0)
    pairs = replace(COSTS, first=0.2 * COSTS.plain, ahead=2)  # the third costs 0.42, 0.35 are kept
    assert drafted(Renewal(), high[:2], pairs, trims=False) == (2, 0)
    assert drafted(Renewal(), high, replace(pairs, ahead=3), trims=False) == (3, 0)


def test_tokens_that_do_not_pay_their_place_are_left_out():
    slow = Costs.synthetic(10, 0.4)  # to judge one takes 0.4 plain tokens
    assert drafted(Renewal(), [(0.3, 0.5)], slow) == (1, 1)
    assert drafted(Renewal(), [(0.9, 0.9), (0.3, 0.1)], slow) == (2, 1)
    assert drafted(Renewal(), [(0.9, 0.9), (0.3, 0.1)], slow, trims=False) == (2, 0)


def test_a_token_that_pays_for_a_level_is_weighed_with_those_behind_it():
    levels = Costs(
        0.05, ((1, 1.0), (2, 1.0), (4, 1.0), (5, 1.9), (8, 1.9), (9, 3.0)), levels=(4, 8)
    )
    sure = [(0.98**n, 0.98) for n in range(1, 9)]
    assert drafted(Renewal(), sure, levels)[0] == 7
    unsure = [(0.9, 0.9), (0.8, 0.6), (0.5, 0.3)]
    assert drafted(Renewal(), unsure, levels)[0] == 3


def test_a_blind_draft_is_as_long_as_pays():
    for first, later, lengths in ((0.9, 0.95, range(6, 20)), (0.5, 0.5, range(1, 4))):
        seat = Seat(blind=True, outlook=Outlook(first, later))
        most = Renewal().open(Pace(), COSTS, {0: seat}, 1, 0).most[0]
        assert most in lengths


@pytest.mark.parametrize(
    ("kept", "left_out"),
    [((0.9, 0.1, 0.1, 0.1), [1, 1, 1, 1]), ((0.9, 0.9, 0.9, 0.1), [0, 0, 0, 0])],
)
def test_rows_that_share_a_graph_fill_it_together_or_not_at_all(kept, left_out):
    """The first token beyond four takes half a pass, or two tokens; three more take nothing. What
    coins decide stays, whatever it is, and then pays for others."""
    passes = (1, 1.0), (1.25, 1.5), (2, 1.5), (2.25, 3.0)
    costs = Costs(0.2, passes, batch=4, levels=(1.0, 2.0), packed=True)
    for certain in (range(4), range(3)):
        seats = {i: Seat(outlook=HOPE, trims=i in certain) for i in range(4)}
        plan = Renewal().open(Pace(), costs, seats, 4, 0)
        assert plan.go({i: Chance(chance, 0.3) for i, chance in enumerate(kept)}) == []
        assert [plan.trim(i) for i in seats] == (left_out if len(certain) == 4 else [0] * 4)


def test_rows_go_on_whose_tokens_fill_a_graph():
    """Four more tokens take half a pass, and a step a tenth: two rows do not pay for them."""
    passes = (1, 1.0), (2, 1.0), (2.25, 1.5), (3, 1.5), (3.25, 9.0)
    costs = Costs(0.1, passes, batch=4, levels=(1.0, 2.0, 3.0), packed=True)
    for likely in range(5):
        plan = Renewal().open(Pace(), costs, dict.fromkeys(range(4), Seat(outlook=HOPE)), 4, 0)
        going = plan.go({i: Chance(1.0, 0.9 * (i < likely)) for i in range(4)})
        assert [*going] == ([*range(likely)] if likely > 2 else [])


def test_a_draft_that_rides_with_the_prompt_costs_its_steps():
    riding = replace(Costs.synthetic(10, 0.0), verify=((1, 1.0), (2, 3.0), (3, 3.0)), prefill=0.1)
    chances = [(0.8, 0.5), (0.4, 0.2)]
    assert drafted(Renewal(), chances, riding, rides=True) == (2, 0)
    assert drafted(Renewal(), chances, riding) == (1, 1)


def test_in_a_packed_batch_a_token_that_rides_adds_its_own_share():
    passes = (1, 1.0), (2, 1.2), (3, 3.2), (8, 3.3)
    costs = Costs(0.05, passes, batch=4, levels=(2,), packed=True, prefill=0.1)
    for rides in (True, False):  # 0.02 and 2 plain tokens for 0.45
        seats = dict.fromkeys(range(4), Seat(outlook=HOPE, rides=rides))
        plan = Renewal().open(Pace(), costs, seats, 4, 0)
        going = plan.go(dict.fromkeys(range(4), Chance(0.5, 0.9)))
        assert going == [0, 1, 2, 3] * rides


# --- the budget ---------------------------------------------------------------------------------


def book(pace, tokens, **how):
    given = {"judged": {0: 1}, "steps": 1, **how}
    return Renewal().observe(pace, COSTS, None, Outcome({0: tokens}, **given))


def test_what_is_booked_by_hand():
    lost = book(Pace(), 1)  # 1.22 plain rounds for a token
    assert lost.budget == pytest.approx(BUDGET - 0.22 + INTEREST)
    assert lost.reserve == pytest.approx(RESERVE - 0.22 + INTEREST)
    won = book(Pace(), 2, seconds=1.1)
    assert won.budget == pytest.approx(BUDGET + 2 - 1.1 + 2 * INTEREST)
    slow = book(Pace(), 1, seconds=50.0)  # the clock has outliers
    assert slow.budget == pytest.approx(BUDGET - MOST)
    assert slow.reserve == pytest.approx(RESERVE + 1 - HELD_UP * 1.22 + INTEREST)
    reading = book(Pace(), 2, reading=3.0)
    assert reading.budget == book(Pace(), 2).budget
    assert reading.reserve == pytest.approx(RESERVE + 2 - 1.22 + 2 * INTEREST - 3.0)
    along = Renewal().observe(Pace(), COSTS, None, Outcome({}, {}, 0, reading=3.0))
    assert along == Pace(reserve=RESERVE - 3.0), "a part of a prompt"
    long = book(Pace(), 1, judged={0: 20}, steps=20)
    assert long.budget == pytest.approx(BUDGET - MOST)
    assert book(Pace(budget=0.1), 1, judged={0: 20}, steps=20).budget == 0
    plain = book(Pace(), 1, judged={0: 0}, steps=0)
    assert plain.budget == pytest.approx(BUDGET + INTEREST)


def test_without_a_budget_nothing_is_drafted_until_interest_has_paid_for_a_look():
    pace, rounds = Pace(budget=0.0), 0
    while drafted(Renewal(), [(0.1, 0.1)], pace=pace) == (0, 0):
        pace, rounds = book(pace, 1, judged={0: 0}, steps=0), rounds + 1
    assert rounds == pytest.approx(0.2 / INTEREST, abs=1)
    assert drafted(Renewal(), [(0.9, 0.9)], pace=Pace(reserve=0.1)) == (0, 0)


def test_of_a_batch_those_are_read_that_the_reserve_pays_for():
    """A reading of all that it cannot pay for would leave nobody to try the draft."""
    costs = replace(Costs.synthetic(5, 0.02), reading=0.01, packed=True, batch=3)
    seats = [Seat(outlook=HOPE, unread=n, left=500) for n in (90, 30, 50)]

    def drafting(reserve):
        plan = Renewal().open(Pace(reserve=reserve), costs, dict(enumerate(seats)), 3, 0)
        return [most > 0 for most in plan.most.values()]

    assert drafting(16.0) == [True, True, True]
    assert drafting(1.3) == [True, False, False]
    assert drafting(0.9) == [False, True, False]
    assert drafting(0.3) == [False, False, False]
    over = [seats[0], seats[1]._replace(left=0), seats[2]]  # nothing is read for a text at its end
    plan = Renewal().open(Pace(reserve=0.75), costs, dict(enumerate(over)), 3, 0)
    assert [most > 0 for most in plan.most.values()] == [False, False, True]
    short = {0: seats[0]._replace(left=2)}
    assert Renewal().open(Pace(), costs, short, 3, 0).most == {0: 0}


def test_a_governor_rests_where_no_step_can_be_paid():
    assert Renewal().rests(Pace(budget=0.1), COSTS)
    assert Renewal().rests(Pace(reserve=0.1), COSTS)
    assert not Renewal().rests(Pace(), COSTS)
    assert Renewal().rests(Pace(), replace(COSTS, retime="plain"))
    assert not make("goodput").rests((), COSTS)


def test_a_bet_is_weighed_by_how_likely_it_is_lost():
    few = Pace(budget=0.3)
    sure = [(0.99**n, 0.99) for n in range(1, 40)]
    assert drafted(Renewal(), sure, pace=few)[0] > 5
    assert drafted(Renewal(), [(0.5, 0.9), (0.45, 0.9), (0.4, 0.9)], pace=few)[0] == 2


def test_requests_bring_budgets_of_their_own_and_share_the_reserve():
    governor = Renewal()
    used = Pace(reserve=RESERVE, budget=0.0, tokens=40.0, time=10.0)
    alone = governor.join(used, 1.0)
    assert (alone.reserve, alone.budget) == (RESERVE, BUDGET)
    assert governor.join(used, 0.25).budget == BUDGET / 4
    for left in (0.0, 0.5):  # what is lost of the reserve is not spent again by the next request
        assert governor.join(used._replace(reserve=left * RESERVE), 1.0).budget == left * BUDGET
    assert 1 <= governor.rate(alone) < governor.rate(used) < governor.rate(used, rows=4) < 4


@pytest.mark.parametrize("cost", slow_but([0.8, 2, 5, 20], (2, 20).__contains__))
def test_no_traffic_loses_more_than_the_reserve_and_the_interest(cost):
    """Whatever is kept: nothing, a little, or in phases; as the costs say, which are true here."""
    rng = np.random.default_rng(3)
    phase = np.where((np.arange(300) // 60) % 2 == 0, 0.9, 0.02)
    for hits in (np.zeros((6, 300)), rng.random((6, 300)) < 0.05, rng.random((6, 300)) < phase):
        done = stream(trace_of(hits), "auto", Costs.synthetic(cost, 0.05), np.arange(6))
        lost = done.seconds.sum() - done.plain_seconds.sum()
        # The last bet may be lost beyond what was left.
        assert lost <= RESERVE + 0.011 * done.committed.sum() + 4
        if not np.any(hits):
            assert (done.seconds - done.plain_seconds).max() < BUDGET + 2 * MOST + 0.011 * 300


def test_where_drafts_are_kept_it_is_near_the_best_fixed_length():
    rng = np.random.default_rng(0)
    for chance in (0.8, 0.95):
        hits = rng.random((12, 300)) < chance
        trace = trace_of(hits, 24)
        for cost in (5, 20):
            costs = Costs.synthetic(cost, 0.02)
            best = max(replay(trace, f"fixed({n})", costs).speedup.mean() for n in (2, 4, 8, 16))
            assert stream(trace, "auto", costs, np.arange(12)).speedup.mean() > 0.85 * best


def test_rows_of_packed_passes_decide_each_for_itself():
    packed = Costs(0.05, ((1, 1.0), (2, 1.4), (3, 1.8)), batch=4, packed=True)
    seats = dict.fromkeys(range(4), Seat(outlook=HOPE))
    plan = Renewal().open(Pace(), packed, seats, 4, 0)
    likely, unlikely = Chance(0.95, 0.95), Chance(0.1, 0.1)
    assert plan.go({0: likely, 1: unlikely, 2: likely, 3: unlikely}) == [0, 2]
    padded = replace(packed, packed=False)
    plan = Renewal().open(Pace(), padded, seats, 4, 0)
    assert plan.go(dict.fromkeys(seats, likely)) == [0, 1, 2, 3]
    few = Renewal().open(Pace(), padded, seats, 4, 0)
    assert few.go({0: likely, 1: unlikely, 2: unlikely, 3: unlikely}) == []


def test_a_kind_of_pass_that_was_not_timed_for_long_is_taken_now():
    plain = replace(COSTS, retime="plain")
    assert drafted(Renewal(), [(0.9, 0.9)], plain) == (0, 0)
    judged = replace(Costs.synthetic(10, 0.4), retime="judged")
    assert drafted(Renewal(), [(0.3, 0.5)], judged) == (1, 0)
    assert drafted(Renewal(), [(0.3, 0.5)], judged, pace=Pace(budget=0.2)) == (1, 1)
