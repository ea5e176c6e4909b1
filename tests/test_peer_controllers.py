"""The peers' controllers follow their sources, by hand-computed traces."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.types import RoundOutcome, Stop, Token
from test_controllers import ALL, NONE, goes, lengths, make, outcome


def trace(spec, rounds, name):
    """The named state after each round; `rounds` as for `lengths`."""
    controller = make(spec)
    state, seen = controller.start(), []
    for drafted, accepted, stop in rounds:
        drafted = controller.limit(state) if drafted is None else drafted
        accepted = drafted if accepted is None else accepted
        state = controller.observe(state, outcome(drafted, accepted, stop))
        seen.append(getattr(state, name))
    return seen


def goes_on(spec, entropies):
    """Whether drafting goes on at each newest entropy; the older one must not matter."""
    return [goes(spec, entropy=[9.0 * (i % 2), newest]) for i, newest in enumerate(entropies)]


# --- svip ---------------------------------------------------------------------------------------


def test_svip_stops_on_the_entropy():
    # √(0.15·H) > 0.3 from H = 0.6 on.
    assert goes_on("svip", [0, 0.59, 0.61, 5]) == [True, True, False, False]
    # √(0.5·H) > 1 from H = 2 on.
    assert goes_on("svip(threshold=1,factor=0.5)", [1.99, 2.01]) == [True, False]
    assert goes_on("svip(factor=0)", [20]) == [True]
    # A one-hot distribution's entropy, off by rounding.
    assert goes_on("svip(threshold=0)", [0, -1e-16]) == [True, True]


def test_svip_keeps_the_last_token_unless_told():
    assert make("svip").trim((), False) == 0
    assert make("svip(keep=False)").trim((), False) == 1
    assert make("svip").signals(True) == {"entropy"}


def test_svip_never_moves():
    assert lengths("svip(length=8)", [ALL, NONE, (3, 3, Stop.CONFIDENCE)]) == [8, 8, 8, 8]


# --- adaedl -------------------------------------------------------------------------------------


def test_adaedl_stops_on_the_bound():
    # 1 − √(0.2·H) < 0.6 from H = 0.8 on.
    assert goes_on("adaedl", [0, 0.79, 0.81, 20]) == [True, True, False, False]
    # The bound is negative at 20 nats, so even λ = 0 stops there.
    assert goes_on("adaedl(threshold=0)", [4.99, 20]) == [True, False]
    assert goes_on("adaedl(threshold=1)", [0, -1e-16, 0.01]) == [True, True, False]


def test_adaedl_stops_each_row_by_its_own_threshold():
    controller = make("adaedl(threshold=0.5,epsilon=1,beta2=0.5)")
    # First: AR = (0.9 + 1)/2 = 0.95, 2 ≠ L: λ = 0.5 − 0.5·1 = 0. Second: AR = 0.45: λ = 1.
    for accepted, threshold in ((2, 0), (0, 1)):
        state = controller.observe(controller.start(), RoundOutcome(2, accepted, [1.0, 1.0]))
        np.testing.assert_allclose(state.threshold, threshold, atol=1e-15)
        assert goes(controller, state, entropy=[1.0]) is (threshold == 0)


def test_adaedl_by_hand():
    rounds = [
        ALL,  # AR = 0.45 + 0.5·1 = 0.95 ≥ α, 4 = L: λ stays 0.6
        (4, 2, Stop.LIMIT),  # AR = 0.475 + 0.25 = 0.725: λ = 0.9·0.6 + 0.1·0.61 = 0.601
        (2, 2, Stop.CONFIDENCE),  # AR = 0.3625 + 0.5 = 0.8625: 0.602
        (2, 2, Stop.CONFIDENCE),  # AR = 0.93125 ≥ α, 2 ≠ L: 0.601
        (2, 2, Stop.END_OF_TEXT),  # cut from outside, nothing learned
        (0, 0, Stop.EXHAUSTED),  # no draft, nothing learned
        ALL,  # AR = 0.965625, 4 = L: 0.601
        (2, 1, Stop.BUDGET),  # a rejection is a rejection: AR = 0.7328125: 0.602
    ]
    spec = "adaedl(threshold=0.6,length=4)"
    thresholds = [0.6, 0.601, 0.602, 0.601, 0.601, 0.601, 0.601, 0.602]
    np.testing.assert_allclose(trace(spec, rounds, "threshold"), thresholds, rtol=1e-12)
    rates = [0.95, 0.725, 0.8625, 0.93125, 0.93125, 0.93125, 0.965625, 0.7328125]
    np.testing.assert_allclose(trace(spec, rounds, "rate"), rates, rtol=1e-12)


def test_adaedl_relaxes_after_a_long_draft_with_a_rejection():
    # AR = 0.25 + 0.375 = 0.625 ≥ α = 0.5, 3 ≠ L = 4.
    spec = "adaedl(threshold=0.6,target=0.5,length=4)"
    assert trace(spec, [(4, 3, Stop.LIMIT)], "threshold")[0] == pytest.approx(0.599)


def test_adaedl_threshold_stays_a_probability():
    assert trace("adaedl(epsilon=1,beta2=0)", [NONE], "threshold") == [1.0]
    assert trace("adaedl(epsilon=1,beta2=0)", [(2, 2, Stop.CONFIDENCE)], "threshold") == [0.0]


# --- exllama-confidence -------------------------------------------------------------------------


def confident(policy, rounds):
    """The state after rounds of `(probabilities, accepted)`."""
    state = policy.start()
    for tops, accepted in rounds:
        tokens = [Token(top1=top) for top in tops]
        stop = int(Stop.LIMIT)
        round = RoundOutcome(len(tops), accepted, [1.0] * len(tops), stop, tokens)
        state = policy.observe(state, round)
    return state


def test_exllama_confidence_by_hand():
    policy = make("exllama-confidence(burn_in=6,least=2,decay=0.5)")
    # σ(2.5) = 0.924 and σ(0.5) = 0.622: bins 2 and 0 of log-odds.
    sure, unsure = 0.924, 0.622
    state = confident(policy, [([sure, sure, unsure, sure], 2)])
    # Tested 2 sure, both kept, and the rejected unsure one; what follows it was not judged.
    np.testing.assert_allclose(state.tested[[6, 8]], [0.5, 1.0])
    np.testing.assert_allclose(state.accepted[[6, 8]], [0.0, 1.0])
    assert state.chances.tolist() == [1.0] * 13, "too few"
    state = confident(policy, [([sure] * 9 + [unsure], 9), ([unsure] * 8, 2)])
    # 9 sure, 9 kept, then all halved twice; unsure: (1 ÷ 2 + 3) ÷ 2 = 1.75 < 2 is not believed.
    np.testing.assert_allclose(state.tested[[6, 8]], [1.75, 2.25])
    assert state.chances.tolist() == [1.0] * 13, "4 in all, of 6"
    policy = make("exllama-confidence(burn_in=4,least=1,decay=0.5)")
    state = confident(policy, [([sure] * 9 + [unsure], 9), ([unsure] * 8, 2)])
    # Nearest at or below, else above: 1 of 1.75 unsure tokens was kept (2 ÷ 2 of 3 ÷ 2 + ¼).
    np.testing.assert_allclose(state.chances[[0, 6, 7]], 1 / 1.75)
    np.testing.assert_allclose(state.chances[[8, 12]], 1.0)
    memo, goes = None, []
    for top in (sure, unsure, unsure):
        go, memo = policy.step(state, memo, Token(top1=top))
        goes.append(go)
    assert goes == [True, True, False], "1, 0.57, 0.33 < 0.4"
    assert policy.trim(state, memo) == 0
    assert policy.start(True, state) is state
    assert policy.step(state, None, Token()) == (True, 1.0), "a drafter that says nothing"


def test_exllama_confidence_learns_from_what_was_decided_only():
    policy = make("exllama-confidence(burn_in=0,least=1)")
    tokens = [Token(top1=0.9)] * 3
    cut = RoundOutcome(3, 3, [1.0] * 3, int(Stop.BUDGET), tokens)
    assert policy.observe(policy.start(), cut) is not None
    assert policy.observe(policy.start(), cut).tested.sum() == 0


# --- exllama-ema --------------------------------------------------------------------------------


def test_exllama_ema_by_hand():
    rounds = [
        ALL,  # a = 5 > 4: 1.3·5 − 0.3·4 = 5.3
        NONE,  # 0.35·5.3 = 1.855
        ALL,  # γ = 2, a = 3: 3.9 − 0.3·1.855 = 3.3435
        (None, 1, Stop.LIMIT),  # 0.65 + 0.35·3.3435 = 1.820225
        (2, 2, Stop.BUDGET),  # cut from outside
        (1, 1, Stop.CONFIDENCE),  # all of what was drafted, a = 2: 2.6 − 0.5460675 = 2.0539325
    ]
    averages = [5.3, 1.855, 3.3435, 1.820225, 1.820225, 2.0539325]
    np.testing.assert_allclose(trace("exllama-ema", rounds, "ema"), averages, rtol=1e-12)
    assert lengths("exllama-ema", rounds) == [4, 4, 2, 4, 2, 2, 3]
    assert lengths("exllama-ema(high=9)", rounds[:1]) == [4, 6]


def test_exllama_ema_rests_and_probes():
    # 4 → 1.4 → 0.49 → 0.1715: after three rounds of nothing it rests; round 2 was the last try.
    seen = lengths("exllama-ema", [NONE] * 3 + [(0, 0, Stop.LIMIT)] * 15)
    assert seen == [4, 2, 1] + [0] * 15 + [2]
    # A probe that fails starts the wait again; one that succeeds ends it: a = 3 gives
    # 3.9 − 0.3·0.1715 = 3.84855.
    rested = [NONE] * 3 + [(0, 0, Stop.LIMIT)] * 15
    assert lengths("exllama-ema", [*rested, NONE, *rested[3:]])[18:] == [2] + [0] * 15 + [2]
    assert lengths("exllama-ema", [*rested, ALL])[18:] == [2, 4]
    assert trace("exllama-ema", [*rested, ALL], "ema")[-1] == pytest.approx(3.84855)


@pytest.mark.parametrize("vain", [(0, 0, Stop.EXHAUSTED), (2, 2, Stop.END_OF_TEXT)])
def test_exllama_ema_repeats_a_probe_that_taught_nothing(vain):
    rested = [NONE] * 3 + [(0, 0, Stop.LIMIT)] * 15
    assert lengths("exllama-ema", [*rested, vain, vain])[18:] == [2, 2, 2]


def test_exllama_ema_need_not_rest():
    assert lengths("exllama-ema(skip_ema=0)", [NONE] * 8)[-1] == 1
    spec = "exllama-ema(probe=9,probe_interval=1)"  # a probe is no longer than the ceiling
    assert lengths(spec, [NONE] * 5) == [4, 2, 1, 4, 4, 4]


# --- sglang-ema ---------------------------------------------------------------------------------


def run(spec, accept, rounds):
    """γ of each round when `min(γ, accept)` tokens are accepted."""
    controller = make(spec)
    state, seen = controller.start(), []
    for _ in range(rounds):
        gamma = controller.limit(state)
        seen.append(gamma)
        state = controller.observe(state, outcome(gamma, min(gamma, accept)))
    return seen


def test_sglang_ema_by_hand():
    # ema = 4 at first. All of 5: 5 − 0.8¹⁵ = 4.965 > 4.5 after the 15th round, so 7.
    assert run("sglang-ema", 99, 20) == [5] * 15 + [7] * 5
    # Two: 2 + 2·0.8¹⁵ = 2.07 ≤ 3 − 0.5 − 0.25, so 3; and there it stays.
    assert run("sglang-ema", 2, 60) == [5] * 15 + [3] * 45
    # None: 4·0.8¹⁵ = 0.14 ≤ 2.25 and ≤ 0.25, two tiers down at once.
    assert run("sglang-ema", 0, 20) == [5] * 15 + [1] * 5
    # Three: 3 + 0.8¹⁵ = 3.035 is neither ≤ 2.25 nor > 4.5; ≤ 3.25 with another hysteresis.
    assert run("sglang-ema", 3, 60) == [5] * 60
    assert run("sglang-ema(down_hysteresis=0.75)", 3, 20) == [5] * 15 + [3] * 5
    assert run("sglang-ema(up_hysteresis=0.5)", 99, 20) == [5] * 20
    np.testing.assert_allclose(
        trace("sglang-ema", [ALL, NONE, (3, 3, Stop.BUDGET)], "ema"), [4.2, 3.36, 3.36]
    )


def test_sglang_ema_rests_for_an_interval_and_tries_again():
    spec = "sglang-ema(candidate_steps='0,1,3',length=3)"
    # ema = 2·0.8¹⁵ = 0.07 ≤ 0.25; five plain rounds, five of one token, and so on.
    assert run(spec, 0, 40) == [3] * 15 + ([0] * 5 + [1] * 5) * 2 + [0] * 5
    # 0.8⁵·0.07 + 1 − 0.8⁵ = 0.695 > 0.5 takes it up again, and 3 of 3 keep it there.
    controller = make(spec)
    state, seen = controller.start(), []
    for i in range(40):
        gamma = controller.limit(state)
        seen.append(gamma)
        state = controller.observe(state, outcome(gamma, gamma if i > 15 else 0))
    assert seen == [3] * 15 + [0] * 5 + [1] * 5 + [3] * 15
    # Started at 0 the plain rounds are its warm-up.
    assert run("sglang-ema(candidate_steps='0,1,3',length=0)", 0, 22) == [0] * 15 + [1] * 5 + [0, 0]
    assert run("sglang-ema(candidate_steps='0',length=0)", 0, 40) == [0] * 40


class Slot:
    """SGLang's rule for one row, walked tier by tier."""

    def __init__(self, steps, length, up, down):
        self.steps, self.at, self.up, self.down = steps, steps.index(length), up, down
        self.ema, self.rounds = length - 1.0, 0

    def observe(self, accepted):
        if self.steps[self.at]:
            self.ema = 0.8 * self.ema + 0.2 * accepted
        self.rounds += 1
        if self.rounds <= 10 or self.rounds % 5:
            return
        before, last = self.at, len(self.steps) - 1
        if self.steps[self.at] == 0:
            self.at = min(self.at + 1, last)
            if self.ema < 0:
                self.ema = max(self.steps[self.at] - 1.0, self.ema)
            return
        while self.at and self.ema <= max(self.steps[self.at - 1] - 0.5, 0.5) + self.down:
            self.at -= 1
        while self.at >= before and self.at < last:
            if self.ema <= self.steps[self.at] - 0.5 + self.up:
                break
            self.at += 1


@pytest.mark.parametrize(("up", "down"), [(0.0, -0.25), (0.25, 0.0), (-0.25, 0.25)])
@pytest.mark.parametrize("length", [0, 2, 5])
@pytest.mark.parametrize("steps", ["0,1,2,5", "0,2,3,5,8"])
def test_sglang_ema_against_the_reference(steps, length, up, down):
    spec = (
        f"sglang-ema(candidate_steps='{steps}',length={length},"
        f"up_hysteresis={up},down_hysteresis={down})"
    )
    controller = make(spec)
    rng = np.random.default_rng(5)
    slot = Slot([int(s) for s in steps.split(",")], length, up, down)
    state, used = controller.start(), set()
    for i in range(600):
        gamma = controller.limit(state)
        assert gamma == slot.steps[slot.at]
        used.add(gamma)
        kept = rng.random(gamma) < 0.5 + 0.49 * np.sin(i / 40)
        accepted = int(kept.cumprod().sum())
        state = controller.observe(state, outcome(gamma, accepted))
        slot.observe(accepted)
    assert used == set(slot.steps)
