"""What forbids, demands or ends text, under speculation as plainly, and as sampled."""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import forerun
from forerun import zoo
from forerun.engine.constraint import bans
from forerun.engine.sampling import Sampler
from forerun.errors import ForerunWarning, SettingError
from forerun.requests import Sampling
from forerun.testing import ScriptedModel, engine
from marks import slow_but
from test_constraint import chaotic, near

PROMPT = "Once upon a time"
V, EOS = 6, 5


DRAFTERS = ["", "lookup", "suffix", "memory", "lookahead", "specbound", "adadecode"]
DEMANDS: list[dict[str, Any]] = [
    {"bad_words": ["a"]},
    {"bad_words": [" who had", "ing", " the", "\n"], "temperature": 0.8, "seed": 3},
    {"allowed_tokens": [*range(3, 300)]},
    {"allowed_tokens": [*range(3, 300)], "bad_words": ["e"], "temperature": 1.2, "seed": 1},
    {"min_new_tokens": 28, "stop": [" there", "e"]},
    {"min_new_tokens": 12, "stop": "<|endoftext|>", "eos": [13, 3, 258]},
    {"stop": "<|endoftext|>", "ignore_eos": True, "logit_bias": {0: 12.0}},
]


@pytest.fixture(scope="module")
def model(request) -> forerun.Model:
    return forerun.load(draft=request.param or None, runtime="torch")


@pytest.mark.parametrize(
    ("model", "how"),
    slow_but(
        itertools.product(DRAFTERS, DEMANDS),
        lambda drafter, how: how.get("seed") == 3 and drafter in DRAFTERS[::3],
    ),
    indirect=["model"],
    ids=str,
)
def test_equals_plain_decoding_for_every_drafter(model, how):
    how = {"max_new_tokens": 30, **how}
    prompts = [PROMPT, "English: Hello.\nGerman:"]
    plain = model.generate(prompts, plain=True, **how)
    for controller in ("fixed(5)", "auto"):
        done = model.generate(prompts, controller=controller, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        assert [(c.text, c.ended_by) for c in done] == [(c.text, c.ended_by) for c in plain]
    for one in plain:
        assert not any(word in one.text for word in how.get("bad_words", ()))
        assert set(one.tokens) <= set(how.get("allowed_tokens", one.tokens))
        assert len(one.tokens) >= how.get("min_new_tokens", 0)


@pytest.fixture(scope="module")
def pair() -> forerun.Model:
    return forerun.load(runtime="torch")


def test_a_stop_string_that_is_a_special_token_is_that_token(pair):
    done = pair.generate(
        "English: Hello.\nGerman:", max_new_tokens=30, stop="<|endoftext|>", ignore_eos=True
    )
    assert (done.finish_reason, done.ended_by) == ("stop", "<|endoftext|>")
    assert done.tokens[-1] == 0
    with pytest.raises(SettingError, match="holds the special token"):
        pair.generate(PROMPT, stop="<|endoftext|>\n")


def test_the_minimum_holds_off_every_end(pair):
    free = pair.generate(PROMPT, max_new_tokens=30, plain=True)
    for how in (
        {"stop": free.text[20:24]},
        {"stop": free.text[0:3]},
        {"eos": free.tokens[4]},
        {"stop": "<|endoftext|>", "ignore_eos": True, "logit_bias": {0: 8.0}},
    ):
        done = pair.generate(PROMPT, max_new_tokens=30, min_new_tokens=28, **how)
        assert len(done.tokens) >= 28
        if "bias" not in str(how) and "eos" not in how:
            assert done.text == free.text[: len(done.text)]  # nor is it cut out


def test_the_row_says_what_ended_it(pair):
    free = pair.generate(PROMPT, max_new_tokens=12, plain=True)
    assert free.ended_by is None
    assert free.to_json()["ended_by"] is None
    stop = free.text[5:9]
    assert pair.generate(PROMPT, max_new_tokens=12, stop=["zzz", stop]).ended_by == stop
    assert pair.generate(PROMPT, max_new_tokens=12, eos=free.tokens[3]).ended_by == free.tokens[3]


def test_both_ends_of_text_count_and_a_line_says_so(pair, tmp_path):
    for file in Path(zoo.locate(None)).iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / file.name)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 500}')
    with pytest.warns(ForerunWarning, match=re.escape("'<|endoftext|>'")):
        model = forerun.load(tmp_path, draft="none", runtime="torch")
    assert model.eos == {0, 500}
    done = model.generate("English: Hello.\nGerman:", max_new_tokens=24)
    assert (done.finish_reason, done.ended_by) == ("eos", 0)


@pytest.mark.parametrize("field", ["logit_bias", "eos", "allowed_tokens"])
def test_ids_outside_the_vocabulary_are_refused_by_name(pair, field):
    value: Any = {99999: 1.0} if field == "logit_bias" else [99999]
    with pytest.raises(SettingError, match=f"99999 in {field} is outside"):
        pair.generate(PROMPT, **{field: value})


def letters() -> PreTrainedTokenizerFast:
    """Tokens a, b, c, ab and bc; the last id ends a text."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


LETTERS = letters()
WRITTEN = ["a", "b", "c", "ab", "bc", ""]


def exact(how: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The distribution of texts without the bad words, by enumeration of all of them."""
    sampling = Sampling(**{**how, "bad_words": ()})
    sampler = Sampler([sampling], [frozenset([EOS])])
    out: dict[tuple[int, ...], float] = {}

    def walk(tokens: tuple[int, ...], prob: float) -> None:
        if len(tokens) == how["max_new_tokens"] or tokens[-1:] == (EOS,):
            out[tokens] = prob
            return
        logits = chaotic(1)((0, *tokens))[None, None].clone()
        so_far = "".join(WRITTEN[t] for t in tokens)
        for token in range(V):
            if any(w in so_far + WRITTEN[token] for w in how.get("bad_words", ())):
                logits[0, 0, token] = -torch.inf
        text: Any = SimpleNamespace(context=[0, *tokens], prompt=1)
        probs = sampler.process(logits, [text], [[]])[0, 0].softmax(-1).tolist()
        for token in range(V):
            if probs[token]:
                walk((*tokens, token), prob * probs[token])

    walk((), 1.0)
    assert sum(out.values()) == pytest.approx(1)
    return out


ALLOWED: list[dict[str, Any]] = [
    {"bad_words": ("abc", "ca")},
    {"bad_words": ("bb", "c")},
    {"allowed_tokens": (0, 1, 4)},
    {"allowed_tokens": (0, 1, 3, EOS), "bad_words": ("aba",), "min_new_tokens": 2},
]


@pytest.mark.parametrize(
    ("rule", "how"),
    slow_but(
        itertools.product(["standard", "gumbel", "block"], ALLOWED),
        lambda rule, how: (rule, how) in [("gumbel", ALLOWED[0]), ("standard", ALLOWED[-1])],
    ),
    ids=str,
)
def test_sampled_text_has_the_distribution_of_what_is_allowed(rule, how):
    """χ² over all texts that expect 5 draws, others pooled; false alarms below 1e-6 per case."""
    draws, how = 2000, {"temperature": 1.3, "max_new_tokens": 4, **how}
    run = engine(
        ScriptedModel(chaotic(1)), ScriptedModel(near), eos=[EOS], max_rows=250, tokenizer=LETTERS
    )
    done = run([[0]] * draws, controller="fixed(2)", rule=rule, **how)
    counts, probs = Counter(tuple(c.tokens) for c in done), exact(how)
    assert counts.keys() <= probs.keys()
    common = [text for text, p in probs.items() if p * draws >= 5]
    expected = np.array([probs[t] * draws for t in common] + [0.0])
    seen = np.array([counts[t] for t in common] + [0])
    expected[-1], seen[-1] = draws - expected.sum(), draws - seen.sum()
    keep = expected > 1
    square = (((seen - expected) ** 2) / np.maximum(expected, 1))[keep].sum()
    free = keep.sum() - 1
    assert square < free + 5.5 * np.sqrt(2 * free) + 20


def test_bans_exclude_just_what_completes_a_word():
    words = ("abc", "bb")
    made = bans(words, LETTERS, V)
    assert made is not None
    for output in itertools.product(range(5), repeat=3):
        draft = [1, 3]
        logits = torch.zeros(3, V)
        made.exclude(logits, output, draft)
        for i in range(3):
            text = "".join(WRITTEN[t] for t in (*output, *draft[:i]))
            for token in range(V):
                new = WRITTEN[token]
                ends = range(len(text) + 1, len(text) + len(new) + 1)
                completes = any((text + new)[:end].endswith(words) for end in ends)
                assert (logits[i, token] == -torch.inf) == completes


def test_bans_need_tokens_with_bytes():
    assert bans((), None, V) is None
    with pytest.raises(SettingError, match="bad_words need"):
        bans(("a",), None, V)
