"""`auto` follows its rule, by hand and on simulated drafts with a simulated clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.controllers import CONTROLLERS
from forerun.controllers.auto import Auto, AutoState, Drafts, Terms
from forerun.controllers.auto_survival import (
    GREEDY,
    SAMPLED,
    SCALE_WEIGHTS,
    SHIFT_WEIGHT,
    TYPICAL_MARGIN,
    USELESS_KEPT,
    USELESS_START,
    Drafted,
    in_force,
    next_kept,
    typical,
)
from forerun.controllers.auto_table import PRIOR_WEIGHT, Table
from forerun.costs import Costs
from forerun.engine import meter as metering
from forerun.engine.crew import Crew
from forerun.engine.meter import Lap, Meter
from forerun.types import Round, Stop, Token

K = 24
COSTS = Costs.synthetic(4, slope=0.1)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, dtype=float)))


def tokens_of(margins, chosen=0.5):
    return [Token(logit_margin=float(m), chosen=chosen) for m in margins]


def seen(drafted, accepted, margins=None, prob=None, stop=Stop.LIMIT):
    """A round of a greedy request; `margins` None is a drafter without a distribution."""
    hit = [float(i < accepted) for i in range(max(drafted, 1))] if prob is None else prob
    return Round(drafted, accepted, hit, int(stop), [] if margins is None else tokens_of(margins))


class Source:
    """Texts whose draft keeps each token with a chance that its margin tells.

    With `chance` given the margins tell nothing: they are all `margin`.
    """

    def __init__(self, chance=None, margin=3.0, blind=False, seed=0):
        self.chance, self.margin, self.blind = chance, margin, blind
        self.random = np.random.default_rng(seed)

    def draw(self):
        """Tokens as a controller sees them, and whether each is kept."""
        margins = self.random.gamma(1.5, 2.5, K)
        chance = sigmoid(GREEDY.constant + GREEDY.per_margin * np.minimum(margins, 8))
        if self.chance is not None:
            margins[:], chance[:] = self.margin, self.chance
        hits = self.random.random(K) < chance
        return [Token()] * K if self.blind else tokens_of(margins), hits


class Clock:
    """What rounds take, in plain target passes of a row alone."""

    def __init__(self, c, slope=0.0, jump=0.0, first=0.0):
        self.draft, self.slope, self.jump, self.first = 1 / c, slope, jump, first

    def lap(self, rows, width):
        first = self.draft + self.first
        draft = first + (width - 1) * self.draft if width else 0.0
        verify = 1 + self.jump * (width > 0) + self.slope * width
        return Lap(rows, width, width, draft, first if width else 0.0, verify)


def join(crew, controller):
    """A row that knows that its tokens are certain, and still draws them by coins."""
    crew.join(controller)
    member = crew._members[-1]
    member.state = controller.begin(member.state, True)


class Live:
    """Rows decoded together, by a clock they share."""

    def __init__(self, controller, clock, *sources, meter=None):
        self.sources, self.clock = sources, clock
        self.controller = CONTROLLERS.make(controller)
        self.meter, self.memory = meter or Meter(), {}
        self.crew = Crew(self.meter, self.memory)
        for _ in sources:
            self.join()

    def join(self):
        """A greedy request, whose drafts are judged whatever they look like."""
        join(self.crew, self.controller)

    def renew(self):
        """One row's request ends, the next begins."""
        self.crew.keep([])
        self.join()

    @property
    def state(self) -> AutoState:
        """Of a row alone."""
        return self.crew._members[0].state

    @property
    def resting(self):
        """Whether the next round of a row alone is plain, and not for a probe to come."""
        costs = self.meter.costs(1)
        return self.controller.open(self.state._replace(rested=0), costs).worth < 0

    def round(self):
        """Tokens committed, and the time it took."""
        limits = [min(limit, K) for limit in self.crew.limits()]
        drawn = [source.draw() for source in self.sources]
        drafted, going = [0] * len(limits), [limit > 0 for limit in limits]
        while any(going):
            for row, on in enumerate(going):
                drafted[row] += on
            newest = [
                tokens[n - 1] if on else None
                for (tokens, _), n, on in zip(drawn, drafted, going, strict=True)
            ]
            answers = self.crew.go(newest)
            going = [
                on and yes and n < limit
                for on, yes, n, limit in zip(going, answers, drafted, limits, strict=True)
            ]
        rounds = []
        for (tokens, hits), n in zip(drawn, drafted, strict=True):
            accepted = int(hits[:n].cumprod().sum())
            prob = [float(i < accepted) for i in range(n)]
            rounds.append(Round(n, accepted, prob, 0, tokens[:n]))
        self.crew.observe(rounds)
        assert not self.crew.failed, self.crew.failed
        lap = self.clock.lap(len(limits), max(drafted))
        self.meter.tell(lap)
        took = lap.draft_seconds + lap.verify_seconds
        return sum(r.accepted + 1 for r in rounds), took, drafted

    def run(self, tokens):
        """Tokens per time and row, of at least so many per row."""
        done = time = 0.0
        while done < tokens * len(self.sources):
            more, took, _ = self.round()
            done, time = done + more, time + took
        return done / time / len(self.sources)


def speed(controller, clock, source, tokens=1500):
    return Live(controller, clock, source).run(tokens)


def test_the_rule_by_hand():
    controller = Auto()
    state = controller.start()
    by = in_force(state.learned)
    margins = [3.0, 1.0]
    kept = sigmoid(by.constant + by.per_margin * np.array(margins))
    ahead = sigmoid(by.next_constant + by.next_newest * 1.0 + by.next_mean * 2.0)
    worth = kept.prod() * ahead * (1 - sigmoid(USELESS_START))
    for price in (worth - 1e-9, worth + 1e-9):
        terms, drafted = controller.open(state, COSTS).memo
        memo = terms._replace(rate=price / COSTS.further), drafted
        for token in tokens_of(margins):
            memo = controller.fold(state, memo, token)
        assert controller.worth(state, COSTS, memo) == pytest.approx(worth - price, abs=1e-12)
        assert controller.keep_going(state, COSTS, memo) == (worth > price)


def test_a_token_that_pays_for_a_level_is_weighed_with_those_behind_it():
    # The fourth token widens the pass by half of one, the next three by nothing.
    costs = Costs(0.1, ((1, 1.0), (4, 1.0), (5, 1.5), (8, 1.5), (9, 2.5)), levels=(1, 4, 8))
    controller = Auto()
    by = in_force(controller.start().learned)

    def worth(tokens, margin, survival=0.99, rate=2.0):
        drafted = Drafted(survival, tokens, margin, tokens * margin)
        memo = Terms(by, 1.0, rate), drafted
        return next_kept(drafted, by), controller.worth(controller.start(), costs, memo)

    kept, got = worth(3, 8.0)
    first, second = 0.99 * kept - 2 * 0.6, 0.99 * kept**2 - 2 * 0.1
    assert first < 0 < got
    assert got == pytest.approx(first + second), "not by itself"
    assert worth(3, 8.0, rate=1.0)[1] == pytest.approx(0.99 * kept - 0.6), "this is enough"
    for tokens, seconds in ((1, 0.1), (2, 0.1), (4, 0.1), (5, 0.1), (9, 1.1)):
        assert worth(tokens, 8.0)[1] == pytest.approx(0.99 * kept - 2 * seconds)
    kept, got = worth(3, 0.1, 0.5)
    most = max(0.5 * sum(kept**j for j in range(1, n + 1)) - 1.0 - 0.2 * n for n in range(1, 5))
    assert got == pytest.approx(most)
    assert got < 0, "where a miss is near, not for the others either"
    # The best length takes the level whole, too.
    for later, length in ((0.95, 7), (0.9, 3), (0.3, 2)):
        assert controller._best_fixed(0.9, later, costs, 0.0)[0] == length
    state = AutoState(drafts=Drafts(2.0, 9.0, committed=8.0))  # 4.5 tokens a round
    rate = controller.open(state, costs).memo[0].rate
    length, tokens, seconds = controller._best_fixed(
        *typical(state.learned, by, 1 - sigmoid(USELESS_START)), costs, 0.0
    )
    assert rate == pytest.approx((12 * tokens + 8) / (12 * seconds + 2 * 1.95), rel=1e-3)


def test_a_greedy_request_alone_has_only_those_judged_that_pay():
    # Judging costs 0.6, 0, 0, 0.9, then nothing up to the eighth token.
    costs = Costs(0.1, ((1, 1.0), (2, 1.6), (4, 1.6), (5, 2.5), (9, 2.5)), levels=(4, 9))
    auto = Auto()
    state = auto.start()
    look = auto.look(state, costs)
    terms, _ = look.memo
    assert terms.judging[:6] == pytest.approx((0.6, 0, 0, 0.9, 0, 0))

    def left_out(state, margins, rate=1.0, memo=look.memo):
        memo = memo[0]._replace(rate=rate), memo[1]
        kept, gains = 1.0, [0.0]
        for i, token in enumerate(tokens_of(margins)):
            memo = auto.fold(state, memo, token)
            z = terms.by.constant + terms.by.per_margin * token.logit_margin
            kept *= sigmoid(z + terms.by.per_chosen * 0.5)
            gains.append(gains[-1] + terms.useful * kept - rate * terms.judging[i])
        drafted = memo[1]
        assert drafted.left_out == len(margins) - int(np.argmax(gains))
        assert drafted.lead == pytest.approx(gains[-1] - max(gains))
        return auto.left_out(state, costs, memo)

    assert left_out(state, [6.0, 6.0, 6.0]) == 0
    assert left_out(state, [6.0, 6.0, 6.0, 0.1]) == 1, "not for another level"
    assert left_out(state, [6.0, 6.0, 0.1]) == 0, "it adds nothing to the pass"
    assert left_out(state, [0.1]) == 1
    assert left_out(state, [0.1, 6.0]) == 0, "two are worth it together"
    assert left_out(state, [0.1, 0.1, 6.0], rate=2.0) == 3
    rare = state._replace(rested=1, interval=256.0)
    assert left_out(rare, [0.1]) == 0, "a rare probe is judged"
    useless = state._replace(learned=state.learned._replace(useless=0.5))
    assert left_out(useless, [0.1]) == 0, "or nothing would say that it is of use"
    # What is already there is what further ones are compared with.
    memo = look.memo[0]._replace(rate=1.0), None
    for token in tokens_of([6.0, 6.0, 6.0, 0.1]):
        memo = auto.fold(state, memo, token)
    alone = memo[0]._replace(judging=(0.0,)), memo[1]._replace(lead=0.0)
    assert memo[1].lead < 0
    assert auto.worth(state, costs, memo) < auto.worth(state, costs, alone)


def test_a_draft_that_is_judged_with_the_prompt_only_costs_its_steps():
    costs = Costs(0.1, ((1, 1.0), (2, 2.0), (4, 2.2)), prefill=True)
    auto = Auto()
    first, later = auto.start(), auto.start()._replace(begun=True)
    assert auto.look(first, costs).memo[0].judging == (costs.widening,) * 2
    assert auto.look(later, costs).memo[0].judging[0] == pytest.approx(1.0)
    for state, price in ((first, costs.further), (later, costs.next(1))):
        terms, drafted = auto.fold(state, auto.look(state, costs).memo, tokens_of([3.0])[0])
        terms, drafted = terms._replace(rate=1.0), drafted._replace(lead=0.0)
        gain = terms.useful * drafted.survival * next_kept(drafted, terms.by)
        assert gain > price
        assert auto.worth(state, costs, (terms, drafted)) == pytest.approx(gain - price)
    # It pays for its steps, but no later one will be as cheap.
    seen_first, seen_later = (auto.observe(s, costs, seen(1, 1, [6.0])) for s in (first, later))
    assert (seen_first.drafts, seen_first.accepted) == (Drafts(), 1)
    assert seen_later.drafts == Drafts(1.0, 1.0, committed=2.0)


def test_a_draft_that_was_thrown_away_is_counted_and_teaches_nothing_else():
    auto = Auto()
    state = auto.start()._replace(rested=3)
    look = seen(0, 0, [0.1, 0.1], stop=Stop.CONFIDENCE)._replace(left_out=2)
    after = auto.observe(state, COSTS, look)
    assert after.learned == state.learned
    assert (after.rested, after.interval) == (0, 2 * state.interval)
    assert after.drafts == Drafts(free=1.0, free_steps=2.0, committed=1.0)
    cut = look._replace(stopped_by=int(Stop.EXHAUSTED))  # by a constraint: no decision of its own
    assert auto.observe(state, COSTS, cut) == state._replace(begun=True)


def test_waits_begin_anew_unless_the_draft_is_of_no_use_or_says_nothing():
    state = Auto().start()._replace(interval=256.0, in_vain=5.0)
    learned = state.learned
    useless = learned._replace(useless=6.0, useless_before=1.0)
    blind = learned._replace(blind=(1.0, 2.0, 0.0, 0.0))
    for known, interval in ((learned, 32.0), (useless, 256.0), (blind, 256.0)):
        assert Auto().carry(state._replace(learned=known)).interval == interval


def test_rows_together_probe_rarely():
    """A probe is longer in coming the more rows there are, and any that does not pay doubles it."""
    auto, waits = Auto(), {}
    state = auto.start()._replace(drafting=True, begun=True)
    for batch in (1, 8, 16, 64):
        costs = Costs(0.1, ((1, 1.0), (2, 9.0), (3, 9.1)), batch=batch)
        waits[batch] = auto.open(state._replace(rested=1), costs).due
        probed = auto.observe(
            state._replace(rested=9), costs, Round(1, 1, [1.0], tokens=tokens_of([1.0]))
        )
        assert probed.interval == (1 if batch == 1 else 2) * state.interval
    assert waits[16] == pytest.approx(2 * waits[8] + 1)
    assert waits[16] == pytest.approx(16 * waits[1] + 15)
    assert waits[64] == pytest.approx(2 * waits[16] + 1)  # 256 at most
    first = {n: auto.open(auto.start(), replace(costs, batch=n)).worth for n in (1, 2, 4, 16)}
    assert first[1] == first[2] == 0  # a request begins with a probe
    assert first[16] < 0  # but not where many prompts must be read for it
    assert first[4] < 0


def test_price_is_the_rate_times_what_a_token_costs():
    # c = 4, v = 0.1: a token costs 0.25 + 0.1; before anything was seen the rate is that of the
    # best fixed length, here by search, and it is at least 1, that of plain decoding.
    controller = Auto()
    state = controller.start()
    by, useful = in_force(state.learned), 1 - sigmoid(USELESS_START)
    first = useful * sigmoid(by.first)
    later = useful * sigmoid(by.next_constant + TYPICAL_MARGIN * (by.next_newest + by.next_mean))
    per_token = 0.25 + 0.1
    rates = [
        (1 + first * sum(later**j for j in range(n))) / (1.1 + 0.25 + (n - 1) * per_token)
        for n in range(1, 33)
    ]
    opening = controller.open(state, COSTS)
    np.testing.assert_allclose(opening.loss, max(rates) * per_token, rtol=1e-12)
    assert opening.memo[0].rate == pytest.approx(max(rates))
    # Rounds so far are added to twelve expected ones.
    tokens, seconds = max(
        ((1 + first * sum(later**j for j in range(n)), 1.35 + (n - 1) * per_token)
         for n in range(1, 33)), key=lambda pair: pair[0] / pair[1]
    )  # fmt: skip
    state = state._replace(drafts=Drafts(3.0, 10.0, committed=11.0))
    rate = (12 * tokens + 11) / (12 * seconds + 3 * 1.35 + 7 * per_token)
    opening = controller.open(state, COSTS)
    np.testing.assert_allclose(opening.loss, rate * per_token, rtol=1e-12)
    worth = 12 * tokens + 11 - (12 * seconds + 3 * 1.35 + 7 * per_token)
    np.testing.assert_allclose(opening.worth, worth / 15, rtol=1e-12)
    dear = controller.open(controller.start(), Costs.synthetic(0.1, slope=0.1))
    assert dear.worth < 0
    assert dear.alone == 0
    np.testing.assert_allclose(dear.loss, 10 + 0.1)


def test_one_round_corrects_by_hand():
    controller = Auto()
    state = controller.start()
    z = np.array(GREEDY.constant + GREEDY.per_margin * np.array([2.0, 1.0]))
    p, hit = sigmoid(z), np.array([1.0, 0.0])
    w = p * (1 - p)
    info = np.array([[w.sum(), (w * z).sum()], [(w * z).sum(), (w * z * z).sum()]])
    turn = np.linalg.solve(info + np.diag(SCALE_WEIGHTS), [(hit - p).sum(), ((hit - p) * z).sum()])
    q = sigmoid(
        [GREEDY.first, GREEDY.next_constant + (GREEDY.next_newest + GREEDY.next_mean) * 2.0]
    )
    new = controller.observe(state, COSTS, seen(3, 1, [2.0, 1.0, 5.0])).learned
    scale = [new.constant, new.slope]
    np.testing.assert_allclose(scale, np.add(turn, [0, 1]), rtol=1e-9)
    ahead = (hit - q).sum() / (SHIFT_WEIGHT + (q * (1 - q)).sum())
    np.testing.assert_allclose(new.shift, ahead, rtol=1e-9)
    useless = np.log(USELESS_KEPT / q[0]) + np.log((1 - USELESS_KEPT) / (1 - q[1]))
    expected = max(USELESS_START + useless, USELESS_START)
    np.testing.assert_allclose(new.useless, expected, rtol=1e-9)


def test_a_token_that_the_drafter_could_not_say_counts_as_one_rejected_unseen():
    controller = Auto()
    state = controller.start()
    one = replace_stop(seen(1, 1, [2.0]), Stop.DIFFICULT)
    after = controller.observe(state, COSTS, one)
    q = sigmoid(
        [GREEDY.first, GREEDY.next_constant + (GREEDY.next_newest + GREEDY.next_mean) * 2.0]
    )
    hit = np.array([1.0, 0.0])
    ahead = (hit - q).sum() / (SHIFT_WEIGHT + (q * (1 - q)).sum())
    np.testing.assert_allclose(after.learned.shift, ahead, rtol=1e-9)
    known = controller.observe(state, COSTS, seen(1, 1, [2.0])).learned
    assert after.learned.constant == known.constant, "what was shown of others says nothing of it"
    assert after.drafts.free_steps == 1, "its step took time"
    assert (after.learned.difficult, after.learned.rejected) == (1, 0)
    first = controller.observe(state, COSTS, Round(0, 0, stopped_by=Stop.DIFFICULT))
    assert first.learned.shift < state.learned.shift
    assert first.drafts == Drafts(free=1.0, free_steps=1.0, committed=1.0)
    wrong = replace_stop(seen(2, 1, [2.0, 1.0]), Stop.DIFFICULT)
    after = controller.observe(state, COSTS, wrong).learned
    assert after.shift == controller.observe(state, COSTS, seen(2, 1, [2.0, 1.0])).learned.shift
    assert (after.difficult, after.rejected) == (0, 1), "behind a rejection nothing can be said"


def test_a_drafter_that_stops_by_itself_wastes_no_steps():
    controller, costs = Auto(), Costs(1.0, ((1, 3.0), (2, 3.0), (9, 3.7)))
    tokens, seconds = controller._best_fixed(0.5, 0.8, costs, 0.0)[1:]
    length, more, less = controller._best_fixed(0.5, 0.8, costs, 1.0)
    assert more / less > tokens / seconds
    steps = 1 + sum(0.5 * 0.8**i for i in range(length - 1))
    assert more == pytest.approx(1 + sum(0.5 * 0.8**i for i in range(length)))
    assert less == pytest.approx(3 + steps + (steps - 1) * costs.widening, rel=1e-6)


def replace_stop(round, stop):
    return round._replace(stopped_by=stop)


def test_nothing_behind_a_rejection_teaches():
    controller = Auto()
    state = controller.start()
    one = seen(4, 1, [5.0, 1.0, 0.1, 7.0], prob=[1.0, 0.0, 0.0, 0.0])
    two = seen(4, 1, [5.0, 1.0, 6.0, 0.2], prob=[1.0, 0.0, 1.0, 0.5])
    one, two = (controller.observe(state, COSTS, shown) for shown in (one, two))
    assert one._replace(table=None) == two._replace(table=None)
    assert np.array_equal(one.table, two.table)


def test_the_table_learns_what_confidence_leaves_unexplained_by_hand():
    hits = [Token(7, 3, chosen=0.5, logit_margin=2.0), Token(5, 7, chosen=0.5, logit_margin=1.0)]
    table = Table().learned([(hits[0], 0.2, 0.3), (hits[1], 0.25, -0.5)])
    # A Newton step each for the token and for the pair, from a correction of 0.
    assert table(hits[0]) == pytest.approx(2 * 0.3 / (0.2 + PRIOR_WEIGHT))
    assert table(hits[1]) == pytest.approx(2 * -0.5 / (0.25 + PRIOR_WEIGHT))
    assert table(hits[0]._replace(previous=4)) == pytest.approx(table(hits[0]) / 2)
    assert table(Token(8, 3)) == Table()(hits[0]) == 0


def test_a_token_that_is_never_kept_ends_drafts_whatever_its_confidence():
    auto, costs = Auto(), Costs.synthetic(8, slope=0.02)

    def goes(state, token):
        return auto.keep_going(state, costs, auto.fold(state, auto.open(state, costs).memo, token))

    good, bad = (Token(which, 1, logit_margin=2.0, chosen=0.6) for which in (2, 3))
    state = auto.start()
    for _ in range(20):
        assert auto.open(state, costs).worth > 0
        state = auto.observe(state, costs, Round(2, 1, [1.0, 0.0], 0, [good, bad]))
        state = auto.carry(state)
    assert goes(auto.start(), bad)
    assert goes(state, good)
    assert not goes(state, bad)


def test_certain_tokens_are_weighed_by_their_margin_and_others_by_their_probability():
    controller = Auto()
    certain, drawn = (controller.begin(controller.start(), greedy) for greedy in (True, False))
    assert in_force(certain.learned) == GREEDY
    assert in_force(drawn.learned) == SAMPLED
    # What has no weight need not be shown.
    shown, hidden = Token(logit_margin=1.0, chosen=0.5), Token(logit_margin=1.0)
    memos = [controller.fold(certain, controller.open(certain, COSTS).memo, token)
             for token in (shown, hidden)]  # fmt: skip
    assert memos[0] == memos[1]
    rounds = [Round(1, 0, [0.0], 0, [token]) for token in (shown, hidden)]
    after = [controller.observe(certain, COSTS, round).learned for round in rounds]
    assert after[0] == after[1]
    assert controller.certain_signals == controller.signals - {"chosen"}
    kept = [controller.fold(drawn, controller.open(drawn, COSTS).memo, shown._replace(chosen=p))
            for p in (0.1, 0.9)]  # fmt: skip
    assert kept[0][1].survival < kept[1][1].survival


def test_a_slope_that_is_given_is_not_measured():
    steep, flat = (Auto(slope=slope).open(AutoState(), COSTS) for slope in (1.0, 0.0))
    assert steep.loss > 2 * flat.loss
    measured = Auto().open(AutoState(), COSTS)
    np.testing.assert_allclose(Auto(slope=0.1 / 1.1).open(AutoState(), COSTS).loss, measured.loss)


@pytest.mark.parametrize(("c", "slope", "jump"), [(2, 0, 0.1), (5, 0.03, 0), (20, 0.01, 0.2)])
def test_beats_every_fixed_length_where_confidence_tells(c, slope, jump):
    clock = Clock(c, slope, jump)
    auto = speed("auto", clock, Source())
    fixed = [speed(f"fixed({n})", clock, Source()) for n in (1, 2, 3, 4, 6, 8)]
    assert auto > 1.05 * max(fixed)


@pytest.mark.parametrize(("c", "chance"), [(5, 0.5), (5, 0.8), (20, 0.9)])
@pytest.mark.parametrize("blind", [False, True])
def test_near_the_best_fixed_length_where_nothing_tells(c, chance, blind):
    # Where tokens are alike and independent some fixed length is the best policy.
    def of(controller):
        return speed(controller, Clock(c, 0.02), Source(chance, blind=blind), 2000)

    assert of("auto") > 0.96 * max(of(f"fixed({n})") for n in (1, 2, 3, 5, 8, 12, 16))


class Copies(Source):
    """A drafter that costs nothing, says nothing, and is right in runs."""

    def __init__(self, first, later):
        super().__init__(blind=True)
        self.first, self.later = first, later

    def draw(self):
        return [Token()] * K, self.random.random(K) < np.r_[self.first, [self.later] * (K - 1)]


class Copying(Clock):
    def lap(self, rows, width):
        return Lap(
            rows, width, width, 1e-3 * (width > 0), 0.0, 1 + 0.1 * (width > 0) + 0.04 * width
        )


@pytest.mark.parametrize(
    ("first", "later"), [(0.9, 0.97), (0.4, 0.9), (0.3, 0.5), (0.1, 0.5), (0, 0)]
)
def test_a_draft_that_says_nothing_is_as_long_as_pays(first, later):
    fixed = [f"fixed({n})" for n in (0, 1, 2, 3, 5, 8, 12, 16, 24)]
    best = max(speed(spec, Copying(9), Copies(first, later), 3000) for spec in fixed)
    assert speed("auto", Copying(9), Copies(first, later), 3000) > 0.95 * best


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40])
def test_the_first_guess_does_not_matter(ratio, monkeypatch):
    usual = speed("auto", Clock(5, 0.03), Source())
    monkeypatch.setattr(metering, "RATIO", float(ratio))
    assert speed("auto", Clock(5, 0.03), Source()) == pytest.approx(usual, rel=0.01)


@pytest.mark.parametrize(("c", "jump"), [(4.2, 0.36), (2, 0.1), (1, 0.2), (0.5, 0)])
@pytest.mark.parametrize("margin", [0.1, 5.0])
def test_hopeless_drafts_cost_next_to_nothing(c, jump, margin):
    live = Live("auto", Clock(c, 0.03, jump), Source(0.0, margin))
    assert live.run(64) > 0.6  # nothing is known yet
    assert live.run(2000) > 0.985
    # Requests of 64 tokens, each going on from what the one before learned.
    rates = []
    for _ in range(25):
        live.renew()
        rates.append(live.run(64))
    assert 1 / np.mean(1 / np.array(rates)) > 0.98


def test_a_draft_as_slow_as_the_target_costs_next_to_nothing():
    live = Live("auto", Clock(1, 0.03, 0.1), Source(0.9), meter=Meter(1.0))  # sizes are known
    assert live.run(1500) > 0.98


def test_it_comes_back():
    live = Live("auto", Clock(4), Source(0.0))
    live.run(300)
    assert live.resting
    live.sources = (Source(0.98, margin=6),)
    live.run(400)
    assert not live.resting
    assert live.run(300) > 2


def test_probes_become_rare():
    controller, costs = Auto(), Costs.synthetic(2, 0.02)
    state, at = controller.start(), []
    for i in range(1500):
        drafted = min(controller.limit(state, costs), 1)
        state = controller.observe(state, costs, seen(drafted, 0, [0.1]))
        at += [i] if drafted else []
    gaps = np.diff(at)
    assert gaps[-1] == gaps[-2] == max(gaps) > 4 * gaps[gaps > 1][0]


def test_a_drafter_with_nothing_to_propose_is_not_resting():
    controller, costs = Auto(), Costs.synthetic(8)
    state = controller.start()
    for _ in range(100):
        state = controller.observe(state, costs, seen(0, 0, stop=Stop.EXHAUSTED))
    state = controller.observe(state, costs, seen(1, 0, [3.0]))
    assert state.interval == controller.start().interval


def test_only_a_probe_that_keeps_nothing_makes_the_next_wait_longer():
    controller, costs = Auto(), Costs.synthetic(5)
    rested = controller.start()._replace(rested=5, interval=32.0)
    kept = controller.observe(rested, costs, seen(1, 1, [3.0]))
    lost = controller.observe(rested, costs, seen(1, 0, [3.0]))
    assert (kept.interval, lost.interval) == (controller.start().interval, 64.0)


def test_the_next_request_loses_corrections_and_begins_with_a_probe():
    live = Live("auto", Clock(8, 0.02), Source(0.3, margin=6))
    live.run(200)
    state = live.state._replace(rested=5)
    new = Auto().carry(state)
    assert new.learned.certain == state.learned.certain
    assert abs(new.learned.constant) < abs(state.learned.constant)
    assert abs(new.learned.shift) < abs(state.learned.shift)
    assert 0 < new.drafts.judged < state.drafts.judged
    assert new.interval == state.interval
    assert (new.rested, new.begun, new.drafting, new.accepted) == (5, False, False, 0)


def test_the_first_probe_waits_longer_after_requests_that_drafted_in_vain():
    auto, costs, rests = Auto(), Costs.synthetic(2), []
    state = auto.start()
    for kept in [3] * 12 + [4, 3, 3]:
        # A probe takes half a plain round more; all else has paid so little that it rests.
        state = state._replace(rested=0, drafts=Drafts(20.0, 20.0, committed=15.0))
        rests.append(0)
        while auto.open(state, costs).worth < 0:
            rests[-1], state = rests[-1] + 1, auto.observe(state, costs, seen(0, 0))
        state = auto.carry(state._replace(drafting=True, accepted=kept))
    assert rests == [0, 0, 4, 8, 12, *[16] * 8, 0, 0]
    quiet = auto.carry(state._replace(drafting=False, accepted=0))
    assert quiet.in_vain == state.in_vain  # nothing was drafted


def test_one_hard_text_does_not_rest_the_next_but_many_do():
    live, awake = Live("auto", Clock(5), Source(0.0)), []
    for _ in range(8):
        live.run(64)
        assert live.resting
        live.renew()
        awake.append(not live.resting)
    assert awake == sorted(awake, reverse=True)
    assert awake[0]
    assert not awake[-1]
    live.sources = (Source(0.98, margin=6),)
    live.run(400)
    live.renew()
    assert not live.resting


# --- in a batch ---------------------------------------------------------------------------------


def rows_of(*chances, margin=3.0):
    return [Source(chance, margin, seed=i) for i, chance in enumerate(chances)]


def batch(slope=0.25):
    return Clock(5, slope, first=0.1)


def test_rows_decoded_together_draft_on_while_it_pays_for_all():
    controller, margins = Auto(), [6.0, 0.2, 0.2]
    tokens = tokens_of(margins)
    answers = set()
    for c in (1.5, 2, 3, 4, 6, 10, 30):
        costs = Costs.synthetic(c, 0.02)
        crew = Crew(Meter.given(costs))
        for _ in margins:
            join(crew, controller)
        crew.limits()
        state = controller.start()
        opening = controller.open(state, costs)
        worth = [
            controller.worth(state, costs, controller.fold(state, opening.memo, t)) for t in tokens
        ]
        go = crew.go(tokens)
        assert go == [sum(worth) > 0] * 3
        answers.add(go[0])
        # A row that has stopped adds nothing, and still waits for the others.
        crew.limits()
        rest = crew.go([tokens[0], tokens[1], None])
        assert rest == [worth[0] + worth[1] - opening.loss > 0] * 2 + [False]
        # Each by itself would not do the same.
        assert [w > 0 for w in worth] != go or c > 6 or c < 2
    assert answers == {True, False}


def test_rows_decoded_together_rest_as_one_where_it_does_not_pay():
    for slope, sources in ((0.25, rows_of(0.0, 0.0, 0.0, 0.0)), (1.0, rows_of(0.8, 0.3, 0.2, 0.6))):
        live = Live("auto", batch(slope), *sources)
        live.run(100)
        done = time = plain = 0.0
        for _ in range(1500):
            more, took, drafted = live.round()
            assert not any(drafted) or all(drafted)
            done, time, plain = done + more, time + took, plain + (not any(drafted))
        assert done / time / 4 > 0.98
        assert plain > 1200


def test_a_batch_is_faster_together_than_each_row_for_itself():
    def of(controller):
        sources = rows_of(0.95, 0.5, 0.6, 0.3, 0.5, 0.9, 0.4, 0.7)
        return Live(controller, batch(), *sources).run(800)

    together = of("auto")
    assert together > 1.05 * of("auto(cost=5,slope=0.02)")  # decides for itself
    assert together > 0.97 * max(of(f"fixed({n})") for n in (1, 2, 3, 4, 6))
    assert together > 1


def test_given_costs_leave_rows_to_themselves():
    memory = {}
    alone, given = Auto(cost=4), Crew(Meter.given(Costs.synthetic(0.5)), memory)
    for controller in (alone, Auto(), Auto()):
        given.join(controller)
    assert given.limits() == [32, 0, 0]  # by the others' costs it does not pay
    given.observe([Round(5, 5, [1.0] * 5, 0, tokens_of([4.0] * 5))] + [Round(0, 0)] * 2)
    given.keep([])
    assert set(memory) == {Auto()}
    crew = Crew(Meter.given(Costs.synthetic(0.5)), memory)
    crew.join(Auto(), repeatable=Costs.synthetic(4))
    assert crew.limits() == [32]


def test_a_row_without_room_pays_for_the_others_drafts():
    controller = Auto()
    state = controller.start()
    waiting = Round(0, 0, (), int(Stop.BUDGET), (), longest=3)
    after = controller.observe(state, COSTS, waiting)
    assert after.drafts == Drafts(1.0, 3.0, committed=1.0)
    assert after.learned == state.learned
    assert after.rested == 0
    assert controller.open(after, COSTS).worth < controller.open(state, COSTS).worth


def test_first_rounds_of_a_batch():
    """A draft before anything was timed, then a plain round, as the size is new."""
    live = Live("auto", batch(), *rows_of(0.9, 0.9, 0.9))
    first, second, third = live.round()[2], live.round()[2], live.round()[2]
    assert 0 < max(first) <= 12
    assert not any(second)
    assert any(third)


def test_a_draft_must_also_earn_the_reading_of_prompts():
    """Drafting at S tokens a second beats plain decoding while S > 1/(plain − reading)."""
    auto, costs = Auto(), Costs.synthetic(4, slope=0.1)
    state = auto.start()._replace(drafting=True)
    free = auto.open(state, costs)
    assert free.worth > 0
    rate = 1 / (free.loss / costs.further)  # seconds a token of the best policy
    assert auto.open(state, replace(costs, reading=0.9 * (1 - rate))).most == free.most
    assert auto.open(state, replace(costs, reading=0.9 * (1 - rate))).worth > 0
    assert auto.open(state, replace(costs, reading=1.1 * (1 - rate))).worth < 0
    assert auto.limit(state, replace(costs, reading=2.0)) == 0
