"""The translator's recipe on a few pairs."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace

import pytest
import torch

from recipes import marian
from recipes.marian import (
    EOS,
    MarianArchitecture,
    Texts,
    TranslatorRecipe,
    recipe_for,
    recipe_of,
    train,
    train_tokenizer,
    write_pairs,
)
from recipes.runs import CHECKPOINT, Run
from sourced import TEXTS

TINY = TranslatorRecipe(
    target=MarianArchitecture(2, 32, 2, 48), vocab_size=340, step_tokens=120, warm_up=2
)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data" / "tatoeba"
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        lines = [f"{a}\t{b}" for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
        with gzip.open(folder / f"{split}.tsv.gz", "wt", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
    return tmp_path / "data"


def test_any_text_survives_the_tokenizer():
    tokenizer = train_tokenizer(TEXTS, 340)
    for text in ("the cat, 25 dogs!", "naïve 日本 — Öl", "a  b"):
        ids = tokenizer.encode(text).ids
        assert ids[-1] == EOS
        assert tokenizer.decode(ids) == text


def test_every_pair_is_in_an_epoch_once_and_texts_are_joined(data):
    texts = Texts(data, "train", train_tokenizer(TEXTS, 340), TINY)
    drawn = texts.texts(random.Random(1))
    assert sum(len(source) - 1 for source, _ in drawn) == sum(len(p[0]) - 1 for p in texts.pairs)
    assert 1 < len(drawn) < len(texts.pairs)
    for batch in texts.batches(random.Random(1)):
        longest = max(len(side) for pair in batch for side in pair)
        assert len(batch) == 1 or longest * len(batch) <= TINY.step_tokens
    first = [batch for _, batch in zip(range(9), texts.stream(0, 0), strict=False)]
    assert next(texts.stream(0, 8)) == first[8]


def test_a_run_goes_on_and_ends_in_a_model(data, tmp_path):
    import forerun

    out = tmp_path / "run"
    train(data, out, steps=2, recipe=TINY, validate_every=2)
    with pytest.raises(ValueError, match="resume it"):
        train(data, out, recipe=TINY)
    run = train(data, out, resume=True, decay=3)
    assert run.step == 5
    assert run.recipe == TINY
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5]
    assert log[1]["perplexity"] > 1
    again = Run.load(out / CHECKPOINT, read=recipe_of)
    assert (again.step, again.recipe) == (5, TINY)
    model = forerun.load(out / "target", "none", device="cpu")
    assert model.target.facts.precision == "bfloat16"
    assert model.generate("the cat", max_new_tokens=4).stats.tokens <= 4
    for name, value in run.model.state_dict().items():
        saved = model.target.executor.module().state_dict()[name]
        torch.testing.assert_close(saved.float(), value.bfloat16().float())


def test_pairs_for_drafts_are_those_of_the_training(data, tmp_path):
    count = write_pairs(data, tmp_path / "pairs.tsv", 999, seed=3)
    lines = [line.split("\t") for line in (tmp_path / "pairs.tsv").read_text().splitlines()]
    assert 1 < len(lines) == count < len(TEXTS)
    words = sorted(word for source, _ in lines for word in source.split())
    assert words == sorted(word for text in TEXTS for word in text.split())
    assert write_pairs(data, tmp_path / "few.tsv", 2) == 2


def test_digests_are_learned_by_the_same_recipe(data, tmp_path, monkeypatch):
    """From passages; a run keeps its task, and one of before tasks were there is a translator's."""
    from recipes.tasks.digest import condensed, facts

    monkeypatch.setattr(marian, "DRAWN", {"train": 12, "val": 4})
    (data / "books").mkdir()
    for name in ("a-book", "the-lost-princess-of-oz"):
        lines = [f"On day {i} the old king sang again." for i in range(40)]
        (data / "books" / f"{name}.txt").write_text("\n\n".join(lines), encoding="utf-8")
    with gzip.open(data / "tatoeba" / "test.tsv.gz", "wt") as out:
        out.write("Hi.\tHallo.\n")
    recipe = replace(TINY, task="digest", joined=0.0)
    train(data, tmp_path / "run", steps=1, recipe=recipe)
    run = train(data, tmp_path / "run", steps=2, resume=True, recipe=recipe_for("translation"))
    assert run.recipe == recipe
    saved = {k: v for k, v in vars(TINY).items() if k != "task"} | {"target": vars(TINY.target)}
    assert recipe_of(saved) == TINY
    count = write_pairs(data, tmp_path / "pairs.tsv", 99, task="digest")
    lines = [line.split("\t") for line in (tmp_path / "pairs.tsv").read_text().splitlines()]
    assert len(lines) == count == 12
    for source, target in lines:
        assert target == "; ".join(map(condensed, facts(source))) + "."
    with pytest.raises(ValueError, match="unknown task 'poems': one of translation, digest"):
        recipe_for("poems")
