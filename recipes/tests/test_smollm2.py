"""What the memory and the heads of SmolLM2 were made by, at tiny sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.runtime.eagle import load_eagle
from forerun.training.eagle import begun
from recipes.smollm2 import head as heads
from recipes.smollm2 import teacher as teachers
from recipes.smollm2.head import EDGES, Fit, Shelf, batches, run, shelves
from recipes.smollm2.prompts import MATERIAL, Sources, functions, held_out, prompts, record
from recipes.smollm2.teacher import HIDDEN, Prompt, Step, Teacher, Text

LAYERS, VOCAB, CPU = 3, 200, torch.device("cpu")


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> Teacher:
    """Of few layers, at random."""
    for module in (teachers, heads):
        monkeypatch.setattr(module, "DEPTHS", (1, 2, 3))
        monkeypatch.setattr(module, "VOCAB", VOCAB)
    monkeypatch.setattr(teachers, "LAYERS", LAYERS)
    monkeypatch.setattr(teachers, "MOST", 6)
    torch.manual_seed(0)
    sizes = {
        "attn_q": (576, 576), "attn_k": (192, 576), "attn_v": (192, 576), "attn_output": (576, 576),
        "ffn_gate": (1536, 576), "ffn_up": (1536, 576), "ffn_down": (576, 1536),
    }  # fmt: skip
    weights = {
        "token_embd.weight": torch.randn(VOCAB, HIDDEN) * 0.1,
        "output_norm.weight": torch.ones(HIDDEN),
    }
    for i in range(LAYERS):
        for name, size in sizes.items():
            weights[f"blk.{i}.{name}.weight"] = torch.randn(size) * size[1] ** -0.5
        for name in ("attn_norm", "ffn_norm"):
            weights[f"blk.{i}.{name}.weight"] = torch.ones(HIDDEN)
    return Teacher(weights, CPU, rows=3)


def texts(count: int, seed: int = 0) -> list[Text]:
    rng = np.random.default_rng(seed)
    drawn = [np.tile(rng.integers(3, 40, 3), 8) for _ in range(count)]
    return [
        Text(ids[: 12 + i % 8].astype(np.uint16), 4, "ab"[i % 2]) for i, ids in enumerate(drawn)
    ]


def test_answers_are_what_whole_passes_say(teacher: Teacher) -> None:
    asked = [Prompt(np.arange(3, 3 + n, dtype=np.uint16), "a") for n in (5, 9)]
    written = list(teacher.answers(asked, Step(teacher, 20), sampled=False))
    assert [len(text.ids) - text.prompt for text in written] == [6, 6]
    for text in written:
        states = teacher.states(torch.tensor(text.ids[None].astype(int)))[0, :, -HIDDEN:]
        said = teacher.logits(states).argmax(-1)[text.prompt - 1 : -1]
        assert said.tolist() == text.ids[text.prompt :].tolist()
    sampled = list(teacher.answers(asked, Step(teacher, 20), sampled=True))
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in zip(sampled, written, strict=True))


def test_heads_learn_and_are_saved(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "EDGES", (24,))
    own, tokens = texts(40), torch.arange(2, 50)
    fit = Fit(
        {"eagle": begun(teacher, 64, tokens, 3)}, teacher, tokens, shelves(own, CPU), 96, False
    )
    rows = torch.arange(4)
    fit(24, rows, 0.0)
    before = float(fit.loss)
    steps: Any = iter([1.0] * 6)  # what is left of the time
    run(fit, own[:8], lambda: next(steps, 0.0), tmp_path, {})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines] == [0, 5]
    assert set(lines[1]["tokens_a_round"]) == {"a", "b", "all"}
    fit(24, rows, 0.0)
    assert float(fit.loss) < 0.99 * before
    kept, _ = load_eagle(tmp_path / "eagle", HIDDEN, None, VOCAB)
    for name, weight in kept.named_parameters():
        torch.testing.assert_close(
            weight, fit.heads["eagle"].get_parameter(name), atol=0.05, rtol=0
        )


def test_batches_hold_every_text_once_before_any_twice() -> None:
    shelved = {96: Shelf(texts(30), 96, CPU), 192: Shelf(texts(9), 192, CPU)}
    made, seen = batches(shelved, 576, np.random.default_rng(0)), {96: [], 192: []}
    while len(seen[96]) < 30 or len(seen[192]) < 9:
        edge, rows = next(made)
        assert len(rows) == 576 // edge
        seen[edge] += rows.tolist()
    assert sorted(seen[96][:30]) == list(range(30))
    assert sorted(seen[192][:9]) == list(range(9))
    assert all(23_040 % edge == 0 for edge in EDGES)


def test_prompts_come_from_their_material() -> None:
    assert record(random.Random(1)) == record(random.Random(1)) != record(random.Random(2))
    assert all("def " in code and len(code) < 600 for code in functions(5, random.Random(0)))
    given = Sources(
        ["def f(): pass"], ["A passage."], ["1 + 1?"], ["Hello.", "Good night.", "Thanks.", "Yes."]
    )
    made = list(prompts(400, given))
    assert len(made) > 200
    assert {prompt["kind"] for prompt in made} == set(MATERIAL["kinds"])
    assert not {prompt["prompt"] for prompt in made} & {prompt for _, prompt in held_out()}
