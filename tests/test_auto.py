"""`auto` follows its rule, by hand and on simulated drafts with a simulated clock."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from forerun.controllers import CONTROLLERS, auto_costs
from forerun.controllers.auto import Auto
from forerun.controllers.auto_survival import AHEAD_INFO, GREEDY, LEFT, SCALE_INFO, USELESS
from forerun.types import RoundOutcome, Signals, Stop

K = 24


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, dtype=float)))


def signals(margins, chosen=0.5):
    margins = np.array([margins], dtype=float)
    return Signals(logit_margin=margins, chosen=np.full_like(margins, chosen))


def seen(drafted, accepted, margins=None, prob=None, stop=Stop.LIMIT, clock=(0.0, 0.0)):
    """One row's round of a greedy request; `margins` None is a drafter without a distribution."""
    hit = np.arange(max(drafted, 1)) < accepted
    return RoundOutcome(
        np.array([drafted]),
        np.array([accepted]),
        np.array([hit.astype(float) if prob is None else prob]),
        np.array([int(stop)]),
        Signals() if margins is None else signals(margins),
        *clock,
    )


class Source:
    """Texts whose draft keeps each token with a chance that its margin tells, and a clock.

    With `chance` given the margins tell nothing: they are all `margin`.
    """

    def __init__(self, c, slope=0.0, jump=0.0, chance=None, margin=3.0, blind=False, seed=0):
        self.draft, self.slope, self.jump = 1 / c, slope, jump
        self.chance, self.margin, self.blind = chance, margin, blind
        self.random = np.random.default_rng(seed)

    def verify(self, drafted):
        return 1 + self.jump * (drafted > 0) + self.slope * drafted

    def run(self, controller, state, tokens):
        """The state after at least `tokens` tokens, and tokens per time."""
        done, time = 0, 0.0
        while done < tokens:
            margins = self.random.gamma(1.5, 2.5, (1, K))
            chance = sigmoid(GREEDY[0] + GREEDY[1] * np.minimum(margins, 8))
            if self.chance is not None:
                margins[:], chance[:] = self.margin, self.chance
            hits = self.random.random((1, K)) < chance
            drafted, limit = 0, min(int(controller.limit(state)[0]), K)
            told = Signals() if self.blind else signals(margins[0])
            while drafted < limit:
                drafted += 1
                part = told if self.blind else signals(margins[0, :drafted])
                if not controller.keep_going(state, np.array([drafted]), part)[0]:
                    break
            accepted = int(hits[0, :drafted].cumprod().sum())
            clock = (drafted * self.draft, self.verify(drafted))
            shown = None if self.blind else margins[0, :drafted] if drafted else np.zeros(1)
            state = controller.observe(state, seen(drafted, accepted, shown, clock=clock))
            done, time = done + accepted + 1, time + sum(clock)
        return state, done / time


def speed(source, controller, tokens=1500):
    return source.run(controller, controller.start(1), tokens)[1]


def test_the_rule_by_hand():
    controller = Auto(cost=4, slope=0.1)
    state = replace(controller.start(1), price=np.array([0.5]))
    share = sigmoid(state.soft)[0]
    assert share < 0.2  # greedy is expected
    margins = [3.0, 1.0]
    kept = sigmoid(state.kept[0, 0] + state.kept[0, 1] * np.array(margins) + state.kept[0, 2] * 0.5)
    ahead = sigmoid(state.next[0, 1] + state.next[0, 2] * 1.0 + state.next[0, 3] * 2.0)
    worth = kept.prod() * ahead * (1 - sigmoid(USELESS))
    for price in (worth - 1e-9, worth + 1e-9):
        state = replace(state, price=np.array([price]))
        go = controller.keep_going(state, np.array([2]), signals(margins))
        assert go.tolist() == [worth > price]


def test_price_is_the_rate_times_what_a_token_costs():
    # c = 4, v = 0.1: a token costs 0.25 + 0.1·1.1; before anything was seen the rate is that of the
    # best fixed length, here by search, and it is at least 1, that of plain decoding.
    controller = Auto(cost=4, slope=0.1)
    state = controller.start(1)
    useful = 1 - sigmoid(USELESS)
    first = useful * sigmoid(state.next[0, 0])
    later = useful * sigmoid(state.next[0, 1] + 4 * (state.next[0, 2] + state.next[0, 3]))
    each = 0.25 + 0.1 * 1.1
    rates = [
        (1 + first * sum(later**j for j in range(n))) / (1.1 + 0.25 + (n - 1) * each)
        for n in range(1, 33)
    ]
    np.testing.assert_allclose(state.price, max(rates) * each, rtol=1e-12)
    dear = Auto(cost=0.1, slope=0.1).start(1)
    assert not dear.awake[0]
    np.testing.assert_allclose(dear.price, 10 + 0.11)


def test_one_round_corrects_by_hand():
    controller = Auto(cost=4)
    state = replace(controller.start(1), soft=np.array([-10.0]))
    z = np.array(GREEDY[0] + GREEDY[1] * np.array([2.0, 1.0]))
    p, hit = sigmoid(z), np.array([1.0, 0.0])
    w = p * (1 - p)
    info = np.array([[w.sum(), (w * z).sum()], [(w * z).sum(), (w * z * z).sum()]])
    turn = np.linalg.solve(info + np.diag(SCALE_INFO), [(hit - p).sum(), ((hit - p) * z).sum()])
    q = sigmoid([GREEDY[3], GREEDY[4] + (GREEDY[5] + GREEDY[6]) * 2.0])
    new = controller.observe(state, seen(3, 1, [2.0, 1.0, 5.0]))
    np.testing.assert_allclose(new.scale[0], np.add(turn, [0, 1]), rtol=1e-3)
    ahead = (hit - q).sum() / (AHEAD_INFO + (q * (1 - q)).sum())
    np.testing.assert_allclose(new.ahead[0], ahead, rtol=1e-3)
    useless = np.log(LEFT / q[0]) + np.log((1 - LEFT) / (1 - q[1]))
    np.testing.assert_allclose(new.useless[0], max(USELESS + useless, USELESS), rtol=1e-3)


def test_nothing_behind_a_rejection_teaches():
    controller = Auto()
    state = controller.start(1)
    one = seen(4, 1, [5.0, 1.0, 0.1, 7.0], prob=[1.0, 0.0, 0.0, 0.0])
    two = seen(4, 1, [5.0, 1.0, 6.0, 0.2], prob=[1.0, 0.0, 1.0, 0.5])
    one, two = controller.observe(state, one), controller.observe(state, two)
    for f in fields(one):
        np.testing.assert_array_equal(getattr(one, f.name), getattr(two, f.name), err_msg=f.name)


def test_it_tells_greedy_from_sampled():
    controller = Auto()
    start = controller.start(1)
    greedy = controller.observe(start, seen(2, 1, [2.0, 1.0]))
    sampled = controller.observe(start, seen(2, 1, [2.0, 1.0], prob=[1.0, 0.3]))
    assert sigmoid(greedy.soft)[0] < 0.01
    assert sigmoid(sampled.soft)[0] > 0.99
    assert sampled.kept[0, 2] > 2 > 0.1 > greedy.kept[0, 2]  # the drafted token's probability


def test_costs_are_found_and_outliers_are_not():
    controller, rng = Auto(), np.random.default_rng(0)
    state = controller.start(1)
    for i in range(200):
        drafted = int(rng.integers(0, 9))
        slow = 20.0 if i % 9 == 5 else 1.0  # also another task's turn on the machine
        clock = (0.002 * drafted * slow, (0.010 + (drafted > 0) * 0.003 + 0.0004 * drafted) * slow)
        state = controller.observe(
            state, seen(drafted, drafted, [4.0] * max(drafted, 1), clock=clock)
        )
    assert state.step[0] == pytest.approx(0.002, rel=0.01)
    assert state.plain[0] == pytest.approx(0.010, rel=0.01)
    assert state.base[0] == pytest.approx(0.0134, rel=0.05)
    assert state.slope[0] == pytest.approx(0.0004 / 0.0134, rel=0.5)


def test_given_costs_make_it_repeatable():
    controller = Auto(cost=4)
    state = controller.start(1)
    fast = controller.observe(state, seen(3, 2, [4.0, 2.0, 1.0], clock=(0.01, 0.02)))
    slow = controller.observe(state, seen(3, 2, [4.0, 2.0, 1.0], clock=(0.9, 0.01)))
    for f in fields(fast):
        np.testing.assert_array_equal(getattr(fast, f.name), getattr(slow, f.name))


@pytest.mark.parametrize(("c", "slope", "jump"), [(2, 0, 0.1), (5, 0.03, 0), (20, 0.01, 0.2)])
def test_beats_every_fixed_length_where_confidence_tells(c, slope, jump):
    auto = speed(Source(c, slope, jump), Auto())
    fixed = [
        speed(Source(c, slope, jump), CONTROLLERS.make(f"fixed({n})")) for n in (1, 2, 3, 4, 6, 8)
    ]
    assert auto > 1.05 * max(fixed)


@pytest.mark.parametrize(("c", "chance"), [(5, 0.5), (5, 0.8), (20, 0.9)])
@pytest.mark.parametrize("blind", [False, True])
def test_near_the_best_fixed_length_where_nothing_tells(c, chance, blind):
    # Where tokens are alike and independent some fixed length is the best policy.
    make = lambda: Source(c, 0.02, chance=chance, blind=blind)  # noqa: E731
    best = max(
        speed(make(), CONTROLLERS.make(f"fixed({n})"), 2000) for n in (1, 2, 3, 5, 8, 12, 16)
    )
    assert speed(make(), Auto(), 2000) > 0.96 * best


def copies(controller, first, later, tokens, seed=0):
    """Tokens per time with a drafter that costs nothing, says nothing, and is right in runs."""
    rng, state, done, time = np.random.default_rng(seed), controller.start(1), 0, 0.0
    while done < tokens:
        drafted, accepted = min(int(controller.limit(state)[0]), K), 0
        while accepted < drafted and rng.random() < (later if accepted else first):
            accepted += 1
        clock = (1e-3 * (drafted > 0), 1 + 0.1 * (drafted > 0) + 0.04 * drafted)
        state = controller.observe(state, seen(drafted, accepted, clock=clock))
        done, time = done + accepted + 1, time + sum(clock)
    return done / time


@pytest.mark.parametrize(
    ("first", "later"), [(0.9, 0.97), (0.4, 0.9), (0.3, 0.5), (0.1, 0.5), (0, 0)]
)
def test_a_draft_that_says_nothing_is_as_long_as_pays(first, later):
    fixed = [CONTROLLERS.make(f"fixed({n})") for n in (0, 1, 2, 3, 5, 8, 12, 16, 24)]
    best = max(copies(controller, first, later, 3000) for controller in fixed)
    assert copies(Auto(), first, later, 3000) > 0.95 * best


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40])
def test_the_first_guess_does_not_matter(ratio, monkeypatch):
    usual = speed(Source(5, 0.03), Auto())
    monkeypatch.setattr(auto_costs, "RATIO", float(ratio))
    assert speed(Source(5, 0.03), Auto()) == pytest.approx(usual, rel=0.01)


@pytest.mark.parametrize(("c", "jump"), [(4.2, 0.36), (2, 0.1), (1, 0.2), (0.5, 0)])
@pytest.mark.parametrize("margin", [0.1, 5.0])
def test_hopeless_drafts_cost_next_to_nothing(c, jump, margin):
    controller = Auto()
    source = Source(c, 0.03, jump, chance=0.0, margin=margin)
    state, first = source.run(controller, controller.start(1), 64)
    assert first > 0.6  # nothing is known yet
    assert source.run(controller, state, 2000)[1] > 0.985
    # Requests of 64 tokens, each going on from what the one before learned.
    rates = []
    for _ in range(25):
        state = controller.renew(state)
        state, rate = source.run(controller, state, 64)
        rates.append(rate)
    assert 1 / np.mean(1 / np.array(rates)) > 0.98


def test_a_draft_as_slow_as_the_target_costs_next_to_nothing():
    assert speed(Source(1, 0.03, 0.1, chance=0.9), Auto()) > 0.98


def test_it_comes_back():
    controller = Auto()
    state, _ = Source(4, chance=0.0).run(controller, controller.start(1), 300)
    assert not state.awake[0]
    state, _ = Source(4, chance=0.98, margin=6).run(controller, state, 400)
    assert state.awake[0]
    assert Source(4, chance=0.98, margin=6).run(controller, state, 300)[1] > 2


def test_probes_become_rare():
    controller = Auto(cost=2)
    state, at = controller.start(1), []
    for i in range(1500):
        drafted = min(int(controller.limit(state)[0]), 1)
        state = controller.observe(state, seen(drafted, 0, [0.1]))
        at += [i] if drafted else []
    gaps = np.diff(at)
    assert gaps[-1] == gaps[-2] == max(gaps) > 4 * gaps[gaps > 1][0]


def test_renewed_rows_keep_costs_and_lose_corrections():
    controller = Auto()
    state, _ = Source(8, 0.02, chance=0.3, margin=6).run(controller, controller.start(1), 200)
    new = controller.renew(state)
    for name in ("step", "lead", "base", "slope", "plain", "soft"):
        np.testing.assert_array_equal(getattr(new, name), getattr(state, name))
    assert new.rounds[0] == 0
    assert abs(new.scale[0, 0]) < abs(state.scale[0, 0])
    assert abs(new.ahead[0]) < abs(state.ahead[0])
    # Rest goes on where it was.
    assert new.rounds - new.probed == state.rounds - state.probed


def test_one_hard_text_does_not_rest_the_next_but_many_do():
    controller, hopeless, awake = Auto(), Source(5, chance=0.0), []
    state = controller.start(1)
    for _ in range(8):
        state, _ = hopeless.run(controller, state, 64)
        assert not state.awake[0]
        state = controller.renew(state)
        awake.append(bool(state.awake[0]))
    assert awake == sorted(awake, reverse=True)
    assert awake[0]
    assert not awake[-1]
    state, _ = Source(5, chance=0.98, margin=6).run(controller, state, 400)
    assert controller.renew(state).awake[0]


def test_a_pass_that_read_the_prompt_leaves_the_units_alone():
    """Before anything was timed the unit is a target pass, and must not be added to seconds."""
    controller = Auto()
    state = controller.observe(controller.start(1), seen(1, 0, [0.1]))
    assert state.seconds[0] == 0
    only_draft = replace(seen(3, 1, [4.0, 2.0, 1.0], clock=(0.003, 0.0)), draft_steps=2)
    state = controller.observe(state, only_draft)
    assert state.step[0] == 0.0015
    assert 0 < state.base[0] < 0.1
    assert np.isnan(state.plain[0])


def test_a_first_step_that_is_slower_is_told_apart():
    controller = Auto()
    state = controller.start(1)
    for drafted in (1, 2, 5, 3, 1, 4, 8):
        clock = (0.002 + 0.001 * (drafted - 1), 0.010)
        outcome = seen(drafted, drafted, [4.0] * drafted, clock=clock)
        outcome = replace(outcome, draft_steps=drafted, first_step_seconds=0.002)
        state = controller.observe(state, outcome)
    assert state.step[0] == pytest.approx(0.001)
    assert state.lead[0] == pytest.approx(0.001)


def test_seconds_of_a_batch_or_of_each_row():
    controller = Auto()
    state = controller.start(2)
    outcome = RoundOutcome(
        np.array([2, 2]), np.array([1, 2]), np.ones((2, 2)), np.zeros(2, dtype=int),
        Signals(logit_margin=np.ones((2, 2)), chosen=np.ones((2, 2))), 0.004, 0.010,
    )  # fmt: skip
    each = replace(outcome, draft_seconds=np.full(2, 0.004), verify_seconds=np.full(2, 0.010))
    one, two = controller.observe(state, outcome), controller.observe(state, each)
    for f in fields(one):
        np.testing.assert_array_equal(getattr(one, f.name), getattr(two, f.name))
    assert one.step.tolist() == [0.002, 0.002]


def batch(controller, sources, tokens, state=None, slope=0.25):
    """Rows decoded together by a clock they share: the state, and tokens of all per time.

    A pass judges as many tokens in every row as the longest draft has.
    """
    rows = len(sources)
    state = controller.start(rows) if state is None else state
    done, time = 0, 0.0
    while done < tokens * rows:
        state = controller.regrouped(state)
        margins = np.array([s.random.gamma(1.5, 2.5, K) for s in sources])
        chance = sigmoid(GREEDY[0] + GREEDY[1] * np.minimum(margins, 8))
        for row, source in enumerate(sources):
            if source.chance is not None:
                margins[row], chance[row] = source.margin, source.chance
        hits = np.array([s.random.random(K) for s in sources]) < chance
        limit = np.minimum(controller.limit(state), K)
        drafted, steps, active = np.zeros(rows, dtype=int), 0, limit > 0
        while active.any():
            drafted, steps = drafted + active, steps + 1
            shown = np.where(np.arange(steps) < drafted[:, None], margins[:, :steps], 0.0)
            told = Signals(logit_margin=shown, chosen=np.full(shown.shape, 0.5))
            active &= controller.keep_going(state, drafted, told) & (drafted < limit)
        inside = np.arange(max(steps, 1)) < drafted[:, None]
        kept = (hits[:, : max(steps, 1)] & inside).cumprod(axis=1)
        first = 0.3 * (steps > 0)
        outcome = RoundOutcome(
            drafted,
            kept.sum(axis=1),
            kept.astype(float),
            np.zeros(rows, dtype=int),
            Signals(
                logit_margin=np.where(inside, margins[:, : max(steps, 1)], 0.0),
                chosen=np.where(inside, 0.5, 0.0),
            ),
            draft_seconds=0.2 * steps + 0.1 * (steps > 0),
            verify_seconds=1 + slope * steps,
            draft_steps=steps,
            first_step_seconds=first,
        )
        state = controller.observe(state, outcome)
        done += int(outcome.accepted.sum()) + rows
        time += outcome.draft_seconds + outcome.verify_seconds
    return state, done / time / rows


def rows_of(*chances, margin=3.0):
    return [Source(5, chance=c, margin=margin, seed=i) for i, c in enumerate(chances)]


@pytest.mark.parametrize("source", [{}, {"chance": 0.9}, {"chance": 0.0}])
def test_one_row_decoded_together_is_a_row_by_itself(source):
    alone, together = Auto(), Auto().together()
    one = batch(alone, [Source(5, **source)], 600)
    two = batch(together, [Source(5, **source)], 600)
    assert one[1] == two[1]
    for name in ("price", "awake", "rest", "patience", "step", "base", "slope", "plain", "useless"):
        np.testing.assert_array_equal(getattr(one[0], name), getattr(two[0], name), err_msg=name)


def test_rows_decoded_together_draft_on_while_it_pays_for_all():
    controller = Auto().together()
    state = replace(controller.start(3), price=np.array([0.5, 9.0, 9.0]))  # the first row's counts
    margins = np.array([[6.0], [0.2], [0.2]])
    told = Signals(logit_margin=margins, chosen=np.full((3, 1), 0.5))
    drafted = np.array([1, 1, 1])
    alone = Auto()
    for price in (0.05, 0.2, 0.3, 0.35, 0.5, 0.9):
        state = replace(state, price=np.full(3, price))
        worth = np.array([
            next(
                p for p in np.linspace(0, 1, 20001)
                if not alone.keep_going(replace(state, price=np.full(3, p)), drafted, told)[row]
            )
            for row in range(3)
        ])  # fmt: skip
        go = controller.keep_going(state, drafted, told)
        assert go.tolist() == [worth.sum() > 3 * price] * 3
        # A row that has stopped adds nothing, and still waits for the others.
        wider = Signals(logit_margin=np.hstack([margins, margins]), chosen=np.full((3, 2), 0.5))
        some = controller.keep_going(state, np.array([1, 2, 2]), wider)
        assert some.tolist() == [bool(some[0])] * 3
        assert not some[0] or go[0]


def test_rows_decoded_together_rest_as_one_where_it_does_not_pay():
    controller = Auto().together()
    for slope, sources in ((0.25, rows_of(0.0, 0.0, 0.0, 0.0)), (1.0, rows_of(0.8, 0.3, 0.2, 0.6))):
        state, _ = batch(controller, sources, 100, slope=slope)
        assert not state.awake.any()
        assert np.ptp(controller.limit(state)) == 0
        assert batch(controller, sources, 1500, state, slope)[1] > 0.98


def test_a_batch_is_faster_together_than_each_row_for_itself():
    sources = lambda: rows_of(0.95, 0.5, 0.6, 0.3, 0.5, 0.9, 0.4, 0.7)  # noqa: E731
    together = batch(Auto().together(), sources(), 800)[1]
    assert together > 1.05 * batch(Auto(), sources(), 800)[1]
    fixed = [batch(CONTROLLERS.make(f"fixed({n})"), sources(), 800)[1] for n in (1, 2, 3, 4, 6)]
    assert together > 0.97 * max(fixed)
    assert together > 1


def test_costs_are_known_per_size_of_the_batch():
    controller = Auto().together()
    state, _ = batch(controller, rows_of(*[None] * 8), 100, slope=0.3)
    small = state.take(np.array([0, 1]))
    small, _ = batch(controller, rows_of(None, None), 600, small, slope=0.05)
    assert small.size.tolist() == [1, 1]
    assert small.slope[0] == pytest.approx(0.05, rel=0.3)
    large = controller.regrouped(small.join(small).join(small))  # 5 to 8 rows share their costs
    np.testing.assert_allclose(large.slope, state.slope[0])
    np.testing.assert_allclose(large.base, state.base[0])
    assert large.price[0] > 1.2 * small.price[0]
    new = controller.regrouped(small.join(small))
    assert np.isnan(new.plain).all()
    assert not controller.limit(new).any()  # a plain round first, to compare with
    assert new.slope[0] == pytest.approx(small.slope[0] * 2**0.5)


def test_a_row_without_room_learns_no_plain_round_from_the_others_drafts():
    controller = Auto().together()
    state, _ = batch(controller, rows_of(0.9, 0.9), 50)
    plain = state.plain.copy()
    outcome = RoundOutcome(
        np.array([0, 3]), np.array([0, 2]), np.array([[0.0] * 3, [1.0, 1.0, 0.0]]),
        np.array([int(Stop.BUDGET), 0]),
        Signals(logit_margin=np.ones((2, 3)), chosen=np.ones((2, 3))), 0.7, 1.75, 3, 0.3,
    )  # fmt: skip
    for _ in range(40):
        state = controller.observe(state, outcome)
    np.testing.assert_array_equal(state.plain, plain)


def test_a_plain_round_of_a_batch_says_nothing_of_what_drafts_cost():
    controller = Auto().together()
    state = controller.regrouped(controller.start(3))
    first = controller.limit(state)
    nothing = RoundOutcome(
        np.zeros(3, dtype=int), np.zeros(3, dtype=int), np.zeros((3, 0)),
        np.full(3, int(Stop.EXHAUSTED)), Signals(), 1e-4, 0.015,
    )  # fmt: skip
    state = controller.observe(state, nothing)
    assert not np.isnan(state.plain).any()
    np.testing.assert_array_equal(controller.limit(state), first)
    assert first.max() < controller.high


def test_given_costs_leave_rows_to_themselves():
    controller = Auto(cost=4)
    assert controller.together() is controller
    bounded = CONTROLLERS.make("bounded(auto, high=2)").together()
    assert type(bounded.inner) is type(Auto().together())
    assert bounded.limit(bounded.regrouped(bounded.start(3))).tolist() == [2, 2, 2]
