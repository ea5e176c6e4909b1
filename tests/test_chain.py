"""Two drafters in a row: who drafts when, what it is taken to cost, exactness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.controllers.base import Outlook
from forerun.controllers.survival import Survival
from forerun.costs import Costs
from forerun.drafters import DRAFTERS
from forerun.drafters.chain import Chain, ChainDrafter
from forerun.drafters.eagle import Eagle
from forerun.drafters.lookup import Lookup, LookupDrafter
from forerun.drafters.memory import MemoryDraft
from forerun.drafters.model import ModelDraft, ModelDrafter
from forerun.drafters.suffix import Suffix, SuffixDrafter
from forerun.engine.lengths import Lengths
from forerun.engine.loop import Engine
from forerun.errors import SettingError
from forerun.governors.base import Outcome, Seat
from forerun.governors.renewal import Pace, Renewal
from forerun.model import drafter_spec
from forerun.requests import Request, Sampling
from forerun.rules import RULES
from forerun.runtime.base import Rows
from forerun.testing import ScriptedModel
from forerun.types import RoundOutcome, Stop, Token
from marks import slow_but
from test_drafters import Greedy
from test_eagle import saved
from test_states import RUNTIMES
from tiny import build, texts

NEXT = torch.eye(8).roll(1, 1) * 9  # after token t comes t + 1


def test_a_chain_is_written_with_a_plus(tmp_path: Path) -> None:
    own = saved(tmp_path)
    assert drafter_spec(f"memory + {own}") == Chain(MemoryDraft(), Eagle(own))
    assert drafter_spec("suffix(n=8)+some/model") == Chain(Suffix(8), ModelDraft("some/model"))
    made = drafter_spec("chain(lookup,eagle(path='x'),enough=0.3)")
    assert DRAFTERS.make(DRAFTERS.text(made)) == made == Chain(Lookup(), Eagle("x"), 0.3)
    assert made.remembering() == made
    assert drafter_spec("memory+lookup").remembering().first == MemoryDraft(grow=True)


def test_the_first_must_need_no_model(tmp_path: Path) -> None:
    rows = RUNTIMES["torch"](build("llama"))
    with pytest.raises(SettingError, match="FIRST\\+THEN"):
        Chain(Eagle(saved(tmp_path)), Lookup()).build(rows, None)


def test_the_second_takes_over_where_the_first_expects_too_little() -> None:
    chain = ChainDrafter(SuffixDrafter(4, 0.0), ModelDrafter(ScriptedModel(NEXT), 8), 1.0)
    prompts = [[5, 2, 6, 5, 2, 6, 5, 2, 6, 5], [1], [5, 2, 6, 5]]
    chain.join(prompts, 9)
    out = chain.propose(prompts, [5, 3, 1], Greedy())
    assert out.tokens == [[2, 6, 5, 2, 6], [2, 3, 4], [6]]
    assert (out.free_steps, out.steps) == (5, 3), "of the model alone"


def test_a_block_is_believed_as_it_is() -> None:
    chain = ChainDrafter(LookupDrafter(3, 2), ModelDrafter(ScriptedModel(NEXT), 8), 9.0)
    prompts = [[5, 2, 6, 5, 2], [5, 2]]
    chain.join(prompts, 9)
    assert chain.propose(prompts, [3, 3], Greedy()).tokens == [[6, 5, 2], [3, 4, 5]]


class Counting(ModelDrafter):
    """Counts the drafts that are asked of it."""

    asked = 0

    def propose(self, texts: Any, most: Any, guide: Any) -> Any:
        self.asked += sum(text is not None for text in texts)
        return super().propose(texts, most, guide)


@pytest.mark.parametrize("rule", slow_but(["standard", "gumbel", "block"], "standard".__eq__))
def test_sampled_text_has_the_targets_distribution(rule: str) -> None:
    """χ² of 3 tokens of 1,500 texts against all 27 by the target's own probabilities; certain and
    drawn drafts share passes. Fails by chance once in 100,000."""
    torch.manual_seed(1)
    script = torch.randn(3, 3)
    near = script + 0.5 * torch.randn(3, 3)
    model = Counting(ScriptedModel(near), 3)
    chain = ChainDrafter(SuffixDrafter(4, 0.0), model, 0.9)
    engine = Engine(Rows(ScriptedModel(script)), chain, max_rows=60)
    how, prompt = Sampling(max_new_tokens=4, temperature=1.0), [0, 1, 2, 0, 1, 2, 0, 1]
    length, keep = CONTROLLERS.make("fixed(3)"), RULES.make(rule)
    for _ in range(1500):
        engine.submit(Request(prompt, how, length, keep))
    seen, drafts = np.zeros((3, 3, 3)), 0
    for event in engine.run():
        drafts += bool(event.drafted)
        if event.completion is not None:
            seen[tuple(event.completion.tokens[:3])] += 1
    p = script.softmax(-1).double().numpy()
    wanted = 1500 * p[1][:, None, None] * p[:, :, None] * p[None, :, :]
    assert 0.1 < model.asked / drafts < 0.9, "drafts of both kinds"
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 69.8, "χ² of 26 degrees of freedom"


def plan(draft: float, slope: float = 0.0) -> Any:
    costs = Costs(draft, ((1, 1.0), (2, 1.0 + slope)), free=0.001)
    seat = Seat(outlook=Outlook(0.6, 0.7))
    return Renewal().open(Pace(16.0, 2.0), costs, {0: seat, 1: seat}, 1, 0)


def test_the_dearer_the_model_the_less_a_free_draft_must_bring() -> None:
    kept = [0.8, 0.6]
    assert [plan(draft=step).free({0: kept}) for step in (0.02, 0.4, 0.6)] == [{}, {0: 2}, {0: 2}]
    assert plan(draft=0.6).free({0: [0.05]}) == {}, "two rows share its steps"
    assert plan(draft=1.8).free({0: [0.05]}) == {0: 1}


def test_where_others_ask_the_model_anyway_a_poor_free_draft_gives_way() -> None:
    costs, seat = Costs(0.3, ((1, 1.0), (2, 1.0)), batch=2), Seat(outlook=Outlook(0.6, 0.7))
    alone = Renewal().open(Pace(16.0, 2.0), costs, {0: seat}, 1, 0)
    assert alone.free({0: [0.9]}) == {0: 1}
    for own, taken in ([0.9], {}), ([0.9, 0.8, 0.7], {0: 3}):
        beside = Renewal().open(Pace(16.0, 2.0), costs, {0: seat, 1: seat}, 1, 0)
        assert beside.free({0: own}) == taken


def test_of_a_free_draft_what_is_worth_its_place_is_taken() -> None:
    """Where a token makes the pass longer by a fifth, one that is kept less often is left out."""
    assert plan(draft=1.8, slope=0.2).free({0: [0.9, 0.5, 0.1]}) == {0: 2}
    assert plan(draft=1.8, slope=0.2).free({0: [0.1, 0.09]}) == {0: 0}


def test_a_free_draft_is_weighed_against_what_was_kept_of_the_model_s() -> None:
    shown = [Token(logit_margin=1.0)] * 4
    for kept, better in ((4, {}), (0, {0: 2})):
        policy, state = Survival(), Survival().start()
        for _ in range(8):
            round = RoundOutcome(4, kept, [float(kept > 0)] * 4, Stop.CONFIDENCE, shown)
            state = policy.observe(state, round)
        seat = Seat(outlook=policy.outlook(state))
        costs = Costs(0.1, ((1, 1.0), (2, 1.0)), free=0.001)
        plan = Renewal().open(Pace(16.0, 2.0), costs, {0: seat}, 1, 0)
        assert plan.free({0: [0.8, 0.6]}) == better


def test_forecasts_are_of_the_model_alone() -> None:
    lengths = Lengths({})
    lengths.join(CONTROLLERS.make("auto"), True)
    costs = Costs(0.1, ((1, 1.0), (8, 1.0)))
    states = []
    for free in (set(), {0}):
        lengths.limits(costs, [Seat()])
        missed = RoundOutcome(3, 0, [0.0] * 3, Stop.CONFIDENCE, [Token(logit_margin=2.0)] * 3)
        lengths.observe(costs, [missed], Outcome({0: 1}, {0: 3}, 3), free)
        states.append(lengths._rows[0].state)
    assert states[0] == states[1] != Survival().start()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_greedy_text_is_plain_with_penalties_and_ends(runtime: str, tmp_path: Path) -> None:
    rows = RUNTIMES[runtime](build("qwen2"))
    prompts = [[*text, *text, *text] for text in texts(5, 1, 9)]
    how = Sampling(max_new_tokens=24, repetition_penalty=1.3, logit_bias={5: 1.0})

    def run(drafter: Any, controller: str) -> list[Any]:
        engine = Engine(rows, drafter)
        for prompt in prompts:
            engine.submit(Request(prompt, how, CONTROLLERS.make(controller), RULES.make("gumbel")))
        done = {e.request: e.completion for e in engine.run() if e.completion is not None}
        return [done[i] for i in sorted(done)]

    plain = run(DRAFTERS.make("none").build(None, None), "fixed(0)")
    chain = Chain(Suffix(), Eagle(saved(tmp_path)), enough=0.2).build(rows, None)
    for controller in ("fixed(4)", "auto", "svip"):
        done = run(chain, controller)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert sum(c.stats.drafted for c in done) > 20
