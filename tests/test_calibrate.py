"""Calibration against computations of its own, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forerun.drafters.lookup import Lookup
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Sampling
from forerun.errors import PromptError, SettingError
from forerun.lab import calibrate
from forerun.lab.calibrate import easd, statistics, top_mean
from forerun.model import Model
from forerun.rules import RULES
from forerun.runtime import torch_rows
from forerun.testing import ScriptedModel
from tiny import LIMIT, build, texts


@pytest.mark.parametrize(
    ("share", "count"), [(0.05, 1), (0.1, 1), (0.11, 2), (0.25, 3), (0.3, 3), (0.31, 4), (1, 10)]
)
def test_the_top_share_is_rounded_up(share, count):
    values = [3.0, 9.0, 1.0, 7.0, 5.0, 0.0, 8.0, 2.0, 6.0, 4.0]
    top = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0][:count]
    assert top_mean(values, share) == (sum(top) / count, count)


def test_the_share_counts_as_written():
    # As floats 0.07 · 100 = 7.000000000000001 and 0.05 · 60 = 3.0.
    assert top_mean([0.0] * 100, 0.07)[1] == 7
    assert top_mean([0.0] * 60, 0.05)[1] == 3
    assert top_mean([0.0] * 61, 0.05)[1] == 4
    assert top_mean([2.5], 0.001) == (2.5, 1)


def test_statistics_of_entropies():
    values = np.random.default_rng(4).gamma(1, size=37)
    entropies = statistics(torch.tensor(values))
    assert (entropies["steps"], entropies["max"]) == (37, values.max())
    assert entropies["mean"] == pytest.approx(values.mean(), abs=1e-12)
    assert entropies["q95"] == pytest.approx(np.quantile(values, 0.95), abs=1e-12)


def by_table() -> torch.Tensor:
    """Logits over 8 tokens: after `t` comes `t + 1`, with roughly rising entropy."""
    table = torch.eye(8).roll(1, dims=1)
    return table * torch.tensor([[8.0], [7.0], [6.0], [5.0], [4.0], [3.0], [2.0], [1.0]])


def entropies_of(table: torch.Tensor) -> list[float]:
    rows = np.exp(table.numpy().astype(float))
    rows /= rows.sum(-1, keepdims=True)
    return (-(rows * np.log(rows)).sum(-1)).tolist()


def scripted(draft_table: torch.Tensor | None = None, draft_limit: int = 1 << 20) -> Model:
    target = ScriptedModel(by_table())
    if draft_table is None:
        return Model(target, NullDrafter())
    return Model(target, ModelDrafter(ScriptedModel(draft_table, draft_limit), 8))


def test_the_steps_are_those_of_the_decoding():
    # From 0: the distributions after 0, 1, 2; from 5: after 5, 6, 7, 0.
    samplings = [Sampling(max_new_tokens=3), Sampling(max_new_tokens=4)]
    result = easd(scripted(by_table()), [[0], [4, 5]], sampling=samplings, share=0.3, batch_size=1)
    known = entropies_of(by_table())
    steps = [known[i] for i in (0, 1, 2, 5, 6, 7, 0)]
    highest = sorted(steps)[-3:]
    assert result["entropy"] == pytest.approx(sum(highest) / 3, abs=1e-12)
    assert (result["top"], result["prompts"], result["target"]["steps"]) == (3, 2, 7)
    assert result["target"]["mean"] == pytest.approx(sum(steps) / 7, abs=1e-12)
    assert result["target"]["median"] == pytest.approx(sorted(steps)[3], abs=1e-12)
    assert result["target"] == result["draft"], "the draft is the target"
    assert result["both"] == pytest.approx(sum(h > result["entropy"] for h in steps) / 7)


def test_both_must_exceed_the_threshold():
    sure = torch.eye(8).roll(1, dims=1) * 20
    result = easd(scripted(sure), [[5]], sampling=Sampling(max_new_tokens=4), share=1)
    assert result["both"] == 0
    assert result["draft"] is not None
    assert result["draft"]["max"] < 1e-5
    wavering = sure.clone()
    wavering[6] = 0
    result = easd(scripted(wavering), [[5]], sampling=Sampling(max_new_tokens=4), share=1)
    assert result["both"] == 0.25, "after 6 both waver, after 5 and 7 the target alone"
    assert result["draft"] is not None
    assert result["draft"]["max"] == pytest.approx(math.log(8))


def test_steps_beyond_the_drafts_context_are_left_out_of_its_figures():
    result = easd(scripted(by_table(), 3), [[0], [1, 2, 3]], sampling=Sampling(max_new_tokens=4))
    assert result["target"]["steps"] == 8
    assert result["draft"] is not None
    assert result["draft"]["steps"] == 2, "the first prompt with 1 and 2 tokens"
    with pytest.raises(PromptError, match="no prompt fits the draft"):
        easd(scripted(by_table(), 1), [[1, 2]], sampling=Sampling(max_new_tokens=2))


def test_temperature_changes_nothing():
    warm = Sampling(max_new_tokens=5, temperature=1.3, seed=2)
    cold = Sampling(max_new_tokens=5)
    model = scripted(by_table())
    assert easd(model, [[3], [6]], sampling=warm) == easd(model, [[3], [6]], sampling=cold)


def test_the_target_alone():
    expected = easd(scripted(by_table()), [[0], [5]], sampling=Sampling(max_new_tokens=6))
    for model, only in [
        (scripted(), False),
        (scripted(by_table()), True),
        (Model(ScriptedModel(by_table()), Lookup().build(None, None)), True),
    ]:
        result = easd(model, [[0], [5]], sampling=Sampling(max_new_tokens=6), target_only=only)
        assert result["entropy"] == expected["entropy"]
        assert (result["draft"], result["both"]) == (None, None)
        rule = RULES.make(result["rule"])
        assert (rule.overlap, rule.draft_entropy) == (0, False)
        assert not rule.reads_draft, "any drafter will do"


def test_the_spec_can_be_used():
    result = easd(scripted(by_table()), [[0], [5]], sampling=Sampling(max_new_tokens=6))
    rule = RULES.make(result["rule"])
    assert rule.entropy == pytest.approx(result["entropy"], abs=5e-5)
    assert (rule.overlap, rule.draft_entropy) == (0.8, True)
    assert (result["method"], result["target"]["steps"]) == ("easd", 12)


def test_progress_counts_prompts_in_two_phases():
    seen = []
    easd(
        scripted(by_table()),
        [[0], [1], [2]],
        sampling=Sampling(max_new_tokens=2),
        batch_size=2,
        progress=lambda phase, done: seen.append((phase, done)),
    )
    assert seen == [
        ("decoding", 1), ("decoding", 2), ("decoding", 3), ("reading", 2), ("reading", 3)
    ]  # fmt: skip


def test_mistakes_are_named():
    lookup = Model(ScriptedModel(by_table()), Lookup().build(None, None))
    with pytest.raises(SettingError, match=r"draft model.*target_only"):
        easd(lookup, [[1]])
    for share in (0, -0.1, 1.5, float("nan"), True, "much"):
        with pytest.raises(SettingError, match="share must be"):
            easd(scripted(), [[1]], share=share)
    with pytest.raises(PromptError, match="no prompts"):
        easd(scripted(), [])
    with pytest.raises(PromptError, match="empty"):
        easd(scripted(), [[]])


def test_an_interrupt_leaves_the_models_free():
    model = scripted(by_table())

    def stop(phase, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        easd(model, [[0], [1]], batch_size=1, progress=stop)
    assert model.target.lengths == []
    assert easd(model, [[0]], sampling=Sampling(max_new_tokens=2))["target"]["steps"] == 2


@pytest.fixture(scope="module")
def pair():
    return build("llama", 1).double(), build("llama", 2, num_hidden_layers=1).double()


def forward_entropies(hf, prompt: list[int], output: list[int]) -> list[float]:
    """One pass of the bare model over the whole text, in numpy from the logits on."""
    with torch.inference_mode():
        logits = hf(torch.tensor([[*prompt, *output]])).logits[0].numpy()
    logits = logits[len(prompt) - 1 : -1]
    logits = logits - logits.max(-1, keepdims=True)
    norm = np.log(np.exp(logits).sum(-1, keepdims=True))
    return (-(np.exp(logits - norm) * (logits - norm)).sum(-1)).tolist()


@pytest.mark.parametrize("elements", [1 << 24, 97 * 3 * 2])
def test_real_models_against_one_pass_over_the_text(pair, monkeypatch, elements):
    monkeypatch.setattr(calibrate, "ELEMENTS", elements)  # the small one: two tokens at a time
    target, draft = pair
    runtime = torch_rows(target)
    model = Model(runtime, ModelDrafter(torch_rows(draft), runtime.vocab_size))
    prompts = texts(5, 1, 9, 17)
    how = [Sampling(max_new_tokens=n) for n in (7, 12, 1, 20)]
    result = easd(model, prompts, sampling=how, share=0.2, batch_size=3)

    plain = model.generate(prompts, sampling=how, plain=True)
    of_target, of_draft = [], []
    for prompt, done in zip(prompts, plain, strict=True):
        of_target += forward_entropies(target, prompt, done.tokens)
        of_draft += forward_entropies(draft, prompt, done.tokens)
    count = math.ceil(0.2 * len(of_target))
    threshold = sum(sorted(of_target)[-count:]) / count
    assert result["top"] == count
    assert result["entropy"] == pytest.approx(threshold, abs=1e-10)
    assert result["target"]["steps"] == len(of_target)
    assert result["target"]["mean"] == pytest.approx(np.mean(of_target), abs=1e-10)
    assert result["target"]["q99"] == pytest.approx(np.quantile(of_target, 0.99), abs=1e-10)
    assert result["draft"] is not None
    assert result["draft"]["mean"] == pytest.approx(np.mean(of_draft), abs=1e-10)
    both = [a > threshold and b > threshold for a, b in zip(of_target, of_draft, strict=True)]
    assert result["both"] == pytest.approx(np.mean(both))
    assert runtime.lengths == []


def test_a_full_context(pair):
    runtime = torch_rows(pair[0])
    model = Model(runtime, ModelDrafter(torch_rows(pair[1]), runtime.vocab_size))
    [prompt] = texts(LIMIT - 4)
    result = easd(model, [prompt], sampling=Sampling(max_new_tokens=50, ignore_eos=True))
    assert result["target"]["steps"] == 4
    assert result["draft"] is not None
    assert result["draft"]["steps"] == 4
