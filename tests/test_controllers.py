"""Every controller keeps the contract; each one follows its paper, by hand-computed traces."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cli.parts import Card
from forerun.controllers import CONTROLLERS, LengthPolicy
from forerun.controllers.base import Forecaster
from forerun.controllers.bounded import Bounded
from forerun.controllers.elementwise import column, joined, stacked, taken
from forerun.controllers.hf_threshold import best_threshold
from forerun.errors import SettingError, UnknownNameError
from forerun.governors import Governor
from forerun.registry import summary_of
from forerun.types import CENSORING, DRAWN, RoundOutcome, Stop, Token
from marks import slow_but, spread

CASES = {
    "auto": [
        "auto",
        "auto(cost=4,slope=0.03,high=9)",
        "auto(cost=9)",
        "auto(high=1)",
        "auto(policy=calibrated)",
    ],
    "fixed": ["fixed", "fixed(length=0)", "fixed(length=3)"],
    "hf-heuristic": [
        "hf-heuristic",
        "hf-heuristic(length=2,up=3,down=2,high=9)",
        "hf-heuristic(persistent=True)",
    ],
    "hf-threshold": [
        "hf-threshold",
        "hf-threshold(dynamic=True,length=6,history=8)",
        "hf-threshold(dynamic=True,length=6,history=8,persistent=True)",
    ],
    "gammatune": [
        "gammatune",
        "gammatune(length=3,eta=0.5,delta=1,low=2,high=8)",
        "gammatune(literal=True)",
        "gammatune(early_stop='skip')",
        "gammatune(early_stop='expand')",
        "gammatune(expand=next,delta=2.5,high=9)",
        "gammatune(persistent=True)",
    ],
    "gammatune+": [
        "gammatune+",
        "gammatune+(eta=0.7,threshold=0.6,keep=False)",
        "gammatune+(expand=next,early_stop=skip,persistent=True)",
    ],
    "goodput": ["goodput", "goodput(policy=calibrated(damping=5),cost=3,slope=0.05,high=6)"],
    "survival": ["survival", "survival(threshold=0.8,length=6)"],
    "calibrated": ["calibrated", "calibrated(high=6,damping=5,window=4,threshold=0.2)"],
    "bandit": [
        "bandit",
        "bandit(policy=thompson,low=2,high=8,stride=3,explore=1,seed=3)",
        "bandit(reward=accepted,explore=0)",
        "bandit(reward=blend,stride=1)",
    ],
    "svip": ["svip", "svip(threshold=0.2,factor=0.1,length=6,keep=False)"],
    "adaedl": [
        "adaedl",
        "adaedl(threshold=0.3,target=0.5,epsilon=0.5,beta2=0.5,length=7)",
        "adaedl(factor=1,length=3,keep=False)",
    ],
    "exllama-ema": [
        "exllama-ema",
        "exllama-ema(length=2,skip_ema=2,probe=3,probe_interval=2,high=9)",
        "exllama-ema(alpha_up=0.5,alpha_down=0.5,skip_ema=0)",
    ],
    "exllama-confidence": [
        "exllama-confidence",
        "exllama-confidence(high=9,burn_in=4,least=1,decay=0.9)",
        "exllama-confidence(persistent=False,confidence=0.7,burn_in=0)",
    ],
    "sglang-ema": [
        "sglang-ema",
        "sglang-ema(candidate_steps='0,1,3',length=3,update_interval=2,warmup_batches=1)",
        "sglang-ema(candidate_steps='0,2,8',length=0,ema_alpha=1,update_interval=1)",
        "sglang-ema(candidate_steps='0',length=0)",
    ],
    "cm-asd": [
        "cm-asd",
        "cm-asd(two_pass=True)",
        "cm-asd(entropy=1,margin=0,softmax=0,literal=True,alpha=0.5,low=2,high=6)",
        "cm-asd(entropy=0,margin=0,softmax=1,normalized=False)",
        "cm-asd(entropy=0,margin=0,softmax=0,variance=1)",
    ],
    "bounded": [
        "bounded(inner=fixed(length=20),high=8)",
        "bounded(inner=cm-asd(two_pass=True),high=4)",
        "bounded(inner=gammatune+(keep=False),low=1,high=4)",
    ],
}
BAD = {
    "auto": ["cost=0", "cost=-1", "cost='x'", "slope=-1", "high=0", "high=2.5", "policy=svip"],
    "fixed": ["length=-1", "length=2.5", "length=true", "length='x'"],
    "hf-heuristic": ["length=0", "up=-1", "down=-1", "low=0", "high=5", "low=9,high=5,length=7"],
    "hf-threshold": [
        "threshold=1.5",
        "threshold=-0.1",
        "dynamic=1",
        "length=-1",
        "history=5",
        "persistent=1",
    ],
    "gammatune": [
        "eta=0",
        "eta=1.1",
        "delta=-1",
        "low=0",
        "length=25",
        "low=8",
        "high=4",
        "low=30",
        "literal=1",
        "early_stop=never",
        "expand=always",
        "persistent=1",
        "eta='x'",
    ],
    "gammatune+": ["eta=0", "threshold=2", "keep=0", "high=0"],
    "goodput": [
        "cost=0",
        "cost=-1",
        "slope=-1",
        "high=0",
        "policy=fixed",
    ],
    "survival": ["threshold=1.1", "length=-1"],
    "calibrated": ["high=0", "acceptance=1.1", "damping=0", "window=0.5", "threshold=-1"],
    "bandit": [
        "policy=exp3",
        "reward=1",
        "low=0",
        "low=10",
        "high=0",
        "stride=0",
        "explore=-1",
        "seed=-1",
    ],
    "svip": ["threshold=-1", "threshold='x'", "factor=11", "length=-1", "keep=0"],
    "adaedl": [
        "threshold=1.1",
        "factor=-1",
        "target=2",
        "epsilon=-0.1",
        "beta1=1.5",
        "beta2=-1",
        "length=-1",
        "keep=1",
    ],
    "exllama-ema": [
        "length=0",
        "length=5",
        "alpha_up=0",
        "alpha_up=2.1",
        "alpha_down=0",
        "alpha_down=1.1",
        "skip_ema=-1",
        "probe=0",
        "probe_interval=0",
        "high=0",
    ],
    "exllama-confidence": [
        "confidence=1.1",
        "decay=-0.1",
        "decay=2",
        "least=0",
        "burn_in=-1",
        "high=0",
        "persistent=1",
    ],
    "sglang-ema": [
        "length=4",
        "length=true",
        "candidate_steps=3",
        "candidate_steps=''",
        "candidate_steps='1,x'",
        "candidate_steps='5,1'",
        "candidate_steps='5,5'",
        "ema_alpha=0",
        "ema_alpha=1.1",
        "update_interval=0",
        "warmup_batches=-1",
        "up_hysteresis=11",
        "down_hysteresis='x'",
    ],
    "cm-asd": [
        "alpha=0",
        "alpha=1.1",
        "low=0",
        "high=0",
        "low=9,high=8",
        "two_pass=1",
        "entropy=0.5",
        "entropy=-1",
        "margin='x'",
        "sharpness=0",
        "literal=1",
    ],
    "bounded": ["inner=3", "inner=fixed,low=-1", "inner=fixed,high=-1", "inner=fixed,low=3,high=2"],
}
ALL_SPECS = [spec for specs in CASES.values() for spec in specs]
SPECS = [s for s in ALL_SPECS if isinstance(CONTROLLERS.make(s), LengthPolicy)]
MOVING = [s for s in SPECS if not s.startswith("fixed")]
K = 24
JUDGED = [s for s in Stop if s not in CENSORING]


def make(spec: str) -> LengthPolicy:
    return CONTROLLERS.make(spec)


def token(prob) -> Token:
    """Every signal, as if `1 / prob` tokens were equally likely, or two of that margin."""
    surprise = -np.log(np.clip(prob, 1e-9, 1))
    surprise = surprise if isinstance(prob, np.ndarray) else float(surprise)
    margin = 9 * prob
    softmax = -np.expm1(-margin) if isinstance(prob, np.ndarray) else -math.expm1(-margin)
    which = 100 * prob
    which = which.astype(int) if isinstance(prob, np.ndarray) else int(which)
    signals = (prob, prob, surprise, surprise / -math.log(1e-9), margin, softmax, margin)
    return Token(which, which // 3, *signals)


def outcome(drafted, accepted, stopped_by=Stop.LIMIT, probs=None) -> RoundOutcome:
    """A round from plain numbers."""
    probs = [0.5] * max(drafted, 1) if probs is None else probs
    tokens = [token(p) for p in probs]
    took = 1 + 0.2 * drafted
    return RoundOutcome(drafted, accepted, [1.0] * len(probs), int(stopped_by), tokens, took)


def random_rounds(rng, limit, stops=tuple(Stop)) -> RoundOutcome:
    """A round of as many requests as there are limits; arrays."""
    drafted = rng.integers(0, np.minimum(limit, K) + 1)
    accepted = np.where(rng.random(len(limit)) < 0.4, drafted, rng.integers(0, drafted + 1))
    probs = rng.random((K, len(limit)))
    coins = np.where(rng.random(probs.shape) < 0.5, np.round(probs), probs)
    stopped = rng.choice([int(s) for s in stops], len(limit))
    tokens = [token(p) for p in probs]
    return RoundOutcome(drafted, accepted, list(coins), stopped, tokens, 1 + 0.2 * drafted)


def alone(rounds: RoundOutcome, row: int) -> RoundOutcome:
    """One request of a round of arrays."""
    drafted, accepted, stopped = (
        int(x[row]) for x in (rounds.drafted, rounds.accepted, rounds.stopped_by)
    )
    tokens = [column(t, row) for t in rounds.tokens]
    probs = [float(p[row]) for p in rounds.accept_prob]
    return RoundOutcome(drafted, accepted, probs, stopped, tokens, 1 + 0.2 * drafted)


def leaves(tree) -> list:
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def assert_same(one, other, rtol=0.0, but=()) -> None:
    """Equal trees; fields named in `but` aside."""
    assert type(one) is type(other)
    names = getattr(type(one), "_fields", [""] * len(one))
    for name, a, b in zip(names, one, other, strict=True):
        if name in but:
            continue
        if isinstance(a, tuple):
            assert_same(a, b, rtol)
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=name)


def freeze(tree) -> None:
    for leaf in leaves(tree):
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False


def history(controller, rounds=12, seed=0, stops=tuple(Stop)):
    """(state, round) pairs of a random run of one request, then the last state."""
    rng = np.random.default_rng(seed)
    state, pairs = controller.start(False), []
    for _ in range(rounds):
        limit = np.array([controller.limit(state)])
        seen = alone(random_rounds(rng, limit, stops), 0)
        pairs.append((state, seen))
        state = controller.observe(state, seen)
    return pairs, state


def asked(controller, state, tokens) -> list[bool]:
    """The answers after each token."""
    memo, answers = None, []
    for shown in tokens:
        goes, memo = controller.step(state, memo, shown)
        answers.append(bool(goes))
    return answers


def goes(spec, state=None, **signals) -> bool:
    """The answer after tokens with these signals, in order."""
    controller = make(spec) if isinstance(spec, str) else spec
    state = controller.start() if state is None else state
    shown = [
        Token(**dict(zip(signals, values, strict=True)))
        for values in zip(*signals.values(), strict=True)
    ]
    return asked(controller, state, shown)[-1]


def test_every_registered_controller_is_in_the_table():
    assert set(CONTROLLERS.names()) == set(CASES) == set(BAD)


@pytest.mark.parametrize("name", CASES)
def test_is_a_frozen_dataclass_with_its_card(name):
    cls = CONTROLLERS.load(name)
    assert issubclass(cls, (LengthPolicy, Governor))
    assert is_dataclass(cls)
    controller = make(CASES[name][0])
    first = fields(controller)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(controller, first, 1)
    assert 20 < len(summary_of(cls)) < 80
    doc = Card("controllers", name, cls).doc
    for f in fields(cls):
        assert doc.count(f"\n    {f.name}: ") == 1, f"{name} does not document {f.name} once"


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_are_plain(spec):
    """Live everything is Python's own, or an array over positions."""
    policy = make(spec)
    pairs, last = history(policy)
    for state, seen in [*pairs, (last, outcome(2, 1))]:
        assert isinstance(state, tuple)
        assert all(isinstance(leaf, (int, float, np.ndarray)) for leaf in leaves(state))
        limit = policy.limit(state)
        assert type(limit) is int
        assert limit >= 0
        goes, memo = policy.step(state, None, seen.tokens[0])
        assert isinstance(goes, (bool, np.bool_))
        assert type(policy.trim(state, memo)) is int
        if isinstance(policy, Forecaster):
            chance, memo = policy.forecast(state, None, seen.tokens[0])
            values = [*policy.outlook(state), *chance]
            assert all(isinstance(value, float) and 0 <= value <= 1 for value in values)


@pytest.mark.parametrize("spec", SPECS)
def test_pure(spec):
    policy = make(spec)
    pairs, _ = history(policy)
    for state, seen in pairs:
        freeze(state)  # writing in place now raises
        first = policy.observe(state, seen)
        assert_same(first, policy.observe(state, seen))
        assert policy.limit(state) == policy.limit(state)
        assert asked(policy, state, seen.tokens) == asked(policy, state, seen.tokens)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_numbers_and_arrays_do_the_same(spec, seed):
    """One formula: what one request does live is what it does among others in a replay."""
    policy, prompts = make(spec), 5
    rng = np.random.default_rng(seed)
    narrow = [policy.start(row % 2 == 0) for row in range(prompts)]
    wide = stacked(narrow)
    for _ in range(8):
        limit = np.broadcast_to(policy.limit(wide), prompts)
        assert limit.tolist() == [policy.limit(state) for state in narrow]
        rounds = random_rounds(rng, limit)
        memo, memos = None, [None] * prompts
        for shown in rounds.tokens[:6]:
            goes, memo = policy.step(wide, memo, shown)
            ones = [
                policy.step(state, one, column(shown, row))
                for row, (state, one) in enumerate(zip(narrow, memos, strict=True))
            ]
            memos = [one for _, one in ones]
            assert np.broadcast_to(goes, prompts).tolist() == [go for go, _ in ones]
            trimmed = np.broadcast_to(policy.trim(wide, memo), prompts)
            pairs = zip(narrow, memos, strict=True)
            assert trimmed.tolist() == [policy.trim(state, one) for state, one in pairs]
        if isinstance(policy, Forecaster):
            chance, _ = policy.forecast(wide, None, rounds.tokens[0])
            for row, state in enumerate(narrow):
                one, _ = policy.forecast(state, None, column(rounds.tokens[0], row))
                assert_same(column(chance, row), one, rtol=1e-12)
                assert_same(column(policy.outlook(wide), row), policy.outlook(state), rtol=1e-12)
        wide = policy.observe(wide, rounds)
        narrow = [policy.observe(state, alone(rounds, row)) for row, state in enumerate(narrow)]
        for row, state in enumerate(narrow):
            assert_same(column(wide, row), state, rtol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_what_it_can_do_is_declared(spec):
    policy = make(spec)
    for state, seen in history(policy, 20)[0]:
        assert policy.stops_early or all(asked(policy, state, seen.tokens))


@pytest.mark.parametrize("spec", SPECS)
def test_a_request_starts_afresh_or_from_the_one_before(spec):
    policy = make(spec)
    _, last = history(policy)
    for certain in (True, False):
        later = policy.start(certain, last)
        assert type(later) is type(policy.start(certain))
        assert policy.limit(later) >= 0


@pytest.mark.parametrize("spec", SPECS)
def test_requests_leave_join_and_change_places(spec):
    policy = make(spec)
    rng, state = np.random.default_rng(2), stacked([policy.start()] * 4)
    for _ in range(8):
        limit = np.broadcast_to(policy.limit(state), 4)
        state = policy.observe(state, random_rounds(rng, limit))
    front, back = taken(state, np.array([0, 1])), taken(state, np.array([2, 3]))
    assert_same(joined(front, back), state)
    assert_same(joined(back, front), taken(state, np.array([2, 3, 0, 1])))
    for row in range(4):
        assert_same(column(taken(state, np.array([row])), 0), column(state, row))
    assert_same(column(joined(state, stacked([policy.start()] * 2)), 5), policy.start())


@pytest.mark.parametrize("spec", SPECS)
def test_pickles(spec):
    controller = make(spec)
    _, state = history(controller)
    copy = pickle.loads(pickle.dumps(controller))
    assert copy == controller
    assert hash(copy) == hash(controller)
    assert_same(pickle.loads(pickle.dumps(state)), state)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_text_round_trip(spec):
    controller = make(spec)
    assert make(CONTROLLERS.text(controller)) == controller
    assert CONTROLLERS.text(controller) == CONTROLLERS.text(make(spec))


@pytest.mark.parametrize("name", CASES)
def test_unknown_key_gets_a_hint(name):
    key = fields(CONTROLLERS.load(name))[-1].name
    with pytest.raises(UnknownNameError, match=f"did you mean '{key}'"):
        make(f"{name}({key}x=1)")


@pytest.mark.parametrize(("name", "bad"), [(n, b) for n, bads in BAD.items() for b in bads])
def test_bad_settings_are_refused(name, bad):
    with pytest.raises(SettingError, match="must be"):
        make(f"{name}({bad})")


COUNTERS = ("rounds",)
"""What counts rounds and tokens of a request, and learns nothing else."""


@pytest.mark.parametrize("stop", CENSORING)
@pytest.mark.parametrize("spec", SPECS)
def test_learns_nothing_from_censored_rounds(spec, stop):
    controller = make(spec)
    _, state = history(controller)
    after = controller.observe(state, outcome(2, 2, stop, [0.9, 0.8]))
    assert_same(after, state, but=COUNTERS)


@pytest.mark.parametrize(("spec", "stop"), spread(3, SPECS, list(Stop)))
def test_learns_nothing_without_a_draft(spec, stop):
    controller = make(spec)
    _, state = history(controller)
    for probs in ([], [0.0] * 3):
        seen = outcome(0, 0, stop, probs)
        assert_same(controller.observe(state, seen), state, but=COUNTERS)
    assert_same(controller.observe(state, RoundOutcome(0, 0, (), stop)), state, but=COUNTERS)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [[], [Token(1, 2), Token(3, 1)]])
def test_drafters_without_a_distribution(spec, tokens):
    policy = make(spec)
    state = policy.start()
    if not isinstance(policy, Forecaster):  # these count
        assert asked(policy, state, [Token(1)]) == [True]
    for accepted in (0, 1, 2):
        state = policy.observe(state, RoundOutcome(2, accepted, [1.0, 1.0], 0, tokens))
    assert policy.limit(state) >= 0
    _, memo = policy.step(state, None, Token(1))
    assert policy.trim(state, memo) == 0


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("certain", [True, False])
def test_signals_are_declared(spec, certain):
    policy = make(spec)
    signals = policy.signals(certain)
    assert signals <= set(Token._fields)
    pairs, _ = history(policy)
    for state, seen in pairs:
        if "certain" in getattr(type(state), "_fields", ()):
            state = state._replace(certain=certain)
        bare = [Token(**{n: getattr(shown, n) for n in signals}) for shown in seen.tokens]
        assert_same(policy.observe(state, seen), policy.observe(state, seen._replace(tokens=bare)))
        if certain or not signals & DRAWN:
            assert asked(policy, state, seen.tokens) == asked(policy, state, bare)


@pytest.mark.parametrize("spec", slow_but(MOVING, MOVING[::2].__contains__))
def test_limits_stay_in_bounds(spec):
    controller = make(spec)
    low = getattr(controller, "low", 0)
    high = getattr(controller, "high", None) or getattr(controller, "length", None)
    for stops in ([Stop.LIMIT], JUDGED, list(Stop)):
        pairs, last = history(controller, 25, 0, stops)
        for state in [s for s, _ in pairs] + [last]:
            assert low <= controller.limit(state) <= high


def test_a_wrapper_passes_everything_on():
    names = {n for n in vars(LengthPolicy) if not n.startswith("_")}
    assert len(names) <= 7
    assert names <= {n for n in vars(Bounded) if not n.startswith("_")}


# --- fixed and hf-heuristic ---------------------------------------------------------------------


def lengths(spec, rounds):
    """γ before each round and after the last, of a run given as (accepted share, stop)."""
    controller = make(spec)
    state = controller.start()
    seen = [controller.limit(state)]
    for drafted, accepted, stop in rounds:
        drafted = seen[-1] if drafted is None else drafted
        accepted = drafted if accepted is None else accepted
        state = controller.observe(state, outcome(drafted, accepted, stop))
        seen.append(controller.limit(state))
    return seen


ALL = (None, None, Stop.LIMIT)
NONE = (None, 0, Stop.LIMIT)


def test_fixed_never_moves():
    assert lengths("fixed(4)", [ALL, NONE, ALL]) == [4, 4, 4, 4]
    assert lengths("fixed(0)", [(0, 0, Stop.LIMIT)]) == [0, 0]


def test_hf_heuristic_by_hand():
    assert lengths("hf-heuristic", [ALL, NONE, NONE, ALL]) == [20, 22, 21, 20, 22]
    assert lengths("hf-heuristic(length=2)", [NONE, NONE, ALL]) == [2, 1, 1, 3]
    assert lengths("hf-heuristic(length=4,high=7)", [ALL, ALL, ALL]) == [4, 6, 7, 7]
    # A draft that stopped by itself is complete too: transformers compares with what was drafted.
    assert lengths("hf-heuristic(length=4)", [(2, 2, Stop.CONFIDENCE)]) == [4, 6]
    # A rejection inside a round that was cut short is a rejection.
    assert lengths("hf-heuristic(length=4)", [(2, 1, Stop.BUDGET)]) == [4, 3]


# --- gammatune ----------------------------------------------------------------------------------


def windows(spec, rounds):
    controller = make(spec)
    state, seen = controller.start(), []
    for drafted, accepted, stop in rounds:
        gamma = controller.limit(state)
        drafted = gamma if drafted is None else drafted
        accepted = drafted if accepted is None else accepted
        state = controller.observe(state, outcome(drafted, accepted, stop))
        seen.append((state.window, controller.limit(state)))
    return seen


def test_gammatune_by_hand():
    # γ̄=5: A=5=γ → A=7: 0.7·5+0.3·7=5.6, γ=6; A=2: 0.7·5.6+0.6=4.52, γ=5;
    # A=5=γ → 7: 3.164+2.1=5.264, γ=6; A=0: 3.6848, γ=4.
    trace = windows(
        "gammatune(length=5,eta=0.3,delta=2)",
        [ALL, (None, 2, Stop.LIMIT), ALL, NONE],
    )
    assert [g for _, g in trace] == [6, 5, 6, 4]
    np.testing.assert_allclose([w for w, _ in trace], [5.6, 4.52, 5.264, 3.6848], rtol=1e-12)


def test_gammatune_as_printed_does_not_expand():
    spec = "gammatune(length=5,eta=0.3,delta=2,literal=True)"
    trace = windows(spec, [ALL, ALL, (None, 2, Stop.LIMIT)])
    np.testing.assert_allclose([w for w, _ in trace], [5.0, 5.0, 4.1], rtol=1e-12)
    assert [g for _, g in trace] == [5, 5, 5]
    # Away from a whole γ̄ the literal algorithm creeps up to ⌈γ̄⌉ and stays there.
    trace = windows(spec, [(None, 2, Stop.LIMIT), *[ALL] * 60])
    assert trace[-1][0] == pytest.approx(5)
    assert max(w for w, _ in trace) <= 5


def test_gammatune_is_clipped():
    assert windows("gammatune(length=2,eta=1,delta=5,high=6)", [ALL, ALL])[-1] == (6.0, 6)
    assert windows("gammatune(length=5,eta=1,low=2)", [NONE])[-1] == (2.0, 2)


@pytest.mark.parametrize(
    ("early_stop", "window"), [("update", 4.1), ("expand", 4.7), ("skip", 5.0)]
)
@pytest.mark.parametrize("name", ["gammatune", "gammatune+"])
@pytest.mark.parametrize("stop", [Stop.CONFIDENCE, Stop.DIFFICULT])
def test_early_stop_options(name, early_stop, window, stop):
    # Two of two accepted, γ=5: A=2 → 4.1; A=2+δ=4 → 4.7; or nothing learned.
    spec = f"{name}(length=5,eta=0.3,delta=2,early_stop={early_stop})"
    assert windows(spec, [(2, 2, stop)])[0][0] == pytest.approx(window)
    # A rejection is information whatever ended the draft: A=1 → 3.8.
    assert windows(spec, [(2, 1, stop)])[0][0] == pytest.approx(3.8)
    # A draft that reached the limit always expands, A=5+δ → 5.6, also when it would have stopped
    # there anyway.
    assert windows(spec, [ALL])[0][0] == pytest.approx(5.6)
    assert windows(spec, [(5, 5, stop)])[0][0] == pytest.approx(5.6)


@pytest.mark.parametrize("start", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24])
def test_gammatune_forgets_its_start(start):
    # A source that always matches four tokens and no more: γ̄ ends where it would from anywhere.
    controller = make(f"gammatune(length={start})")
    state, late = controller.start(), []
    for i in range(80):
        gamma = controller.limit(state)
        state = controller.observe(state, outcome(gamma, min(gamma, 4)))
        late += [gamma] if i >= 60 else []
    assert set(late) <= {4, 5}


def test_gammatune_plus_is_gammatune_between_rounds():
    plain, plus = make("gammatune(eta=0.4)"), make("gammatune+(eta=0.4)")
    pairs, last = history(plain)
    state = plus.start()
    for _, seen in pairs:
        state = plus.observe(state, seen)
    assert_same(state, last)


def test_gammatune_plus_stops_on_the_top_probability():
    controller = make("gammatune+(threshold=0.4)")
    assert goes(controller, top1=[0.1, 0.40], chosen=[0.9, 0.01])
    assert not goes(controller, top1=[0.9, 0.39], chosen=[0.1, 0.99])
    trimmed = {"gammatune+": 0, "gammatune+(keep=false)": 1, "bounded(gammatune+(keep=false))": 1}
    for spec, count in trimmed.items():
        policy = make(spec)
        on, memo = policy.step(policy.start(), None, Token(top1=0.1))
        assert (on, policy.trim(policy.start(), memo)) == (False, count)
    assert make("bounded(gammatune+)").signals(True) == {"top1"}


# --- hf-threshold -------------------------------------------------------------------------------


def test_hf_threshold_stops_on_the_drafted_token():
    controller = make("hf-threshold")
    assert goes(controller, top1=[0.9, 0.9], chosen=[0.1, 0.40])
    assert not goes(controller, top1=[0.9, 0.9], chosen=[0.9, 0.39])
    assert controller.trim(controller.start(), False) == 0
    assert controller.limit(controller.start()) == 20
    _, last = history(controller)
    assert last.threshold == 0.4


def slow_threshold(probs, matches):
    """transformers' choice, written out: every distinct probability as a threshold."""
    best = None
    for t in sorted(set(probs), reverse=True):
        predicted = [p >= t for p in probs]
        fp = sum(s and not m for s, m in zip(predicted, matches, strict=True))
        fn = sum(m and not s for s, m in zip(predicted, matches, strict=True))
        cost = Fraction(fp, matches.count(False)) + 3 * Fraction(fn, matches.count(True))
        if best is None or cost < best[0]:
            best = (cost, t)
    return best[1]


def test_best_threshold_against_the_reference():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, rows = int(rng.integers(2, 30)), 3
        probs = rng.integers(1, rng.choice([5, 1000]), (rows, n)) / 1000  # with and without ties
        matched = rng.random((rows, n)) < rng.uniform(0.2, 0.9)
        valid = rng.random((rows, n)) < 0.8
        both = (matched & valid).any(1) & (~matched & valid).any(1)
        if not both.all():
            continue
        got = best_threshold(np.where(valid, probs, -1).T, matched.T)
        for row in range(rows):
            ok = valid[row]
            want = slow_threshold(probs[row][ok].tolist(), matched[row][ok].tolist())
            assert got[row] == want


class SlowDynamic:
    """The bookkeeping of transformers' `AssistedCandidateGenerator`, one row, plain lists."""

    def __init__(self, threshold, history):
        self.threshold, self.history = threshold, history
        self.probs, self.matches = [], []

    def observe(self, probs, drafted, accepted):
        self.probs += probs[:drafted]
        self.matches += [True] * accepted
        if len(self.probs) > len(self.matches):
            self.matches.append(False)
        del self.probs[len(self.matches) :]
        self.probs, self.matches = self.probs[-self.history :], self.matches[-self.history :]
        if len(self.probs) > 5 and set(self.matches) == {True, False}:
            self.threshold = slow_threshold(self.probs, self.matches)


@pytest.mark.parametrize("size", [6, 7, 500])
def test_dynamic_threshold_against_the_reference(size):
    controller = make(f"hf-threshold(dynamic=True,length=9,history={size})")
    moved = False
    for seed in range(3, 6):
        slow = SlowDynamic(0.4, size)
        pairs, last = history(controller, rounds=40, seed=seed)
        for (_, seen), after in zip(pairs, [s for s, _ in pairs[1:]] + [last], strict=True):
            if seen.teaches or (not seen.full and seen.drafted):
                slow.observe([t.chosen for t in seen.tokens], seen.drafted, seen.accepted)
            assert after.threshold == slow.threshold
            moved |= slow.threshold != 0.4
    assert moved


def test_dynamic_threshold_waits_for_samples_of_both_kinds():
    controller = make("hf-threshold(dynamic=True)")
    first = outcome(4, 3, probs=[0.9, 0.8, 0.7, 0.2])
    state = controller.observe(controller.start(), first)
    assert state.threshold == 0.4  # four samples
    state = controller.observe(state, outcome(2, 2, probs=[0.6, 0.5]))
    assert state.threshold == 0.5  # six, the lowest match is above every mismatch
    state = controller.start()
    for _ in range(4):
        state = controller.observe(state, outcome(4, 4, probs=[0.9, 0.8, 0.7, 0.2]))
    assert state.threshold == 0.4  # all of one kind


def test_static_threshold_carries_no_history():
    assert len(make("hf-threshold").start().probs) == 0


# --- bounded ------------------------------------------------------------------------------------


def test_bounded_clips():
    assert lengths("bounded(fixed(20),high=8)", []) == [8]
    assert lengths("bounded(fixed(2),low=4)", []) == [4]
    assert lengths("bounded(fixed(5))", []) == [5]
    assert lengths("bounded(fixed(5),high=0)", []) == [0]


def test_bounded_leaves_plain_decoding_alone_unless_told():
    assert lengths("bounded(fixed(0),high=8)", []) == [0]
    assert lengths("bounded(fixed(0),low=1,high=8)", []) == [1]


def test_bounded_lets_the_inner_controller_learn():
    # γ̄=5 clipped to 3: a full round of 3 gives A=3+2=5, so γ̄ stays at 5.
    controller = make("bounded(gammatune(length=5,delta=2),high=3)")
    state = controller.observe(controller.start(), outcome(3, 3))
    assert state.window == 5
    assert controller.limit(state) == 3
    assert math.isclose(controller.observe(state, outcome(3, 0)).window, 3.5)


def test_bounded_is_for_policies():
    with pytest.raises(SettingError, match="auto"):
        make("bounded(auto,high=3)")


# --- cm-asd -------------------------------------------------------------------------------------


def test_the_literal_form_drafts_all_and_trims():
    rng = np.random.default_rng(0)
    for spec in ("cm-asd(two_pass=True)", "bounded(inner=cm-asd(two_pass=True),high=4)"):
        policy = make(spec)
        for _ in range(20):
            memo, count = None, int(rng.integers(1, 9))
            for prob in rng.random(count):
                goes, memo = policy.step(policy.start(), memo, token(float(prob)))
                assert goes
            assert 0 <= policy.trim(policy.start(), memo) < count


def previewed(spec, **signals) -> int:
    """How many of these tokens the literal form keeps."""
    policy, memo, count = make(spec), None, 0
    for values in zip(*signals.values(), strict=True):
        shown = Token(**dict(zip(signals, values, strict=True)))
        _, memo = policy.step(policy.start(), memo, shown)
        count += 1
    return count - policy.trim(policy.start(), memo)


def test_cm_asd_by_hand():
    # softmax margins alone: C = 1, .5, 0; running means 1, .75, .5; ⌊C̄·4⌋ = 4, 3, 2.
    only = "entropy=0,margin=0,softmax=1,alpha=1,high=4"
    margins = [1.0, 0.5, 0.0, 0.0]
    go = [goes(f"cm-asd({only})", softmax_margin=margins[:n]) for n in (1, 2, 3)]
    assert go == [True, True, False]  # 1 < 4, 2 < 3, but 3 ≥ 2
    # The literal form sees all four: C̄ = 3/8, ⌊4·3/8⌋ = 1; and with low=2, 2.
    assert previewed(f"cm-asd({only},two_pass=True)", softmax_margin=margins) == 1
    assert previewed(f"cm-asd({only},two_pass=True,low=2)", softmax_margin=margins) == 2
    # α scales the reach, full confidence reaches α·k_max exactly.
    sure = [1.0] * 4
    assert previewed(f"cm-asd({only},two_pass=True)", softmax_margin=sure) == 4
    half = only.replace("alpha=1", "alpha=0.5")
    assert previewed(f"cm-asd({half},two_pass=True)", softmax_margin=sure) == 2


def test_cm_asd_entropy_as_printed_runs_ahead_where_unsure():
    only = "entropy=1,margin=0,softmax=0"
    assert not goes(f"cm-asd({only})", normalized_entropy=[0.9])
    assert goes(f"cm-asd({only},literal=True)", normalized_entropy=[0.9])


def test_gammatune_may_expand_the_next_round_alone():
    """Eq. 7 at its word: γ becomes A + δ once, the average takes A as it is."""
    controller = make("gammatune(length=3,eta=0.5,delta=2,high=6,expand=next)")
    state, lengths = controller.start(), []
    for drafted, accepted in ((3, 3), (5, 5), (6, 6), (6, 1), (3, 2)):
        lengths.append(controller.limit(state))
        assert lengths[-1] == drafted
        state = controller.observe(state, outcome(drafted, accepted))
    # γ̄: 3, 3, 4, 5, 3, 2.5; A + δ is cut off at γ_max.
    assert lengths == [3, 5, 6, 6, 3]
    assert (state.window, state.reach) == (2.5, 0.0)
    cut = controller.observe(state, outcome(3, 3, Stop.BUDGET))
    assert cut == state


@pytest.mark.parametrize(
    "spec", ["gammatune", "gammatune+", "hf-heuristic", "hf-threshold(dynamic=True)"]
)
def test_a_persistent_controller_goes_on_where_the_last_request_ended(spec):
    name, _, rest = spec.partition("(")
    persistent = make(f"{name}(persistent=True{',' + rest if rest else ')'}")
    _, last = history(persistent)
    assert persistent.start(True, last) is last
    assert make(spec).start(True, last) is not last
