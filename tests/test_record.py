"""Recording: against a recorder that drafts every run by itself, and against probability."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import forerun
from forerun import zoo
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Sampling
from forerun.engine.sampling import Sampler
from forerun.errors import PromptError, SettingError
from forerun.lab.traces import record as lab
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.trace import JUDGED, SIGNALS
from forerun.runtime.base import Facts
from forerun.signals import measure
from forerun.testing import ScriptedModel
from marks import slow_but

DEPTH = 7


@pytest.fixture(scope="module")
def model():
    return forerun.load(device="cpu")


def tasks(model, families, count=1, **sampling):
    return [
        Task(family, p.id, model.encode(p.prompt), Sampling(seed=i, **sampling))
        for family in families
        for i, p in enumerate(zoo.prompts(family, "val", limit=count))
    ]


def naive(model, task, tokens, depth):
    """Draft every run on its own, a token at a time, with the drafter the engine uses."""
    drafter, how = model.drafter, task.sampling
    sampler = Sampler([how], [model.eos])
    for p in range(len(tokens)):
        known = [*task.tokens, *tokens[:p]]
        text = SimpleNamespace(context=known, prompt=len(task.tokens))
        drafter.join([known], depth)
        run, signals = [], []
        for step in range(depth):
            logits = drafter.step([[*known, *run]], None).logits
            logits = sampler.shape(logits[:, None], [text], [run], step)[:, 0]
            token = logits.argmax(-1)
            signals.append(measure(logits, token, set(SIGNALS)))
            run.append(int(token))
        drafter.keep([])
        yield p, run, signals


@pytest.mark.parametrize("penalty", [pytest.param(1.0, marks=pytest.mark.slow), 1.2])
def test_greedy_equals_drafting_every_run_by_itself(model, penalty):
    work = tasks(model, ("stories", "chat"), max_new_tokens=16, repetition_penalty=penalty)
    trace = record(model, work, depth=DEPTH, batch_size=2)
    eos = set(model.eos)
    assert trace.sizes.min() < trace.sizes.max()  # a ragged batch
    for row, task in enumerate(work):
        size = trace.sizes[row]
        tokens = trace.tokens[row, :size].tolist()
        plain = model.generate(task.tokens, plain=True, sampling=task.sampling)
        assert tokens == plain.tokens
        for p, run, signals in naive(model, task, tokens, DEPTH):
            assert trace.draft_tokens[row, p].tolist() == run
            keeps = [a == b for a, b in zip(run, tokens[p:], strict=False)]
            matches = keeps.index(False) if False in keeps else len(keeps)
            assert trace.matches[row, p] == matches
            assert trace.accept_prob[row, p].tolist() == [1.0] * matches + [0.0] * (DEPTH - matches)
            over = [t in eos for t in run]
            assert trace.ends[row, p] == (over.index(True) + 1 if any(over) else DEPTH + 1)
            for name in SIGNALS:
                live = [float(s[name]) for s in signals]
                np.testing.assert_allclose(trace.signals[name][row, p], live, rtol=1e-3, atol=1e-5)


VOCAB = 5
SAMPLED = [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)]


def tables(seed=0, vocab=(VOCAB, VOCAB)):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(VOCAB, v, generator=make, dtype=torch.float64) * 1.2 for v in vocab]


def scripted(limits=(1 << 20, 1 << 20), vocab=(VOCAB, VOCAB)):
    """A model whose next token depends on the last alone, target and draft."""
    target, draft = tables(vocab=vocab)
    rows = ScriptedModel(target, limits[0])
    return forerun.Model(rows, ModelDrafter(ScriptedModel(draft, limits[1]), rows.vocab_size))


def chances(sampling):
    """`(V, V)` processed distributions after each token, of target and draft."""
    texts = [SimpleNamespace(context=[0], prompt=1)]
    return [
        Sampler([sampling], [frozenset()]).process(t[None], texts, [[]])[0].softmax(-1).numpy()
        for t in tables()
    ]


def sampled(sampling, prompts=100, tokens=20, rule="standard", **settings):
    model = scripted()
    work = [
        Task("any", str(i), [1, i % VOCAB], replace(sampling, seed=i, max_new_tokens=tokens))
        for i in range(prompts)
    ]
    return record(model, work, rule=rule, **{"depth": 6, **settings})


def too_far(counts, expected):
    """Pearson's statistic beyond what 1 in 10⁶ reach (Wilson–Hilferty); rows of counts."""
    possible = expected > 0
    assert not counts[~possible].any()
    value = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - len(counts)
    return value > freedom * (1 - 2 / (9 * freedom) + 4.76 * (2 / (9 * freedom)) ** 0.5) ** 3


def before(trace, row=slice(None)):
    """`(prompts, T)` the token each position follows."""
    first = np.array([int(i) % VOCAB for i in trace.ids])[:, None]
    return np.concatenate([first, trace.tokens[:, :-1]], axis=1)[row]


@pytest.mark.parametrize("sampling", slow_but(SAMPLED, SAMPLED[1].__eq__))
def test_sampled_runs_are_those_of_the_live_engine(sampling):
    """Hits, drafted tokens, texts and tails; each check errs once in 10⁶ seeds (this is one)."""
    target, draft = chances(sampling)
    trace = sampled(sampling, prompts=250)
    state, drafted, hit = before(trace), trace.draft_tokens[..., 0], trace.matches > 0

    share = np.minimum(target, draft).sum(-1)[state]
    assert abs(hit.sum() - share.sum()) < 4.9 * np.sqrt((share * (1 - share)).sum())

    seen = np.bincount(state.ravel(), minlength=VOCAB)[:, None]
    for values, chance in ((drafted, draft), (trace.tokens, target)):
        counts = np.zeros((VOCAB, VOCAB))
        np.add.at(counts, (state, values), 1)
        assert not too_far(counts, seen * chance)

    # Tails follow the draft alone; every one is looked at once, where it begins.
    tails = trace.draft_tokens[~hit]
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (tails[:, :-1], tails[:, 1:]), 1)
    assert not too_far(counts, counts.sum(-1, keepdims=True) * draft)

    np.testing.assert_array_equal(hit, drafted == trace.tokens)
    ratio = np.minimum(1, target[state, drafted] / draft[state, drafted])
    np.testing.assert_allclose(trace.accept_prob[..., 0], ratio, rtol=1e-6)


@pytest.mark.parametrize("rule", ["standard", "gumbel"])
@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLED])
def test_runs_that_meet_say_the_same(sampling, rule):
    trace = sampled(sampling, prompts=20, rule=rule)
    on = trace.matches[:, :-1] > 0
    assert 0.2 < on.mean() < 0.95
    for values in (trace.draft_tokens, *trace.signals.values(), *trace.judged.values()):
        np.testing.assert_array_equal(values[:, :-1][on][:, 1:], values[:, 1:][on][:, :-1])
    shifted = np.minimum(trace.matches[:, 1:] + 1, trace.depth)
    np.testing.assert_array_equal(trace.matches[:, :-1][on], shifted[on])
    miss = trace.matches[..., None] < np.arange(trace.depth)
    assert not trace.accept_prob[miss].any()
    kept = np.arange(trace.depth) < trace.matches[..., None]
    place = np.minimum(np.arange(20)[:, None] + np.arange(trace.depth), 19)
    np.testing.assert_array_equal(trace.draft_tokens[kept], trace.tokens[:, place][kept])
    # The text ends after 20 tokens, and nothing drafted beyond is kept.
    assert (trace.matches <= 20 - np.arange(20)).all()


@pytest.mark.parametrize("rule", ["standard", "gumbel"])
def test_a_text_does_not_depend_on_who_is_recorded_with_it(monkeypatch, rule):
    together = sampled(SAMPLED[0], prompts=7, rule=rule)
    monkeypatch.setattr(lab, "ELEMENTS", 2 * VOCAB)  # two positions at once
    monkeypatch.setattr(lab, "TAILS", 3)
    alone = sampled(SAMPLED[0], prompts=7, rule=rule, batch_size=1)
    for name in ("tokens", "draft_tokens", "matches", "accept_prob"):
        np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))
    for name in SIGNALS:
        np.testing.assert_array_equal(together.signals[name], alone.signals[name])
    for name in JUDGED:
        np.testing.assert_array_equal(together.judged[name], alone.judged[name])


@pytest.mark.parametrize("rule", ["standard", "gumbel"])
def test_greedy_and_sampled_prompts_in_one_batch(rule):
    model = scripted()
    hows = [Sampling(max_new_tokens=9), Sampling(max_new_tokens=9, temperature=1.0, seed=3)]
    work = [Task("any", str(i), [2, 3], how) for i, how in enumerate(hows)]
    both = record(model, work, depth=4, rule=rule)
    for row, task in enumerate(work):
        one = record(model, [task], depth=4, rule=rule)
        np.testing.assert_array_equal(both.draft_tokens[row], one.draft_tokens[0])
        np.testing.assert_array_equal(both.accept_prob[row], one.accept_prob[0])


@pytest.mark.parametrize("width", [3, 8])
def test_a_draft_of_another_vocabulary_says_what_both_know(width):
    trace = record(
        scripted(vocab=(VOCAB, width)),
        [Task("any", "0", [1, 2], Sampling(max_new_tokens=12, temperature=1.0, seed=1))]
    )  # fmt: skip
    assert trace.draft_tokens.max() < min(VOCAB, width)


def test_texts_that_fill_the_context():
    work = [Task("any", "0", [1, 2, 3], Sampling(max_new_tokens=20))]
    trace = record(scripted((10, 10)), work, depth=6)
    assert (trace.sizes[0], trace.budgets[0]) == (7, 7)
    drafted = trace.signals["top1"][0] > 0
    # After p tokens the draft's context has room for 7 - p more, and one is said of the last.
    assert [int(row.sum()) for row in drafted] == [6, 6, 6, 5, 4, 3, 2]
    np.testing.assert_array_equal(
        trace.draft_tokens[0][drafted],
        record(scripted(), [replace_budget(work[0], 7)], depth=6).draft_tokens[0][drafted],
    )
    with pytest.raises(PromptError, match=r"draft's context holds 9; lower max_new_tokens"):
        record(scripted((10, 9)), work)


def replace_budget(task, tokens):
    return replace(task, sampling=replace(task.sampling, max_new_tokens=tokens))


@pytest.mark.parametrize("rule", ["standard", "gumbel"])
@pytest.mark.parametrize("sampling", [Sampling(), *SAMPLED])
def test_what_both_models_say_on_and_off_the_text(sampling, rule):
    """Of every drafted token, against the tables that they are made of."""
    trace = sampled(sampling, prompts=4, rule=rule)
    target, draft = chances(sampling)
    raw = tables()[0].softmax(-1).numpy()
    drafted, inside = trace.draft_tokens, trace.valid[..., None] & np.ones(6, bool)
    state = np.concatenate([before(trace)[..., None], drafted[..., :-1]], -1)
    assert (inside & (np.arange(6) > trace.matches[..., None])).any()  # off the text, too
    if sampling.greedy:
        match = drafted == target.argmax(-1)[state]
        expected = {"ratio": match, "variation": ~match, "target_top1": np.ones(match.shape)}
    else:
        rows = np.minimum(1, target / draft.clip(1e-300))
        expected = {
            "ratio": np.take_along_axis(rows[state], drafted[..., None], -1)[..., 0],
            "variation": (1 - np.minimum(target, draft).sum(-1))[state],
            "target_top1": target.max(-1)[state],
        }
    own = np.take_along_axis(target[state], drafted[..., None], -1)
    expected["rank"] = (target[state] > own).sum(-1)
    expected["target_entropy"] = -(raw * np.log(raw)).sum(-1)[state]
    with np.errstate(divide="ignore"):
        expected["gap"] = np.log(target.max(-1)[state]) - np.log(own[..., 0])
    for name, values in expected.items():
        np.testing.assert_allclose(trace.judged[name][inside], values[inside], rtol=1e-5, atol=1e-6)
    assert (trace.judged["top5_overlap"][inside] == 1).all()  # of five tokens in all
    if rule == "standard" and not sampling.greedy:  # by coins a draft draws other than its best
        return
    first = trace.judged["target_rank"][..., 0][trace.valid]
    np.testing.assert_array_equal(first == 0, (drafted[..., 0] == trace.tokens)[trace.valid])


def test_end_of_text():
    target = torch.eye(VOCAB, dtype=torch.float64).roll(1, dims=1) * 9  # after t comes t + 1
    model = forerun.Model(ScriptedModel(target), ModelDrafter(ScriptedModel(target), VOCAB))
    trace = record(model, [Task("any", "0", [0], Sampling(max_new_tokens=9, eos=(4,)))], depth=6)
    assert trace.tokens.tolist() == [[1, 2, 3, 4]]
    assert trace.ends.tolist() == [[4, 3, 2, 1]]
    assert trace.matches.tolist() == [[4, 3, 2, 1]]  # beyond the text nothing is kept
    how = Sampling(max_new_tokens=9, eos=(4,), ignore_eos=True)
    trace = record(model, [Task("any", "0", [0], how)], depth=6)
    assert (trace.ends == 7).all()


def test_whoever_walks_away_keeps_whole_batches():
    model = scripted()
    work = [Task("any", str(i), [1, 2], Sampling(max_new_tokens=5)) for i in range(5)]
    stream = lab.parts(model, work, depth=3, batch_size=2)
    trace = next(stream)
    stream.close()
    assert trace.ids == ("0", "1")
    assert trace.about["complete"] is False
    assert model.target.lengths == model.drafter.rows.lengths == []


def test_an_interruption_leaves_the_model_usable(monkeypatch):
    model = scripted()
    work = [Task("any", "0", [1, 2], Sampling(max_new_tokens=5))]

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab, "_follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record(model, work)
    assert record(model, work).prompts == 1


def test_what_is_written_at_an_interrupt_is_the_last_part(monkeypatch):
    model, counts = scripted(), []
    work = [Task("any", str(i), [1, 2], Sampling(max_new_tokens=5)) for i in range(5)]
    real = lab._draft_texts

    def interrupted(*args):
        counts.append(len(args[2]))
        if len(counts) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(lab, "_draft_texts", interrupted)
    kept = []
    made = lab.parts(model, work, depth=3, batch_size=2, interrupted=kept.append)
    assert [next(made).ids, next(made).ids] == [("0", "1"), ("0", "1", "2", "3")]
    assert (counts, kept) == ([2, 2, 2], [2])
    with pytest.raises(KeyboardInterrupt):
        next(made)


def test_errors():
    work = [Task("any", "0", [1, 2], Sampling(max_new_tokens=5))]
    model = scripted()
    with pytest.raises(SettingError, match="depth must be a whole number"):
        record(model, work, depth=0)
    with pytest.raises(SettingError, match="batch size must be"):
        record(model, work, batch_size=0)
    with pytest.raises(PromptError, match="no prompts"):
        record(model, [])
    with pytest.raises(SettingError, match=r"draft must be somebody who drafts"):
        record(forerun.Model(model.target, NullDrafter()), work)


def test_provenance(model):
    work = tasks(model, ("stories", "chat"), 2, max_new_tokens=3)
    work[0] = replace(work[0], sampling=replace(work[0].sampling, repetition_penalty=1.2))
    work[1] = replace(work[1], sampling=replace(work[1].sampling, repetition_penalty=1.2))
    about = record(model, work, depth=2).about
    assert about["target"]["name"] == about["draft"]["name"] == "shipped"
    assert about["target"]["hashed"] == "weights"
    assert len({about[m]["sha256"] for m in ("target", "draft")}) == 2
    assert about["sampling"] == {
        "repetition_penalty": {"stories": 1.2, "chat": 1.0}, "seed": "0 … 1", "max_new_tokens": 3,
    }  # fmt: skip
    assert about["complete"] is True
    assert about["seconds"]["ratio"] >= 1
    assert {"forerun", "torch", "transformers", "python"} <= about["versions"].keys()
    assert str(zoo.TARGET) not in json.dumps(about)


def test_identity(tmp_path, monkeypatch):
    from forerun.lab import provenance

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(name.encode())
    runtime = SimpleNamespace(facts=Facts(1, 1, name=str(folder)))
    identity = provenance.identity(runtime)
    assert (identity["name"], identity["hashed"]) == ("mine", "weights")
    (folder / "b.safetensors").write_bytes(b"c")
    assert provenance.identity(runtime)["sha256"] != identity["sha256"]
    monkeypatch.setattr(provenance, "HASHED", 1)
    identity = provenance.identity(runtime)
    assert identity["hashed"] == "config and first shard"
    (folder / "b.safetensors").write_bytes(b"d")
    assert provenance.identity(runtime) == identity
    assert provenance.identity(SimpleNamespace(facts=Facts(1, 1))) == {
        "name": "unnamed",
        "sha256": None,
        "hashed": None,
    }
