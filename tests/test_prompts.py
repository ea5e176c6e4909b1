"""Prompts as people hold them, and what is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from forerun.drafters.model import ModelDrafter
from forerun.errors import GenerationError, PromptError, SettingError
from forerun.model import Model
from forerun.testing import ScriptedModel

V = 7
NEXT = torch.eye(V).roll(1, dims=1) * 9.0  # after t comes t + 1 (mod V)


class Letters:
    """A tokenizer of the letters a, b, c, …"""

    eos_token_id = None
    all_special_ids: Sequence[int] = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [(ord(letter) - ord("a")) % V for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture
def model() -> Model:
    return Model(ScriptedModel(NEXT), ModelDrafter(ScriptedModel(NEXT), V), Letters())


@pytest.mark.parametrize(
    "prompt",
    [
        "bc", [1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], dtype=np.uint8),
        torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), [np.int64(1), 2],
        [np.int32(1), np.uint8(2)], np.str_("bc"),
    ],
    ids=repr,
)  # fmt: skip
def test_one_prompt(prompt: Any, model: Model) -> None:
    how = {"max_new_tokens": 3, "controller": "fixed(2)"}
    assert model.generate(prompt, **how).tokens == [3, 4, 5]
    assert model.generate(prompt, **how).text == "def"
    (only,) = model.generate([prompt], **how)
    assert only.tokens == [3, 4, 5]
    assert model.encode(prompt) == [1, 2]
    assert all(type(i) is int for i in model.encode(prompt))
    assert {e.request for e in model.stream(prompt, **how)} == {0}


def test_prompts_of_every_kind_share_a_list(model: Model) -> None:
    prompts = ["bc", [1], np.array([4, 5]), torch.tensor([6])]
    done = model.generate(prompts, max_new_tokens=1)
    assert [c.tokens for c in done] == [[3], [2], [6], [0]]
    assert model.generate([], max_new_tokens=1) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, r"got None \(NoneType\)"),
        (7, r"got 7 \(int\)"),
        (1.5, r"got 1\.5 \(float\)"),
        (np.float64(1.5), r"got .*1\.5\)? \(float64\)"),
        (True, r"got True \(bool\)"),
        (b"bc", r"got b'bc' \(bytes\)"),
        ((c for c in "bc"), r"got <generator .*> \(generator\)"),
        ({"prompt": "bc"}, r"\(dict\)"),
        ({1, 2}, r"\(set\)"),
        ([None], r"prompt 0 must be text, token ids or messages; got None \(NoneType\)"),
        ([1, 2.0], r"this one has token ids and, at place 1, 2\.0 \(float\)"),
        ([1, True], r"at place 1, True \(bool\)"),
        ([True, False], r"prompt 0 must be text, token ids or messages; got True \(bool\)"),
        (["bc", 3], r"at place 0, 'bc' \(str\)"),
        (["bc", b"d"], r"prompt 1 must be .* got b'd' \(bytes\)"),
        ([[1, "x"]], r"prompt 0 has 'x' \(str\) at place 1"),
        ([[[1]]], r"prompt 0 has \[1\] \(list\) at place 0"),
        (np.array([1.0, 2.0]), r"a prompt has 1\.0 \(float\) at place 0"),
        (np.array([True]), r"a prompt has True \(bool\) at place 0"),
        (torch.tensor([0.5]), r"a prompt has 0\.5 \(float\)"),
        (torch.tensor(3), r"1-D array of token ids; got the shape \(\)"),
        (np.zeros((2, 3), dtype=int), r"got the shape \(2, 3\): give a list with an array per"),
        ([torch.zeros((1, 3), dtype=torch.long)], r"prompt 0 must be a 1-D .*\(1, 3\)"),
        ("b\ud800c", r"half a character \(a lone surrogate\) at place 1: '\\ud800'"),
        (["b", "\udfff"], "prompt 1 holds half a character"),
        ("", "the prompt is empty"),
        (np.array([], dtype=int), "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([V], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([10**30], "outside the vocabulary"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_what_is_no_prompt(prompt: Any, message: str, model: Model) -> None:
    with pytest.raises(PromptError, match=message):
        model.generate(prompt)
    with pytest.raises(PromptError, match=message):
        list(model.stream(prompt))
    assert model.target.lengths == []


def test_text_needs_a_tokenizer() -> None:
    model = Model(ScriptedModel(NEXT), ModelDrafter(ScriptedModel(NEXT), V))
    with pytest.raises(SettingError, match="has no tokenizer"):
        model.generate("bc")


def test_one_prompt_without_numbers_raises_and_several_say_which() -> None:
    table = NEXT.clone()
    table[4] = torch.nan
    model = Model(ScriptedModel(table), ModelDrafter(ScriptedModel(NEXT), V))
    with pytest.raises(GenerationError, match="after 3 new tokens the target's logits are no num"):
        model.generate([1])
    done = model.generate([[1], [5]], max_new_tokens=4)
    assert [c.finish_reason for c in done] == ["error", "length"]
    assert [c.tokens for c in done] == [[2, 3, 4], [6, 0, 1, 2]]
    assert "no numbers" in done[0].error
    assert model.target.lengths == []
