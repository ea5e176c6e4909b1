"""The drift meter in the engine: per round, per request, and under a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.model import ModelDrafter
from forerun.engine import Engine, Sampling
from forerun.errors import SettingError
from forerun.rules import RULES
from forerun.testing import ScriptedModel, engine
from marks import spread
from test_engine import V, chaotic, noisy

LOSSY = ["ears(beta=0.5)", "easd(entropy=0.8,overlap=0.4,n=3)", "cm-asd(tau=2)", "typical",
         "spec-verification(tau=2)", "ensemble(weight=0.5)",
         "fly(entropy=0.1,window=1)"]  # fmt: skip


def pair(seed: int = 40, noise: float = 0.7) -> tuple[ScriptedModel, ScriptedModel]:
    script = chaotic(seed)
    return ScriptedModel(script), ScriptedModel(noisy(script, seed + 1, noise))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", LOSSY)
def test_statistics_add_up(rule: str, temperature: float) -> None:
    done = engine(*pair())(
        [[0], [1, 2], [3]],
        controller="fixed(4)", rule=rule, temperature=temperature, max_new_tokens=30, seed=5,
    )  # fmt: skip
    for completion in done:
        drift = [d for r in completion.rounds for d in r.drift]
        for r in completion.rounds:
            assert len(r.drift) == min(r.accepted + 1, r.drafted, r.committed)
        assert all(0 <= d <= 1 for d in drift)
        assert completion.stats.drift_mean == pytest.approx(sum(drift) / len(completion.tokens))
        assert completion.stats.drift_max == max(drift)
    total = sum(c.stats.drift_mean for c in done)
    greedy_is_untouched = rule.startswith(("ears", "typical", "ensemble"))
    if (temperature == 0 and greedy_is_untouched) or (temperature and rule.startswith("fly")):
        assert total == 0
    else:
        assert total > 0


def test_greedy_drift_counts_tokens_that_are_not_the_arg_max() -> None:
    script = chaotic(40)
    completion = engine(*pair())(
        [0], controller="fixed(4)", rule="cm-asd(tau=2)", max_new_tokens=40
    )
    context, off = [0], 0
    for token in completion.tokens:
        off += int(script(tuple(context)).argmax()) != token
        context.append(token)
    assert off > 0
    assert completion.stats.drift_mean == pytest.approx(off / 40)


def test_lossless_rules_have_no_drift() -> None:
    for rule in ("standard", "block", "exact"):
        completion = engine(*pair())([0], rule=rule, max_new_tokens=10)
        assert completion.stats.drift_mean is completion.stats.drift_max is None
        assert all(r.drift is None for r in completion.rounds)
    plain = engine(pair()[0])([0], rule="ears", temperature=1.0, max_new_tokens=10)
    assert plain.stats.drift_mean == 0  # a lossy rule that had nothing to judge


def test_rules_of_both_kinds_share_a_batch() -> None:
    how = Sampling(max_new_tokens=20, temperature=1.0, seed=3)
    rules = ["standard", "ears(beta=0.5)", "easd(entropy=0.5,overlap=0,n=3)", "cm-asd", "block",
             "budget(ears(beta=0.5),drift=0.02)", "easd(entropy=0.5,n=2)"]  # fmt: skip

    def run(*specs: str) -> list[Any]:
        target, draft = pair()
        made = Engine(target, ModelDrafter(draft, V))
        for spec in specs:
            made.submit([1, 2], how, CONTROLLERS.make("fixed(4)"), RULES.make(spec))
        done = {e.request: e.completion for e in made.run() if e.completion}
        return [done[i] for i in sorted(done)]

    for spec, together in zip(rules, run(*rules), strict=True):
        (alone,) = run(spec)
        assert together.tokens == alone.tokens, spec
        if RULES.make(spec).lossless:
            assert together.stats.drift_mean is None
        else:
            assert together.stats.drift_mean == pytest.approx(alone.stats.drift_mean)


@pytest.mark.parametrize(
    ("rule", "temperature", "budget"), spread(2, list(LOSSY), [0.0, 1.0], [0.0, 0.02, 0.1])
)
def test_a_budget_is_kept_at_every_token(rule: str, temperature: float, budget: float) -> None:
    completion = engine(*pair())(
        [0], controller="fixed(4)", rule=f"budget({rule},drift={budget})",
        temperature=temperature, max_new_tokens=60, seed=1,
    )  # fmt: skip
    spent, tokens = 0.0, 0
    for r in completion.rounds:
        for i, d in enumerate(r.drift):
            spent += d
            assert spent <= budget * (tokens + i + 1) + 1e-6
        tokens += r.committed


def test_a_zero_budget_is_lossless() -> None:
    for how in ({}, {"temperature": 1.0, "seed": 4}):
        lossless, held = (
            engine(*pair())([0], controller="fixed(4)", rule=rule, max_new_tokens=40, **how)
            for rule in ("standard", "budget(ears(beta=0.5),drift=0)")
        )
        assert held.tokens == lossless.tokens


@pytest.mark.parametrize("rule", ["easd", "cm-asd", "budget(easd)"])
def test_rules_that_read_the_draft_refuse_a_drafter_without_a_distribution(rule: str) -> None:
    run = engine(ScriptedModel(chaotic(1)), LookupDrafter(3, 1))
    with pytest.raises(SettingError, match="draft's distribution"):
        run([0], rule=rule)
    assert len(run([0], rule="ears", max_new_tokens=4).tokens) == 4
    alone = "easd(draft_entropy=False,overlap=0)"
    assert len(run([0, 1, 0, 1], rule=alone, max_new_tokens=9).tokens) == 9


def test_penalised_greedy_takes_the_second_best() -> None:
    table = torch.zeros(4, 4)
    table[:, 1], table[:, 2] = 0.2, 0.1  # unsure, and both models agree
    run = engine(ScriptedModel(table), ScriptedModel(table))
    assert set(run([0], max_new_tokens=6).tokens) == {1}
    done = run([0], controller="fixed(1)", rule="easd(entropy=1,n=2)", max_new_tokens=6)
    assert done.tokens == [2] * 6  # every token is tested
    assert done.stats.drift_mean == pytest.approx(1)
    rule = "easd(entropy=1,n=2,bonus=untested)"
    done = run([0], controller="fixed(1)", rule=rule, max_new_tokens=6)
    # Penalised wherever something was drafted; the last token had no room for a draft.
    assert done.tokens == [2, 2, 2, 2, 2, 1]
    assert done.stats.drift_mean == pytest.approx(5 / 6)
