"""Texts in another precision: what moved, and where another token is best."""

from __future__ import annotations

import copy

import pytest
import torch

from forerun.drafters.none import NoDraft
from forerun.engine import Sampling
from forerun.errors import PromptError
from forerun.lab.precision import compare, summary
from forerun.model import Model
from forerun.runtime import torch_rows
from tiny import build, texts

HOW = Sampling(max_new_tokens=12, repetition_penalty=1.1, ignore_eos=True)


def model(noise: float) -> Model:
    made = copy.deepcopy(build("llama"))
    torch.manual_seed(1)
    with torch.no_grad():
        head = made.get_output_embeddings().weight
        head.add_(noise * torch.randn_like(head))
    return Model(torch_rows(made), NoDraft().build(None, None))


def test_the_same_weights_are_the_same_everywhere() -> None:
    figures = summary(list(compare(model(0), model(0), texts(5, 9), [HOW] * 2)))
    assert (figures["texts"], figures["positions"]) == (2, 24)
    assert figures["texts_differ"] == figures["positions_differ"] == 0
    assert figures["moved"] == {"median": 0, "p99": 0, "largest": 0}
    assert figures["gaps_where_best_differs"] is None


def test_another_token_is_best_only_where_the_logits_moved_further_than_the_gap() -> None:
    plain = Sampling(max_new_tokens=12, ignore_eos=True)
    done = list(compare(model(0), model(0.02), texts(5, 9, 7), [plain] * 3))
    places = [(text, at) for text in done for at in text.other]
    assert places
    for text, at in places:
        assert text.gaps[at] <= 2 * text.moved[at]
    for text in done:
        assert len(text.gaps) == len(text.moved) == 12
        assert text.first == (text.other[0] if text.other else None)
    assert summary(done)["gaps_where_texts_part"]["largest"] > 0


def test_no_prompts() -> None:
    with pytest.raises(PromptError, match="no prompts"):
        list(compare(model(0), model(0), []))
