"""Rules over a trace: each judges what was recorded as it judges the models themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import forerun
from forerun import zoo
from forerun.costs import Costs
from forerun.engine import Sampling
from forerun.engine.sampling import Sampler
from forerun.errors import SettingError
from forerun.lab.bounds.bounds import lenient_bounds
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay
from forerun.lab.traces.rules import RecordedRule
from forerun.lab.traces.trace import JUDGED, SIGNALS, Trace
from forerun.lab.traces.walk import judged_columns
from forerun.rules import RULES
from forerun.rules.odds import Odds
from forerun.signals import measure
from forerun.types import Draft, Target
from made_traces import trace_of
from marks import slow_but

CELL = Costs.synthetic(10, slope=0.02)
V, K, ROWS = 9, 5, 40
EVERY = (
    "standard", "ears(beta=0.4)", "ensemble(weight=0.5)", "typical", "spec-verification(tau=1)",
    "cm-asd(tau=0.5,gamma=1)", "easd(entropy=1.2,overlap=0.6)", "easd(entropy=1,bonus=untested)",
    "priced(start=0.4)", "priced(start=0.6)", "no-bonus(ears(beta=0.4))",
    "budget(ears(beta=0.4),drift=0.05)",
)  # fmt: skip


def both_models(temperature: float, seed: int = 0) -> tuple[Draft, Target, Trace]:
    """Both models' logits on drafts, as rules see them live, and as a trace holds them."""
    make = torch.Generator().manual_seed(seed)
    target, draft = (torch.randn(ROWS, K, V, generator=make, dtype=torch.float64) for _ in "td")
    draft = target + 0.7 * draft
    sampler = Sampler([Sampling(temperature=temperature)] * ROWS, [frozenset()] * ROWS)
    drawn = torch.distributions.Categorical(logits=draft).sample()
    tokens = drawn if temperature else draft.argmax(-1)
    best = target.argmax(-1)
    columns = judged_columns(sampler, [target, draft], tokens, best, draft)
    signals = measure(draft, tokens, set(SIGNALS))
    kept = (tokens == best).numpy().cumprod(-1)
    trace = trace_of(
        np.zeros((ROWS, 1), bool), K,
        draft_tokens=tokens.numpy()[:, None], matches=kept.sum(-1)[:, None],
        accept_prob=(columns["ratio"] if temperature else kept)[:, None],
        signals={name: signals[name].numpy()[:, None] for name in SIGNALS},
        judged={name: columns[name][:, None].astype(float) for name in JUDGED},
    )  # fmt: skip
    lengths = torch.full((ROWS,), K)
    probs = draft.softmax(-1) if temperature else None
    more = torch.nn.functional.pad(target, (0, 0, 0, 1))
    return Draft(tokens, lengths, probs, draft), Target(more, sampler.certain, more), trace


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", EVERY)
def test_a_recorded_run_is_judged_as_a_live_one(spec: str, temperature: float) -> None:
    draft, target, trace = both_models(temperature)
    rule: Any = RULES.make(spec)
    live = rule.weigh(Odds(draft, target)).accept
    kept = RecordedRule(trace, spec).judge(np.arange(ROWS), np.full(ROWS, K), np.zeros((ROWS, 2)))
    if spec.startswith("budget") and temperature:  # it goes by drift, which is known in the mean
        return
    chances = np.stack([kept.chance(depth) for depth in range(K)], 1)
    np.testing.assert_allclose(chances, live.numpy(), atol=1e-9)
    if temperature == 0:  # what is kept is certain, and so is its drift
        verdict = rule.judge(draft, target, torch.zeros(ROWS, K + 1, dtype=torch.float64))
        np.testing.assert_array_equal(kept.accepted, verdict.accepted.numpy())
        drift = 0 if verdict.drift is None else verdict.drift.sum(-1).numpy()
        np.testing.assert_allclose(kept.drift, drift, atol=1e-9)


@pytest.mark.parametrize("spec", ["ears(beta=0.4)", "ensemble(weight=0.5)", "priced(start=0.4)"])
def test_drift_is_right_in_the_mean_over_drafts(spec: str) -> None:
    """Of the first position, against the rule's own, over many drafts of the same two models."""
    ours, theirs = [], []
    for seed in range(60):
        draft, target, trace = both_models(1.0, seed)
        kept = RecordedRule(trace, spec, seed).judge(
            np.arange(ROWS), np.full(ROWS, K), np.zeros((ROWS, 2))
        )
        coins = torch.rand(
            ROWS, K + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        verdict = RULES.make(spec).judge(draft, target, coins)
        ours.append(kept.drift.mean())
        theirs.append(verdict.drift.sum(-1).mean())
    spread = np.sqrt((np.var(ours) + np.var(theirs)) / len(ours))
    assert abs(np.mean(ours) - np.mean(theirs)) < 4.42 * spread  # one in 10⁵ by chance


def test_what_a_trace_does_not_hold_is_refused() -> None:
    trace = both_models(1.0)[2]
    with pytest.raises(SettingError, match="judges drafts as a whole"):
        RecordedRule(trace, "block")
    with pytest.raises(SettingError, match="reads more of the two models"):
        RecordedRule(trace, "fly")
    warm = trace_of(np.zeros((2, 3), bool), 4, about={"sampling": {"temperature": 0.7}})
    with pytest.raises(SettingError, match="reads more of the two models"):
        RecordedRule(warm, "typical")
    noisy = both_models(1.0)[2]
    noisy.accept_prob[:] = noisy.accept_prob.round()
    with pytest.raises(SettingError, match="record them by the rule `standard`"):
        RecordedRule(noisy, "ears")
    sure = both_models(1.0)[2]  # texts that no coin could have ended differently
    sure.judged["ratio"][:3, :, 0] = 0
    sure.accept_prob[:3] = 0
    sure.matches[:3] = 0
    RecordedRule(sure, "ears")


# --- the bound -----------------------------------------------------------------------------------


def cheapest(ratio: Any, size: int, price: float, at: int = 0) -> float:
    """Seconds and price · drift of the best policy, by trying all."""
    if at >= size:
        return 0.0
    room = min(ratio.shape[1], size - at - 1)

    def judged(k: int, j: int) -> float:
        if j == k:
            return cheapest(ratio, size, price, at + k + 1)
        on, chance = judged(k, j + 1), ratio[at, j]
        tossed = chance * on + (1 - chance) * cheapest(ratio, size, price, at + j + 1)
        return min(tossed, on + price * (1 - chance))

    return min(
        CELL.draft_seconds(k) + CELL.verify_seconds(k + 1) + CELL.fixed + judged(k, 0)
        for k in range(room + 1)
    )


@pytest.mark.parametrize("price", [0.2, 1.0, 3.0, 1e9])
def test_the_bound_is_the_cheapest_policy(price: float) -> None:
    from forerun.lab.bounds.bounds import _at_price

    ratio = np.random.default_rng(0).random((2, 5, 3))
    trace = trace_of(np.zeros((2, 5), bool), 3)
    trace.judged["ratio"] = ratio
    seconds, drift = _at_price(trace, CELL, price)
    for row in range(2):
        wanted = cheapest(ratio[row], 5, price)
        assert seconds[row] + price * drift[row] == pytest.approx(wanted)


def test_a_larger_budget_is_never_slower_and_is_kept() -> None:
    trace = trace_of(np.random.default_rng(1).random((6, 20)) < 0.6, 6)
    trace.judged["ratio"] = np.where(trace.judged["ratio"] > 0, 1, 0.3)
    trace.about["sampling"] = {"temperature": 1.0}
    trace.accept_prob[:] = 0.3
    bounds = lenient_bounds(trace, CELL, (0.0, 0.02, 0.1))
    assert all(bound["drift"] <= bound["budget"] for bound in bounds)
    speeds = [bound["speedup"]["mean"] for bound in bounds]
    assert speeds == sorted(speeds)
    assert speeds[2] > speeds[0] * 1.02


# --- live ----------------------------------------------------------------------------------------

RULED = (
    "standard", "ears(beta=0.1)", "ears(beta=0.3)", "priced(drift=0.02)",
    "spec-verification(top=3,tau=1)", "easd(entropy=1,bonus=untested)",
)  # fmt: skip


@cache
def model() -> forerun.Model:
    return forerun.load(device="cpu")


@cache
def tasks(count: int) -> list[Task]:
    return [
        Task(family, p.id, model().encode(p.prompt), Sampling(
            temperature=1.0, seed=i, max_new_tokens=min(32, p.max_new_tokens),
            repetition_penalty=1.2 if family == "stories" else 1.0,
        ))
        for family in zoo.families()
        for i, p in enumerate(zoo.prompts(family, "val", limit=count))
    ]  # fmt: skip


@cache
def trace(count: int) -> Trace:
    return record(model(), tasks(count), depth=8, rule="standard")


@pytest.mark.parametrize(
    ("count", "rule", "length"),
    slow_but(
        product([1, 40], RULED, [2, 4, 8]), lambda n, rule, k: n == 1 and "ears" in rule and k == 4
    ),
)
def test_live_tokens_a_round_are_those_replayed(count: int, rule: str, length: int) -> None:
    """Within 3 % and three standard errors of the live figure (docs/papers.md)."""
    spec, seen = f"fixed({length})", tasks(count)
    ours = replay(trace(count), spec, CELL, rule=RecordedRule(trace(count), rule), draws=8)
    done = [
        d
        for seed in range(1 if count == 1 else 2)
        for d in model().generate(
            [t.tokens for t in seen], controller=spec, rule=rule,
            sampling=[
                replace(t.sampling, seed=1000 * (seed + 1) + i) for i, t in enumerate(seen)
            ],
        )
    ]  # fmt: skip
    tokens, rounds = np.array([[d.stats.tokens, d.stats.rounds] for d in done]).T
    drawn = np.random.default_rng(0).integers(0, len(done), (500, len(done)))
    error = float((tokens[drawn].sum(1) / rounds[drawn].sum(1)).std())
    live, replayed = tokens.sum() / rounds.sum(), ours.committed.sum() / ours.rounds.sum()
    assert abs(replayed - live) < 0.03 * live + 3 * error
