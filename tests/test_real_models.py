"""SmolLM2-135M-Instruct from its GGUF file: the same text with drafts, at every width and batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun import Model
from forerun.drafters.eagle import shipped_head
from forerun.drafters.memory import fingerprint
from forerun.model import default_draft
from real import smollm2

pytest.importorskip("openvino", reason="needs the extra: pip install 'forerun[openvino]'")

from forerun.runtime.base import CHUNK
from forerun.runtime.probe import ROUNDING

PROMPTS = (
    "Write a Python function that reverses a string.",
    "List three fruits and their colours as JSON.",
    "Rewrite politely: send me the report now.",
)


@pytest.fixture(scope="module")
def model() -> Model:
    """With its default draft; loading it takes seconds, so there is one."""
    return forerun.load(smollm2(), runtime="openvino")


def chat(model: Model, text: str) -> list[int]:
    turns = [{"role": "user", "content": text}]
    return list(
        model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    )


def test_drafts_and_batches_change_no_text(model: Model) -> None:
    """Drafted by the head that ships, behind the table, for this file whatever its name."""
    assert default_draft(smollm2()) == "memory+eagle"
    folder = shipped_head(model.target.facts.identity, fingerprint(model.tokenizer))
    assert folder is not None
    assert sum(file.stat().st_size for file in Path(folder).iterdir()) < 8_000_000
    prompts = [chat(model, text) for text in PROMPTS]
    plain = [model.generate(ids, max_new_tokens=32, plain=True) for ids in prompts]
    assert "def reverse_string" in plain[0].text
    for controller in ("fixed(4)", "auto"):
        done = model.generate(prompts, max_new_tokens=32, controller=controller)
        assert [x.tokens for x in done] == [x.tokens for x in plain]
        if controller == "fixed(4)":
            assert sum(len(x.tokens) for x in done) > 1.8 * sum(len(x.rounds) for x in done)


def test_widths_and_chunks_compute_the_same(model: Model) -> None:
    """One token is as several are but for the order of sums; several are equal to the last bit."""
    ids, executor = chat(model, PROMPTS[0])[:40], model.target.executor
    passes = {}
    for width in (1, 2, 4, 5, 8, 40):
        rows = [
            executor.run([at], [ids[at : at + width]], [width])[0].numpy()
            for at in range(0, len(ids), width)
        ]
        executor.keep([], [])
        passes[width] = np.concatenate(rows)
    most = ROUNDING * np.abs(passes[2]).max()
    for logits in passes.values():
        assert np.abs(logits - passes[2]).max() <= most
    assert all((passes[width] == passes[2]).all() for width in (4, 8))


def test_a_long_prompt_behind_a_drafted_text(model: Model) -> None:
    """The head reads it in pieces, none of which goes on from the text before."""
    for text in (PROMPTS[0], "Shelf 7 holds 12 boxes of letters. " * 64):
        ids = chat(model, text)
        drafted = model.generate(ids, max_new_tokens=8, controller="fixed(4)")
        assert drafted.tokens == model.generate(ids, max_new_tokens=8, plain=True).tokens
    assert len(ids) > CHUNK
