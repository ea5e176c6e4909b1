"""Every controller keeps the contract; each one follows its paper, by hand-computed traces."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from fractions import Fraction

import numpy as np
import pytest

from forerun.controllers import CONTROLLERS, LengthController, State
from forerun.controllers.hf_threshold import best_threshold
from forerun.errors import SettingError, UnknownNameError
from forerun.types import CENSORING, RoundOutcome, Signals, Stop

CASES = {
    "auto": ["auto", "auto(cost=4,slope=0.03,high=9)", "auto(cost=9)", "auto(high=1)"],
    "fixed": ["fixed", "fixed(length=0)", "fixed(length=3)"],
    "hf-heuristic": ["hf-heuristic", "hf-heuristic(length=2,up=3,down=2,high=9)"],
    "hf-threshold": ["hf-threshold", "hf-threshold(dynamic=True,length=6,history=8)"],
    "gammatune": [
        "gammatune",
        "gammatune(length=3,eta=0.5,delta=1,low=2,high=8)",
        "gammatune(literal=True)",
        "gammatune(early_stop='skip')",
        "gammatune(early_stop='expand')",
    ],
    "gammatune+": ["gammatune+", "gammatune+(eta=0.7,threshold=0.6,keep=False)"],
    "goodput": ["goodput", "goodput(cost=3,width_cost=0.05,high=6,damping=5,window=4)"],
    "bandit": [
        "bandit",
        "bandit(policy=thompson,low=2,high=8,step=3,explore=1,seed=3)",
        "bandit(reward=accepted,explore=0)",
        "bandit(reward=blend,step=1)",
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
    ],
    "bounded": [
        "bounded(inner=fixed(length=20),high=8)",
        "bounded(inner=cm-asd(two_pass=True),high=4)",
        "bounded(inner=gammatune+(keep=False),low=1,high=4)",
    ],
}
BAD = {
    "auto": ["cost=0", "cost=-1", "cost='x'", "slope=-1", "slope=true", "high=0", "high=2.5"],
    "fixed": ["length=-1", "length=2.5", "length=true", "length='x'"],
    "hf-heuristic": ["length=0", "up=-1", "down=-1", "low=0", "high=5", "low=9,high=5,length=7"],
    "hf-threshold": ["threshold=1.5", "threshold=-0.1", "dynamic=1", "length=-1", "history=5"],
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
        "eta='x'",
    ],
    "gammatune+": ["eta=0", "threshold=2", "keep=0", "high=0"],
    "goodput": [
        "cost=0",
        "cost=-1",
        "width_cost=-1",
        "high=0",
        "acceptance=1.1",
        "damping=0",
        "window=0.5",
    ],
    "bandit": [
        "policy=exp3",
        "reward=1",
        "low=0",
        "low=10",
        "high=0",
        "step=0",
        "explore=-1",
        "cost=0",
        "width_cost=-1",
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
SPECS = [spec for specs in CASES.values() for spec in specs]
K = 24
JUDGED = [s for s in Stop if s not in CENSORING]


def make(spec: str) -> LengthController:
    return CONTROLLERS.make(spec)


def measured(probs: np.ndarray) -> Signals:
    """Every field, as if `1 / probs` tokens were equally likely, or two of that margin."""
    surprise = -np.log(np.clip(probs, 1e-9, 1))
    return Signals(
        top1=probs,
        chosen=probs.copy(),
        entropy=surprise,
        normalized_entropy=surprise / -np.log(1e-9),
        logit_margin=9 * probs,
        softmax_margin=-np.expm1(-9 * probs),
    )


def outcome(drafted, accepted, stopped_by=Stop.LIMIT, probs=None) -> RoundOutcome:
    """One row's round from plain numbers."""
    width = max(drafted, 1)
    probs = np.full((1, width), 0.5) if probs is None else np.array([probs], dtype=float)
    return RoundOutcome(
        np.array([drafted]),
        np.array([accepted]),
        np.ones((1, width)),
        np.array([int(stopped_by)]),
        measured(probs),
    )


def random_outcome(rng: np.random.Generator, limit: np.ndarray, stops=tuple(Stop)) -> RoundOutcome:
    drafted = rng.integers(0, np.minimum(limit, K) + 1)
    accepted = np.where(rng.random(len(limit)) < 0.4, drafted, rng.integers(0, drafted + 1))
    inside = np.arange(K) < drafted[:, None]
    probs = np.where(inside, rng.random((len(limit), K)), 0.0)
    stopped = rng.choice([int(s) for s in stops], len(limit))
    return RoundOutcome(drafted, accepted, probs, stopped, measured(probs))


def arrays(part) -> dict[str, np.ndarray]:
    found = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            found.update({f"{f.name}.{k}": v for k, v in arrays(value).items()})
        elif isinstance(value, np.ndarray):
            found[f.name] = value
    return found


def freeze(part) -> None:
    for array in arrays(part).values():
        array.flags.writeable = False


def assert_same(one, other, but=()) -> None:
    assert type(one) is type(other)
    for name, array in arrays(one).items():
        if name not in but:
            np.testing.assert_array_equal(array, arrays(other)[name], err_msg=name)


def history(controller, rows=3, rounds=12, seed=0, stops=tuple(Stop)):
    """(state, outcome) pairs of a random run, then the last state."""
    rng = np.random.default_rng(seed)
    state, pairs = controller.start(rows), []
    for _ in range(rounds):
        seen = random_outcome(rng, controller.limit(state), stops)
        pairs.append((state, seen))
        state = controller.observe(state, seen)
    return pairs, state


def test_every_registered_controller_is_in_the_table():
    assert set(CONTROLLERS.names()) == set(CASES) == set(BAD)


@pytest.mark.parametrize("name", CASES)
def test_is_a_frozen_dataclass_with_its_card(name):
    cls = CONTROLLERS.load(name)
    assert issubclass(cls, LengthController)
    assert is_dataclass(cls)
    controller = make(CASES[name][0])
    first = fields(controller)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(controller, first, 1)
    assert len(cls.summary) < 80
    assert cls.paper == "" or cls.bibtex.startswith("@")
    for part in ("Helps", "Hurts", "Rule", "Args:"):
        assert part in cls.__doc__
    for f in fields(cls):
        assert f"{f.name}:" in cls.__doc__, f"{name} does not document {f.name}"


@pytest.mark.parametrize("spec", SPECS)
def test_shapes_and_dtypes(spec):
    controller = make(spec)
    for rows in (0, 1, 4):
        pairs, last = history(controller, rows)
        for state in [s for s, _ in pairs] + [last]:
            assert isinstance(state, State)
            assert len(state) == rows
            assert all(len(a) == rows for a in arrays(state).values())
            limit = controller.limit(state)
            assert limit.shape == (rows,)
            assert limit.dtype == np.int64
            assert (limit >= 0).all()
            signals = measured(np.full((rows, 2), 0.5))
            go = controller.keep_going(state, np.full(rows, 2), signals)
            assert go.shape == (rows,)
            assert go.dtype == bool
        np.testing.assert_array_equal(last.rounds, len(pairs))


@pytest.mark.parametrize("spec", SPECS)
def test_pure(spec):
    controller = make(spec)
    pairs, _ = history(controller)
    for state, seen in pairs:
        freeze(state), freeze(seen)  # writing in place now raises
        signals = seen.signals
        first = controller.observe(state, seen), controller.limit(state)
        again = controller.observe(state, seen), controller.limit(state)
        assert_same(first[0], again[0])
        np.testing.assert_array_equal(first[1], again[1])
        np.testing.assert_array_equal(
            controller.keep_going(state, seen.drafted, signals),
            controller.keep_going(state, seen.drafted, signals),
        )
        first[1][:] = -1  # the caller owns what it got
        np.testing.assert_array_equal(again[1], controller.limit(state))


@pytest.mark.parametrize("spec", SPECS)
def test_rows_do_not_influence_each_other(spec):
    controller = make(spec)
    rows = 4
    pairs, last = history(controller, rows, seed=1)
    for row in range(rows):
        only = np.array([row])
        state = controller.start(1)
        for whole, seen in pairs:
            assert_same(state, whole.take(only))
            np.testing.assert_array_equal(controller.limit(state), controller.limit(whole)[only])
            part = seen.signals.take(only)
            np.testing.assert_array_equal(
                controller.keep_going(state, seen.drafted[only], part),
                controller.keep_going(whole, seen.drafted, seen.signals)[only],
            )
            state = controller.observe(state, seen.take(only))
        assert_same(state, last.take(only))


@pytest.mark.parametrize("spec", SPECS)
def test_decoded_together_with_nobody_else_a_row_is_by_itself(spec):
    controller = make(spec)
    together = controller.together()
    pairs, last = history(controller, 1, seed=4)
    state = together.regrouped(together.start(1))
    for alone, seen in pairs:
        np.testing.assert_array_equal(together.limit(state), controller.limit(alone))
        state = together.regrouped(together.observe(state, seen))
        assert_same(state, together.regrouped(state))
    np.testing.assert_array_equal(together.limit(state), controller.limit(last))


@pytest.mark.parametrize("spec", SPECS)
def test_rows_leave_join_and_change_places(spec):
    controller = make(spec)
    _, state = history(controller, 4, seed=2)
    front, back = state.take(np.array([0, 1])), state.take(np.array([2, 3]))
    assert_same(front.join(back), state)
    assert_same(back.join(front), state.take(np.array([2, 3, 0, 1])))
    assert len(state.join(controller.start(2))) == 6


@pytest.mark.parametrize("spec", SPECS)
def test_pickles(spec):
    controller = make(spec)
    copy = pickle.loads(pickle.dumps(controller))
    assert copy == controller
    assert hash(copy) == hash(controller)
    _, state = history(controller)
    assert_same(pickle.loads(pickle.dumps(state)), state)


@pytest.mark.parametrize("spec", SPECS)
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


@pytest.mark.parametrize("stop", CENSORING)
@pytest.mark.parametrize("spec", SPECS)
def test_learns_nothing_from_censored_rounds(spec, stop):
    controller = make(spec)
    _, state = history(controller, 1)
    after = controller.observe(state, outcome(2, 2, stop, [0.9, 0.8]))
    assert_same(after, state, but=("rounds",))


@pytest.mark.parametrize("stop", Stop)
@pytest.mark.parametrize("spec", SPECS)
def test_learns_nothing_without_a_draft(spec, stop):
    controller = make(spec)
    _, state = history(controller, 1)
    nothing = np.zeros((1, 0))
    for width in (0, 3):
        wide = np.zeros((1, width))
        seen = replace(outcome(0, 0, stop), accept_prob=wide, signals=measured(wide))
        assert_same(controller.observe(state, seen), state, but=("rounds",))
    seen = replace(outcome(0, 0, stop), accept_prob=nothing, signals=Signals())
    assert_same(controller.observe(state, seen), state, but=("rounds",))


@pytest.mark.parametrize("spec", SPECS)
def test_drafters_without_a_distribution(spec):
    controller = make(spec)
    state = controller.start(2)
    assert controller.keep_going(state, np.array([1, 1]), Signals()).all()
    seen = RoundOutcome(
        np.array([2, 2]), np.array([2, 1]), np.ones((2, 2)), np.zeros(2, dtype=int), Signals()
    )
    assert len(controller.observe(state, seen)) == 2


@pytest.mark.parametrize("spec", SPECS)
def test_signals_are_declared(spec):
    controller = make(spec)
    names = {f.name for f in fields(Signals)}
    assert controller.signals <= names
    # Dropping a token because of what was sampled is lossy: see LengthController.drops_last.
    assert not (controller.drops_last and "chosen" in controller.signals)
    pairs, _ = history(controller)
    for state, seen in pairs:
        asked = Signals(**{n: getattr(seen.signals, n) for n in controller.signals})
        assert_same(
            controller.observe(state, seen), controller.observe(state, replace(seen, signals=asked))
        )
        np.testing.assert_array_equal(
            controller.keep_going(state, seen.drafted, seen.signals),
            controller.keep_going(state, seen.drafted, asked),
        )


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("fixed")])
def test_limits_stay_in_bounds(spec):
    controller = make(spec)
    low = getattr(controller, "low", 0)
    high = getattr(controller, "high", None) or getattr(controller, "length", None)
    for rounds in ([Stop.LIMIT], JUDGED, list(Stop)):
        pairs, last = history(controller, rounds=40, stops=rounds)
        for state in [s for s, _ in pairs] + [last]:
            assert (controller.limit(state) >= low).all()
            assert (controller.limit(state) <= high).all()


# --- fixed and hf-heuristic ---------------------------------------------------------------------


def lengths(spec, rounds):
    """γ before each round and after the last, of a run given as (accepted share, stop)."""
    controller = make(spec)
    state = controller.start(1)
    seen = [int(controller.limit(state)[0])]
    for drafted, accepted, stop in rounds:
        drafted = seen[-1] if drafted is None else drafted
        accepted = drafted if accepted is None else accepted
        state = controller.observe(state, outcome(drafted, accepted, stop))
        seen.append(int(controller.limit(state)[0]))
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
    state, seen = controller.start(1), []
    for drafted, accepted, stop in rounds:
        gamma = int(controller.limit(state)[0])
        drafted = gamma if drafted is None else drafted
        accepted = drafted if accepted is None else accepted
        state = controller.observe(state, outcome(drafted, accepted, stop))
        seen.append((float(state.window[0]), int(controller.limit(state)[0])))
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
    state, late = controller.start(1), []
    for i in range(80):
        gamma = int(controller.limit(state)[0])
        state = controller.observe(state, outcome(gamma, min(gamma, 4)))
        late += [gamma] if i >= 60 else []
    assert set(late) <= {4, 5}


def test_gammatune_plus_is_gammatune_between_rounds():
    plain, plus = make("gammatune(eta=0.4)"), make("gammatune+(eta=0.4)")
    pairs, last = history(plain)
    state = plus.start(3)
    for _, seen in pairs:
        state = plus.observe(state, seen)
    assert_same(state, last)


def test_gammatune_plus_stops_on_the_top_probability():
    controller = make("gammatune+(threshold=0.4)")
    top1 = np.array([[0.1, 0.40], [0.9, 0.39]])
    chosen = np.array([[0.9, 0.01], [0.1, 0.99]])
    go = controller.keep_going(controller.start(2), np.array([2, 2]), Signals(top1, chosen))
    assert go.tolist() == [True, False]
    assert not controller.drops_last
    assert make("gammatune+(keep=false)").drops_last
    assert make("bounded(gammatune+(keep=false))").drops_last
    assert make("bounded(gammatune+)").signals == {"top1"}


# --- hf-threshold -------------------------------------------------------------------------------


def test_hf_threshold_stops_on_the_drafted_token():
    controller = make("hf-threshold")
    top1 = np.array([[0.9, 0.9], [0.9, 0.9]])
    chosen = np.array([[0.1, 0.40], [0.9, 0.39]])
    state = controller.start(2)
    go = controller.keep_going(state, np.array([2, 2]), Signals(top1, chosen))
    assert go.tolist() == [True, False]
    assert not controller.drops_last
    assert controller.limit(state).tolist() == [20, 20]
    _, last = history(controller)
    assert (last.threshold == 0.4).all()


def slow_threshold(probs, matches):
    """transformers' choice, written out: every distinct probability as a threshold."""
    best = None
    for t in sorted(set(probs), reverse=True):
        said = [p >= t for p in probs]
        fp = sum(s and not m for s, m in zip(said, matches, strict=True))
        fn = sum(m and not s for s, m in zip(said, matches, strict=True))
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
        got = best_threshold(probs, matched, valid)
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
    rows = 3
    slow = [SlowDynamic(0.4, size) for _ in range(rows)]
    pairs, last = history(controller, rows, rounds=40, seed=3)
    moved = False
    for (_, seen), after in zip(pairs, [s for s, _ in pairs[1:]] + [last], strict=True):
        for row in range(rows):
            if not seen.censored[row]:
                probs = seen.signals.chosen[row].tolist()
                slow[row].observe(probs, int(seen.drafted[row]), int(seen.accepted[row]))
            assert after.threshold[row] == slow[row].threshold
            moved |= slow[row].threshold != 0.4
    assert moved


def test_dynamic_threshold_waits_for_samples_of_both_kinds():
    controller = make("hf-threshold(dynamic=True)")
    state = controller.observe(controller.start(1), outcome(4, 3, probs=[0.9, 0.8, 0.7, 0.2]))
    assert state.threshold[0] == 0.4  # four samples
    state = controller.observe(state, outcome(2, 2, probs=[0.6, 0.5]))
    assert state.threshold[0] == 0.5  # six, the lowest match is above every mismatch
    state = controller.start(1)
    for _ in range(4):
        state = controller.observe(state, outcome(4, 4, probs=[0.9, 0.8, 0.7, 0.2]))
    assert state.threshold[0] == 0.4  # all of one kind


def test_static_threshold_carries_no_history():
    assert make("hf-threshold").start(4).probs.shape == (4, 0)


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
    state = controller.observe(controller.start(1), outcome(3, 3))
    assert state.window[0] == 5
    assert controller.limit(state).tolist() == [3]
    assert math.isclose(controller.observe(state, outcome(3, 0)).window[0], 3.5)


# --- cm-asd -------------------------------------------------------------------------------------

PREVIEWING = [s for s in SPECS if make(s).previews]


def test_only_the_literal_form_previews():
    assert PREVIEWING == [
        "cm-asd(two_pass=True)",
        "bounded(inner=cm-asd(two_pass=True),high=4)",
    ]
    assert not make("cm-asd").previews


@pytest.mark.parametrize("spec", PREVIEWING)
def test_plans_are_pure_and_within_the_preview(spec):
    controller, rng = make(spec), np.random.default_rng(0)
    for _ in range(20):
        state, drafted = controller.start(5), rng.integers(0, 9, 5)
        signals = measured(rng.random((5, 8)))
        freeze(signals)
        planned = controller.plan(state, drafted, signals)
        assert (planned >= 0).all()
        assert (planned <= drafted).all()
        np.testing.assert_array_equal(planned, controller.plan(state, drafted, signals))
        for row in range(5):
            only = np.array([row])
            alone = controller.plan(state.take(only), drafted[only], signals.take(only))
            assert alone == planned[row]


def test_cm_asd_by_hand():
    # softmax margins alone: C = 1, .5, 0; running means 1, .75, .5; ⌊C̄·4⌋ = 4, 3, 2.
    only = "entropy=0,margin=0,softmax=1,alpha=1,high=4"
    margins = np.array([[1.0, 0.5, 0.0, 0.0]])
    go = [
        bool(
            make(f"cm-asd({only})").keep_going(
                State(np.zeros(1, int)), np.array([n]), Signals(softmax_margin=margins[:, :n])
            )[0]
        )
        for n in (1, 2, 3)
    ]
    assert go == [True, True, False]  # 1 < 4, 2 < 3, but 3 ≥ 2
    # The literal form sees all four: C̄ = 3/8, ⌊4·3/8⌋ = 1; and with low=2, 2.
    seen = (State(np.zeros(1, int)), np.array([4]), Signals(softmax_margin=margins))
    assert make(f"cm-asd({only},two_pass=True)").plan(*seen) == [1]
    assert make(f"cm-asd({only},two_pass=True,low=2)").plan(*seen) == [2]
    # α scales the reach, full confidence reaches α·k_max exactly.
    sure = (State(np.zeros(1, int)), np.array([4]), Signals(softmax_margin=np.ones((1, 4))))
    assert make(f"cm-asd({only},two_pass=True)").plan(*sure) == [4]
    half = only.replace("alpha=1", "alpha=0.5")
    assert make(f"cm-asd({half},two_pass=True)").plan(*sure) == [2]


def test_cm_asd_entropy_as_printed_runs_ahead_where_unsure():
    doubt = Signals(normalized_entropy=np.array([[0.9]]))
    state, one = State(np.zeros(1, int)), np.array([1])
    only = "entropy=1,margin=0,softmax=0"
    assert not make(f"cm-asd({only})").keep_going(state, one, doubt)[0]
    assert make(f"cm-asd({only},literal=True)").keep_going(state, one, doubt)[0]
