"""What the memory and the head of SmolLM2 were made by, at tiny sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.smollm2 import head as heads
from recipes.smollm2.head import Head, batches
from recipes.smollm2.prompts import functions, record
from recipes.smollm2.teacher import HIDDEN, VOCAB, Text

TOKENS = torch.arange(0, 600, 3)


@pytest.fixture(scope="module")
def head() -> Head:
    torch.manual_seed(0)
    teacher: Any = SimpleNamespace(table=torch.randn(VOCAB, HIDDEN), norm=torch.ones(HIDDEN))
    return Head(TOKENS, 64, 96, teacher)


def drafted(head: Head, ids: torch.Tensor, states: torch.Tensor, at: int, steps: int) -> list[Any]:
    """The slow way: a text up to token `at` with true states, then step by step with its own."""
    outputs = []
    fused = head.layers["fuse"](torch.cat([heads._rms(s) for s in states.split(HIDDEN, -1)], -1))
    before = F.pad(fused, (0, 0, 1, 0))[: at + 1]
    for step in range(steps):
        text = ids[: at + 1 + step]
        x = torch.cat([heads._rms(F.embedding(text, head.embedding)), heads._rms(before)], -1)
        x = head.layers["input"](x)[None]
        q, k, v = head._heads(x)
        x = head._rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        outputs.append(heads._rms(x[0, -1]) * head.norms["norm"])
        before = torch.cat([before, x[0, -1:]])
    return outputs


def test_all_positions_at_once_are_the_rounds_step_by_step(head: Head) -> None:
    ids, states = torch.randint(0, 200, (1, 9)), torch.randn(1, 9, 3 * HIDDEN)
    with torch.no_grad():
        together = head(ids, states, 4)
        for at in (0, 3, 5):
            for step, output in enumerate(drafted(head, ids[0], states[0], at, 4)):
                torch.testing.assert_close(
                    together[step][0, at + step], output, atol=1e-5, rtol=1e-4
                )


def test_a_saved_head_is_halves_and_its_facts(head: Head, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    head.save(tmp_path, {"tokens": 7})
    weights = load_file(tmp_path / "draft.safetensors")
    assert weights["embedding.weight"].shape == (len(TOKENS) + 1, 64)
    assert weights["tokens"].tolist() == TOKENS.tolist()
    assert '"kind": "eagle"' in (tmp_path / "draft.json").read_text()


def test_batches_hold_every_text_and_no_more_than_fits() -> None:
    texts = [Text(np.zeros(n, np.uint16), 2) for n in range(5, 300)]
    made, seen = batches(texts, np.random.default_rng(0)), 0
    while seen < len(texts):
        batch = next(made)
        seen += len(batch)
        assert len(batch) == 1 or len(batch) * max(len(t.ids) for t in batch) <= heads.TOKENS
    assert seen == len(texts)


def test_prompts_come_from_their_material() -> None:
    import random

    assert record(random.Random(1)) == record(random.Random(1)) != record(random.Random(2))
    assert all("def " in code and len(code) < 600 for code in functions(5, random.Random(0)))
