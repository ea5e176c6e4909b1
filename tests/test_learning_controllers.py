"""`calibrated`, `goodput` and `bandit` follow their rules: rounds by hand, simulated sources."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.controllers import CONTROLLERS
from forerun.controllers.bandit import normal
from forerun.controllers.elementwise import stacked
from forerun.costs import Costs
from forerun.governors import Seat
from forerun.types import RoundOutcome, Stop, Token

STEP = 1 / 4.2 + 0.02  # what a drafted token costs by default, in target passes

COSTS = Costs.synthetic(4.2, 0.02)


def make(spec):
    return CONTROLLERS.make(spec)


def seen(drafted, accepted, top1=None, stop=Stop.LIMIT):
    """A round; `top1` None is a drafter without a distribution."""
    tokens = [] if top1 is None else [Token(top1=float(p)) for p in top1]
    return RoundOutcome(drafted, accepted, [1.0] * drafted, int(stop), tokens, 1 + drafted * STEP)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, dtype=float)))


# --- goodput ------------------------------------------------------------------------------------


def length(governor, state, top1):
    """How far a draft goes whose tokens have these top probabilities (None: no distribution)."""
    policy, memo = governor.policy, None
    plan = governor.open((), governor.given or COSTS, {0: Seat()}, 1, 0)
    for n in range(1, plan.most[0]):
        token = Token(top1=None if top1 is None else float(top1[n - 1]))
        chance, memo = policy.forecast(state, memo, token)
        if not plan.go({0: chance}):
            return n
    return plan.most[0]


def start_of(governor):
    return governor.policy.start()


def test_goodput_by_hand():
    # c = 2, v = 0: a token costs 1/2. α = 0.5. After one token with p̂ = 0.9: Θ(1) = 1.9/1.5 =
    # 1.2667, Θ(2) = (1.9 + 0.45)/2 = 1.175: stop. With α = 0.8: (1.9 + 0.72)/2 = 1.31: go on;
    # then p̂ = 0.5: Θ(2) = (1.9 + 0.45)/2 = 1.175, Θ(3) = (2.35 + 0.36)/2.5 = 1.084: stop.
    doubtful = make("goodput(calibrated(acceptance=0.5),cost=2,slope=0)")
    assert length(doubtful, start_of(doubtful), [0.9] * 20) == 1
    hopeful = make("goodput(calibrated(acceptance=0.8),cost=2,slope=0)")
    assert length(hopeful, start_of(hopeful), [0.9, 0.5] + [0.9] * 18) == 2


def test_goodput_refit_by_hand():
    controller = make("calibrated(high=2,damping=4,window=4)")  # the prior's precision is 4/4 = 1
    # top1 = 0.5: f = 0, p̂ = 0.5, w = 0.25. Rejected: b_1 += −0.5/(1 + 0.25) = −0.4; ω stays.
    state = controller.observe(controller.start(), seen(1, 0, [0.5]))
    np.testing.assert_allclose(state.bias, [-0.4, 0], rtol=1e-12)
    np.testing.assert_allclose(state.slope, 1, rtol=1e-12)
    # 0.75 accepted at the first position: f = log 3, η = log 3 − 0.4, what was seen fades to 3/4.
    f = math.log(3)
    p = float(sigmoid(f - 0.4))
    w, r = p * (1 - p), 1 - p
    a, b, c = 1 + w * f * f, w * f, 1 + 0.75 * 0.25 + w
    det = a * c - b * b
    state = controller.observe(state, seen(1, 1, [0.75], Stop.CONFIDENCE))
    np.testing.assert_allclose(state.slope, 1 + (c * r * f - b * r) / det, rtol=1e-12)
    np.testing.assert_allclose(state.bias[0], -0.4 + (a * r - b * r * f) / det, rtol=1e-12)
    assert state.bias[1] == 0
    # α: (4·0.8 + 0·0.75 + 1)/(4 + 1·0.75 + 1).
    np.testing.assert_allclose([state.hits, state.tries], [1, 1.75])


class Dense:
    """The same regression for one row, with the whole matrix and no elimination."""

    def __init__(self, high, damping, window):
        self.theta = np.array([1.0] + [0.0] * high)
        self.info = np.zeros((1 + high, 1 + high))
        self.high, self.damping, self.window = high, damping, window

    def observe(self, top1, drafted, accepted):
        self.info *= 1 - 1 / self.window
        gradient = np.zeros(1 + self.high)
        for k in range(min(accepted + 1, drafted)):
            x = np.zeros(1 + self.high)
            x[0], x[1 + k] = math.log(top1[k] / (1 - top1[k])), 1
            p = float(sigmoid(self.theta @ x))
            self.info += p * (1 - p) * np.outer(x, x)
            gradient += ((k < accepted) - p) * x
        prior = self.damping / 4 * np.eye(1 + self.high)
        self.theta = self.theta + np.linalg.solve(self.info + prior, gradient)


def test_goodput_refit_against_a_dense_solve():
    high, rng = 5, np.random.default_rng(0)
    controller = make(f"calibrated(high={high},damping=20,window=30)")
    states, references = [controller.start()] * 3, [Dense(high, 20, 30) for _ in range(3)]
    for _ in range(60):
        drafted = rng.integers(1, high + 1, 3)
        accepted = rng.integers(0, drafted + 1)
        top1 = rng.uniform(0.3, 0.99, (3, high))
        for i, dense in enumerate(references):
            one = seen(int(drafted[i]), int(accepted[i]), top1[i])
            states[i] = controller.observe(states[i], one)
            dense.observe(top1[i], int(drafted[i]), int(accepted[i]))
    for state, dense in zip(states, references, strict=True):
        assert dense.theta[0] > 0  # the bound at 0 was not needed
        np.testing.assert_allclose(state.slope, dense.theta[0], rtol=1e-9)
        np.testing.assert_allclose(state.bias, dense.theta[1:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize(("cost", "width_cost"), [(1.5, 0), (4.2, 0.02), (10, 0.05), (50, 0.001)])
def test_goodput_is_the_best_length_without_a_distribution(acceptance, cost, width_cost):
    spec = f"goodput(calibrated(acceptance={acceptance}),cost={cost},slope={width_cost})"
    governor = make(spec)
    n = np.arange(1, 21)
    survival = acceptance**n
    speed = (1 + survival.cumsum()) / (1 + n * (1 / cost + width_cost))
    assert length(governor, start_of(governor), None) == n[speed.argmax()]
    outlook = governor.policy.outlook(start_of(governor))
    blind = governor.open((), governor.given, {0: Seat(blind=True, outlook=outlook)}, 1, 0)
    assert blind.most == {0: n[speed.argmax()]}


def test_goodput_is_the_first_length_that_gains_nothing():
    governor, rng = make("goodput"), np.random.default_rng(1)
    state = start_of(governor)
    for _ in range(20):  # some state other than the first
        one = seen(9, int(rng.integers(5, 10)), rng.uniform(0.5, 1, 9))
        state = governor.policy.observe(state, one)
    mean = (50 * 0.8 + state.hits) / (50 + state.tries)
    lengths = set()
    for _ in range(200):
        top1 = sigmoid(rng.normal(4, 2, 20)).clip(0.01, 0.99)
        p = sigmoid(state.slope * np.log(top1 / (1 - top1)) + state.bias)
        for n in range(1, 20):
            survival = np.cumprod([*p[:n], mean])
            now = (1 + survival[:-1].sum()) / (1 + n * STEP)
            longer = (1 + survival.sum()) / (1 + (n + 1) * STEP)
            if longer <= now:
                break
        else:
            n = 20
        assert length(governor, state, top1) == n
        lengths.add(n)
    assert len(lengths) > 5


def test_goodput_goes_by_confidence_and_cost():
    governor = make("goodput")
    state = start_of(governor)
    assert length(governor, state, [0.05] * 20) == 1
    assert length(governor, state, [0.999] * 20) >= 8
    assert length(governor, state, [0.999] * 3 + [0.05] * 17) == 4
    free = make("goodput(cost=1e9,slope=0)")
    assert length(free, state, [0.6] * 20) == 20
    dear = make("goodput(cost=1)")
    assert length(dear, state, [0.999] * 20) == 1


@pytest.mark.parametrize("top1", [0.9, 0.99, 1.0])
def test_goodput_learns_that_confidence_is_not_to_be_trusted(top1):
    governor, sure = make("goodput"), [top1] * 20
    policy, state = governor.policy, start_of(governor)
    first = length(governor, state, sure)
    for _ in range(30):
        state = policy.observe(state, seen(4, 0, sure[:4]))
    assert length(governor, state, sure) < first
    assert state.slope >= 0
    for _ in range(100):
        state = policy.observe(state, seen(8, 8, sure[:8]))
    assert length(governor, state, sure) >= first  # and forgives


@pytest.mark.parametrize(("slope", "bias"), [(1, 0), (0.4, 0.3), (1.5, -1), (0, 1)])
def test_goodput_calibrates(slope, bias):
    # A source that accepts with σ(slope·f + bias): after 1,500 rounds p̂ is near it where f lies.
    controller, rng = make("calibrated(high=3,window=1000)"), np.random.default_rng(2)
    rows = 16
    state = stacked([controller.start()] * rows)
    for _ in range(1500):
        f = rng.normal(1, 1.5, (3, rows)).clip(-5, 5)
        hit = rng.random((3, rows)) < sigmoid(slope * f + bias)
        accepted = hit.cumprod(0).sum(0)
        tokens = [Token(top1=p) for p in sigmoid(f)]
        full = np.full(rows, 3)
        state = controller.observe(state, RoundOutcome(full, accepted, hit, 0 * full, tokens))
    for f in (-1, 0.0, 1.0, 2.5):
        learned = sigmoid(state.slope * f + state.bias[0]).mean()
        assert abs(learned - sigmoid(slope * f + bias)) < 0.03


def test_goodput_does_not_depend_on_padding():
    controller, rng = make("calibrated(high=13)"), np.random.default_rng(3)
    state = wide = controller.start()
    for _ in range(30):
        top1 = rng.uniform(0.4, 1, 10)
        accepted = int(rng.integers(0, 11))
        state = controller.observe(state, seen(10, accepted, top1))
        wide = controller.observe(wide, seen(10, accepted, [*top1, *np.zeros(8)]))
        np.testing.assert_array_equal(state.slope, wide.slope)
        np.testing.assert_array_equal(state.bias, wide.bias)


def test_goodput_survives_drafts_beyond_its_own_limit():
    controller = make("bounded(calibrated(high=2),low=6)")
    state, memo = controller.start(), None
    assert controller.limit(state) == 6
    for _ in range(5):
        goes, memo = controller.step(state, memo, Token(top1=0.9))
        assert goes in (True, False)
    state = controller.observe(state, seen(6, 4, [0.9] * 6))
    assert (state.hits, state.tries) == (2, 2)


# --- bandit -------------------------------------------------------------------------------------


def play(controller, source, rounds, state=None):
    """The arms played when `source(round)` tokens would match."""
    state = controller.start() if state is None else state
    arms = []
    for i in range(rounds):
        arms.append(controller.limit(state))
        state = controller.observe(state, seen(arms[-1], min(arms[-1], source(i))))
    return arms, state


@pytest.mark.parametrize(
    ("spec", "arms"),
    [
        ("bandit", [1, 3, 5, 7, 9]),
        ("bandit(low=2,high=8,stride=5)", [2, 7]),
        ("bandit(low=4,high=4)", [4]),
    ],
)
@pytest.mark.parametrize("policy", ["ucb", "thompson"])
def test_bandit_tries_each_arm_once_first(spec, arms, policy):
    spec = spec.replace("bandit", f"bandit(policy={policy})").replace(")(", ",")
    assert play(make(spec), lambda i: 0, len(arms))[0] == arms


def test_ucb_by_hand():
    # Arms 1 and 3, reward A/(L+1) + 1/(L+1), L = 3. Plays: arm 1 accepts 1 (reward 2/4), arm 3
    # accepts 1 (2/4), a tie that goes to arm 1, which accepts 0 (1/4): means 3/8 and 1/2.
    controller = make("bandit(low=1,high=3,reward=accepted,explore=1)")
    arms, state = play(controller, lambda i: [1, 1, 0][i], 3)
    assert arms == [1, 3, 1]
    assert state.pulls.tolist() == [2, 1]
    assert state.rewards.tolist() == [0.75, 0.5]
    # K = 2, t = 3, δ = 1/2: ½·√(3/4·(1 + 2·log(36·√3))) = 1.318, ½·√(2·(1 + 2·log(36·√2))) = 2.105.
    one = 0.375 + math.sqrt(3 / 4 * (1 + 2 * math.log(2 * 9 * math.sqrt(3) / 0.5))) / 2
    two = 0.5 + math.sqrt(2 / 1 * (1 + 2 * math.log(2 * 9 * math.sqrt(2) / 0.5))) / 2
    assert (round(one, 3), round(two, 3)) == (1.693, 2.605)
    assert controller.limit(state) == 3
    # Without exploration the mean decides.
    assert make("bandit(low=1,high=3,reward=accepted,explore=0)").limit(state) == 3
    better = controller.observe(state, seen(3, 0))  # arm 3: mean 3/8 of two, as arm 1: a tie
    assert controller.limit(better) == 1


def test_rewards_by_hand():
    def reward(spec, drafted, accepted):
        state = make(spec).observe(make(spec).start(), seen(drafted, accepted))
        return float(state.rewards.sum())

    spec = "bandit(low=1,high=8,stride=7"
    assert reward(f"{spec})", 1, 0) == pytest.approx(1 / (1 + STEP))
    assert reward(f"{spec})", 1, 1) == pytest.approx(2 / (1 + STEP))
    first = make(f"{spec})").observe(make(f"{spec})").start(), seen(1, 0))
    assert first.most == pytest.approx(2 / (1 + STEP))  # what the round could have been worth
    both = make(f"{spec})").observe(first, seen(8, 0))
    assert both.most == pytest.approx(9 / (1 + 8 * STEP))
    assert reward(f"{spec},reward=accepted)", 1, 1) == pytest.approx(2 / 9)
    assert reward(f"{spec},reward=blend)", 1, 1) == pytest.approx(0.5 / 8 + 0.5)
    assert reward("bandit(low=4,high=8,reward=blend)", 4, 1) == pytest.approx(0.5 / 8 + 0.5 / 4)


@pytest.mark.parametrize("policy", ["ucb", "thompson"])
@pytest.mark.parametrize("seed", range(8))
def test_bandit_settles_on_the_best_arm(policy, seed):
    # Five tokens match in four rounds of five, one in the fifth. Of the arms 1, 3, 5, 7, 9 the
    # best is 5: 1.59, 1.92, 2.27, 1.86 and 1.57 tokens per target pass of time.
    value = {g: (1 + 0.8 * min(g, 5) + 0.2) / (1 + g * STEP) for g in (1, 3, 5, 7, 9)}
    assert max(value, key=value.get) == 5
    rng = np.random.default_rng(seed)
    match = np.where(rng.random(600) < 0.8, 5, 1)
    arms, _ = play(make(f"bandit(policy={policy},seed={seed})"), lambda i: match[i], 600)
    assert np.mean(np.array(arms[300:]) == 5) > 0.8


def test_bandit_explores_as_much_as_it_is_told():
    rng = np.random.default_rng(0)
    match = np.where(rng.random(400) < 0.8, 5, 1)
    share = [
        np.mean(np.array(play(make(f"bandit(explore={e})"), lambda i: match[i], 400)[0]) == 5)
        for e in (0.25, 0.5, 1)
    ]
    assert share[0] > share[1] > share[2] > 1 / 5


def test_accepted_reward_prefers_the_longest():
    arms, _ = play(make("bandit(reward=accepted)"), lambda i: 9, 300)
    assert np.mean(np.array(arms[200:]) == 9) > 0.9


def test_thompson_draws_are_a_function_of_the_state():
    controller = make("bandit(policy=thompson,explore=1)")
    other = make("bandit(policy=thompson,explore=1,seed=1)")
    _, state = play(controller, lambda i: 2, 40)
    assert controller.limit(state) == controller.limit(state)
    assert play(controller, lambda i: 2, 60)[0] == play(controller, lambda i: 2, 60)[0]
    assert play(controller, lambda i: 2, 60)[0] != play(other, lambda i: 2, 60)[0]


def test_normal_numbers():
    # 200,000 numbers: the bounds are five standard errors, about one false alarm in 10^6 each.
    z = normal(7, np.arange(40_000), 5)
    assert z.shape == (5, 40_000)
    assert abs(z.mean()) < 5 / math.sqrt(z.size)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / z.size)
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 5 * math.sqrt(0.6827 * 0.3173 / z.size)
    assert np.abs(np.corrcoef(z) - np.eye(5)).max() < 5 / math.sqrt(z.shape[1])
    assert abs(np.corrcoef(z[0, 1:], z[0, :-1])[0, 1]) < 5 / math.sqrt(z.shape[1])
    np.testing.assert_array_equal(normal(7, np.array([5, 3]), 5), z[:, [5, 3]])
    np.testing.assert_array_equal(normal(7, 5, 5), z[:, 5])
    assert not np.isin(normal(8, np.arange(100), 5), z).any()
