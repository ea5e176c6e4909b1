"""Leaves: the same text with second choices and without, in fewer rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.controllers.base import Chance, Outlook
from forerun.costs import Costs
from forerun.drafters.model import ModelDrafter
from forerun.engine import Completion, Engine, Sampling
from forerun.engine.meter import Lap, Meter
from forerun.errors import SettingError
from forerun.governors import Seat
from forerun.governors.renewal import SECOND, Renewal
from forerun.lab.traces.batches import replay_batches
from forerun.rules import RULES
from forerun.rules.base import second_draw
from forerun.runtime.torch_executor import TorchExecutor
from forerun.testing import ScriptedModel, engine
from forerun.types import Draft, Target
from made_traces import periodic
from rule_tools import LAST
from test_engine import chaotic, noisy
from tiny import build, texts

MANY = "auto(leaves=4,cost=10,slope=0)"
NONE = "auto(cost=10,slope=0)"
PROMPTS = [[0], [3, 4], [5, 1, 2], [6, 6, 6, 6]]


def counted(done: Completion, name: str) -> int:
    return done.stats.counters.get(name, 0)


@pytest.mark.parametrize("how", [
    {},
    {"repetition_penalty": 1.3, "min_new_tokens": 8},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 5, "top_p": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {2: -3.0}, "allowed_tokens": [0, 2, 3, 4, 5, 6]},
    {"stop": [[3, 4]]},
], ids=["greedy", "penalised", "seeded", "truncated", "biased", "stopped"])  # fmt: skip
@pytest.mark.parametrize("drafted", [chaotic(3), noisy(chaotic(1), 2, 1.0)], ids=["far", "near"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_text_is_the_same(how: dict[str, Any], drafted: Any, rows: int) -> None:
    script, limit = chaotic(1), 40
    if "stop" in how:
        how = {"stopping": lambda written: written[-2:] == [3, 4]}
    how = {"max_new_tokens": 50, "rule": "gumbel", **how}
    run = {
        name: engine(ScriptedModel(script, limit), ScriptedModel(drafted), eos=[6], max_rows=rows)(
            PROMPTS, controller=spec, **how
        )
        for name, spec in (("plain", "fixed(0)"), ("chain", NONE), ("leaves", MANY))
    }
    assert [c.tokens for c in run["leaves"]] == [c.tokens for c in run["plain"]]
    assert [c.finish_reason for c in run["leaves"]] == [c.finish_reason for c in run["plain"]]
    assert not any(counted(c, "leaves") for c in run["chain"])
    assert all(sum(r.committed for r in c.rounds) == len(c.tokens) for c in run["leaves"])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_leaves_are_kept_and_spare_rounds(temperature: float) -> None:
    script = chaotic(1)
    draft = noisy(script, 2, 1.5)
    how = {"max_new_tokens": 120, "temperature": temperature, "rule": "gumbel", "seed": 1}
    chain, tree = (
        engine(ScriptedModel(script), ScriptedModel(draft))([0], controller=spec, **how)
        for spec in (NONE, MANY)
    )
    assert tree.tokens == chain.tokens
    assert counted(tree, "leaves_kept") > 5
    took = [c.stats.rounds + c.stats.drafted / 10 for c in (chain, tree)]  # by these costs
    assert took[1] < 0.97 * took[0]
    # A policy sees of a kept leaf what it would see without: a miss of the chain.
    assert all(r.accepted <= r.drafted for r in tree.rounds)
    assert any(r.committed == r.accepted + 2 for r in tree.rounds)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_real_caches_follow(family: str) -> None:
    """Of the target what a leaf left is moved; the draft reads it like any other token."""
    target, draft = build(family), build(family, seed=0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))

    def run(spec: str) -> list[Completion]:
        made = Engine(TorchExecutor(target), ModelDrafter(TorchExecutor(draft), 97), max_rows=3)
        ids = [
            made.submit(p, Sampling(max_new_tokens=40), CONTROLLERS.make(spec), RULES.make("exact"))
            for p in texts(5, 9, 3, 12)
        ]
        done = {e.request: e.completion for e in made.run() if e.completion is not None}
        return [done[i] for i in ids]

    plain, tree = run("fixed(0)"), run(MANY)
    assert [c.tokens for c in tree] == [c.tokens for c in plain]
    assert sum(counted(c, "leaves_kept") for c in tree) > 2


@pytest.mark.parametrize("how", [
    {"rule": "ears", "temperature": 1.0},
    {"rule": "block", "temperature": 1.0},
], ids=["ears", "block"])  # fmt: skip
def test_other_rules_get_none(how: dict[str, Any]) -> None:
    script = chaotic(1)
    run = engine(ScriptedModel(script), ScriptedModel(chaotic(3)))
    done = run([0], controller=MANY, max_new_tokens=30, seed=1, **how)
    assert not counted(done, "leaves")
    assert not RULES.make(how["rule"]).takes_leaves


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of target and draft: alike, unlike, the same, of other tokens, certain."""
    make = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 6, generator=make, dtype=torch.float64) * (1 + seed % 3)
    if seed % 5 == 1:
        q = p + 0.1 * q
    if seed % 5 == 2:
        q = p.clone()
    if seed % 5 == 3:
        p[:3], q[2:] = -torch.inf, -torch.inf
    if seed % 5 == 4:
        q[1:] = -torch.inf
    return p, q


@pytest.mark.parametrize("seed", range(25))
def test_a_second_draw_emits_the_targets_distribution(seed: int) -> None:
    """By enumeration of both drafted tokens: recursive rejection without replacement."""
    p, q = distributions(seed)
    rule, coins = RULES.make("standard"), torch.full((1, 2), LAST, dtype=torch.float64)
    target = Target(p.expand(1, 2, -1), torch.tensor([False]))
    emitted = torch.zeros(6, dtype=torch.float64)
    for first, chance in enumerate(q.softmax(-1)):
        if not chance:
            continue
        draft = Draft(torch.tensor([[first]]), torch.tensor([1]), q.softmax(-1).view(1, 1, -1))
        verdict = rule.judge(draft, target, coins)
        accept = verdict.accept_prob[0, 0]
        emitted[first] += chance * accept
        if verdict.accepted:  # even by the highest coin
            continue
        probs, others = verdict.next_probs[0], q.softmax(-1)
        others[first] = 0
        if not others.sum():
            emitted += chance * (1 - accept) * probs
            continue
        others /= others.sum()
        for second in range(6):
            if others[second]:
                kept, rest = second_draw(probs, others, second)
                weight = chance * (1 - accept) * others[second]
                emitted[second] += weight * min(kept, 1)
                emitted += weight * (1 - min(kept, 1)) * rest
    torch.testing.assert_close(emitted, p.softmax(-1), atol=1e-12, rtol=0)


def test_sampled_texts_have_the_targets_distribution() -> None:
    """By coins, in the engine: χ² over texts of two tokens, 15 degrees; false alarm < 1 in 10⁶."""
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 1.5
    other = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) * 1.5
    run = engine(ScriptedModel(table), ScriptedModel(other), max_rows=64)
    count, seen, leaves = 1600, torch.zeros(4, 4), 0
    done = [
        c
        for seed in range(0, count, 64)
        for c in run([[0]] * 64, controller=MANY, rule="standard", temperature=1.0,
                     max_new_tokens=4)
    ]  # fmt: skip
    for completion in done:
        seen[completion.tokens[0], completion.tokens[1]] += 1
        leaves += counted(completion, "leaves_kept")
    first = table.softmax(-1)[0]
    expected = first.unsqueeze(-1) * table.softmax(-1) * len(done)
    assert leaves > 100
    assert float(((seen - expected) ** 2 / expected).sum()) < 57.4


def test_replayed_second_choices_save_rounds_and_are_paid_for() -> None:
    """The draft misses every fourth token, where its second choice is right."""
    costs = Costs.synthetic(5, 0.02, tree=0.01)
    spec = "auto(survival(weight=1e9),cost=5,leaves=2)"
    trace, seen = periodic(3), []
    chain = replay_batches(trace, spec.replace("leaves=2", "leaves=0"), costs, 1)
    tree = replay_batches(trace, spec, costs, 1, watch=seen.append)
    assert not chain.leaves.any()
    assert (tree.leaves_kept > 5).all()
    assert (tree.rounds == tree.committed - tree.accepted - tree.leaves_kept).all()
    assert (tree.seconds < chain.seconds).all()
    judged = tree.drafted + tree.leaves
    trees = (tree.seconds - tree.rounds - tree.steps / 5 - 0.02 * judged) / 0.01
    assert (trees > tree.leaves / 2 - 1e-6).all()
    assert (trees < tree.leaves + 1e-6).all()
    rows = replay_batches(trace, spec, costs, 8)
    assert rows.rounds.tolist() == tree.rounds.tolist()


def test_a_trace_that_does_not_know_second_choices_refuses_to_replay_them() -> None:
    trace, costs = periodic(3), Costs.synthetic(5)
    unknown = np.full_like(trace.accept_prob, np.nan)
    first = replace(trace, judged={**trace.judged, "rank": unknown, "target_rank": unknown})
    with pytest.raises(SettingError, match=r"leaves.* does not say.*record it"):
        replay_batches(first, "auto(leaves=2)", costs, 1)
    tossed = replace(trace, accept_prob=trace.accept_prob * 0.5)
    with pytest.raises(SettingError, match=r"leaves.* judged by coins.* rule gumbel"):
        replay_batches(tossed, "auto(leaves=2)", costs, 1)


def plan(costs: Costs, chances: list[float], leaves: int = 8, **more: Any) -> list[int]:
    """Where a row alone, whose drafted tokens have these chances each, has leaves."""
    governor = Renewal(leaves=leaves)
    made = governor.open(governor.start(), costs, {0: Seat(outlook=Outlook(0.6, 0.8))}, 1, 0)
    kept = itertools.accumulate(chances, lambda a, b: a * b)
    for chance in kept:
        made.go({0: Chance(chance, 0.5)})
    return sorted(made.nodes([len(chances)], {}).get(0, []))


def test_a_step_of_widths_is_filled_and_never_crossed() -> None:
    passes = ((1, 1.0), (2, 1.5), (5, 1.5), (6, 1.8), (8, 1.8), (9, 2.6))
    costs = Costs(0.1, passes, levels=(1, 5, 8))
    assert plan(costs, [0.9, 0.6]) == [0, 1]  # of width 3; there are no more places
    assert plan(costs, [0.9, 0.6, 0.8]) == [1]  # the likeliest to be rejected
    assert plan(costs, [0.9, 0.6, 0.8, 0.7]) == []  # full
    assert plan(costs, [0.9, 0.6, 0.8, 0.7, 0.9]) == [1, 3]
    assert plan(costs, [0.9, 0.6, 0.8], leaves=0) == []


def test_a_leaf_is_worth_its_slope_and_all_that_a_tree_takes() -> None:
    def costs(slope: float, tree: float = 0.0) -> Costs:
        return Costs(0.1, ((1, 1.0), (2, 1.0 + slope)), tree=tree)

    likely = SECOND * 0.5  # that the first of these is rejected, and the second choice right
    assert plan(costs(likely - 0.02), [0.5, 0.99]) == [0]
    assert plan(costs(likely + 0.02), [0.5, 0.99]) == []
    assert plan(costs(0.02, likely - 0.04), [0.5, 0.99]) == [0]
    assert plan(costs(0.02, likely), [0.5, 0.99]) == []


def test_what_a_tree_takes_is_measured() -> None:
    meter = Meter()

    def rounds(seconds: float, tree: bool) -> None:
        for _ in range(6):
            meter.add(Lap(1, 1, verify_seconds=1.0))
            meter.add(Lap(1, 5, 3, 0.3, 0.1, verify_seconds=seconds, tree=tree))

    rounds(2.0, False)
    assert meter.costs(1).tree == 0
    rounds(2.3, True)
    assert meter.costs(1).tree == pytest.approx(0.3)
    assert meter.costs(1).verify_seconds(5) == pytest.approx(2.0)
