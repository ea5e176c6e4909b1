"""Near-ties and bugs are told apart."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from forerun.lab.audit import explain, first_difference
from forerun.runtime import RowModel
from tiny import build, texts


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [4]) == 0


def greedy(model: object, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))  # type: ignore[operator]
    return tokens[len(prompt) :]


def test_a_wrong_token_is_a_bug_wherever_it_stands() -> None:
    model = build("llama")
    prompt = texts(5)[0]
    right = greedy(model, prompt, 6)
    wrapped = SimpleNamespace(target=RowModel(model))
    for place in (0, 3, 5):
        wrong = list(right)
        wrong[place] = (right[place] + 1) % 97
        found = explain(wrapped, prompt, right, wrong)
        assert not found.near_tie
        assert found.position == place
        assert "bug" in found.message
        assert wrapped.target.lengths == []
    assert not explain(wrapped, prompt, right, right[:4]).near_tie


def test_two_tokens_of_equal_weight_are_a_near_tie() -> None:
    model = build("llama")
    prompt = texts(5)[0]
    best = greedy(model, prompt, 1)[0]
    twin = (best + 1) % 97
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[best]
    found = explain(SimpleNamespace(target=RowModel(model)), prompt, [best], [twin])
    assert found.near_tie
    assert found.margin <= found.bound < 1e-3
    # Equal to each other, but neither is the best: still a bug.
    worse = int(model(torch.tensor([prompt])).logits[0, -1].argmin())
    other = (worse + 1) % 97
    with torch.no_grad():
        head[other] = head[worse]
    assert not explain(SimpleNamespace(target=RowModel(model)), prompt, [worse], [other]).near_tie
