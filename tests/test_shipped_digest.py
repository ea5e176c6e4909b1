"""The shipped digest (synthetic): it finds and condenses, and speculation leaves it as it is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import forerun
from benchmarks.peers import hugging_face as hf
from benchmarks.rouge import rouge
from benchmarks.translator import METHODS, Item, extracts, loaded, read_set
from forerun import zoo
from forerun.lab.audit import explain, first_difference
from forerun.model import default_draft
from marks import spread

ITEMS = zoo.sources(family="digest")


@cache
def model(draft: str) -> forerun.Model:
    return forerun.load("digest", draft, device="cpu", runtime="torch")


@cache
def plain() -> list[Any]:
    return model("none").generate([p.prompt for p in ITEMS[:60]], plain=True, batch_size=20)


@cache
def theirs() -> list[list[int]]:
    """What transformers' own `generate` writes."""
    alone = model("none")
    prompts = [alone.encode(p.prompt) for p in ITEMS[:60]]
    return list(hf.beside(hf.Plain, alone).generate(prompts, 64))


def test_it_sums_up() -> None:
    """Twice what the first sentences score; most lines are right."""
    summaries, right = [c.text for c in plain()], [p.answer for p in ITEMS[:60]]
    items = [Item(p.prompt, (p.answer,)) for p in ITEMS[:60]]
    assert rouge(right, summaries)[0] > 90 > 2 * extracts(items)["lead-3"][0]
    assert sum(a == b for a, b in zip(right, summaries, strict=True)) > 48


@pytest.mark.parametrize(
    ("draft", "spec"), spread(2, ["block", "lookup"], ["fixed(4)", "cm-asd(two_pass=true)", "auto"])
)
def test_speculation_is_plain_decoding_is_generate(draft: str, spec: str) -> None:
    texts = [p.prompt for p in ITEMS[:60]]
    made = model(draft).generate(texts, controller=spec, batch_size=12)
    if spec == "fixed(4)":
        assert sum(c.stats.accepted for c in made) > 0
    alone = model("none")
    ties = 0
    for text, ours, one, other in zip(texts, made, plain(), theirs(), strict=True):
        for wanted in (one.tokens, other):
            if first_difference(wanted, ours.tokens) is not None:
                why = explain(alone, alone.encode(text), wanted, ours.tokens, rows=12)
                assert why.near_tie, why.message
                ties += 1
    assert ties <= 1


def test_its_draft_comes_with_it() -> None:
    assert default_draft("digest") == "block"
    assert default_draft("./digest") == "memory"
    assert zoo.is_shipped("digest")
    assert forerun.load("digest", device="cpu").target.facts.precision == "float32"


def test_its_benchmark_runs_without_data() -> None:
    engine = loaded("digest")
    names = engine.methods(16)
    assert "transformers, assisted" not in names
    assert not any(how and how[0] == "shared" for how in map(METHODS.get, names))
    items = read_set(None, "digest")
    assert len(items) == 250
    for name in ("beam 5", "CM-ASD, prose", "lookup: auto, standard"):
        assert len(engine.run(items[:2], name).texts) == 2
    with pytest.raises(ValueError, match="needs --data"):
        read_set(None, "texts")
