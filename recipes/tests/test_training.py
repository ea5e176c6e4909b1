"""The recipe on a tiny configuration: learns, resumes, finishes, distils, exports."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.training.muon import orthogonalise
from forerun.training.runs import LOG, stopping
from recipes import runs
from recipes.corpus import load_pools
from recipes.distill import distill, own_texts, pack_documents
from recipes.export import average
from recipes.packing import Packer, copied, drill
from recipes.recipe import Architecture, Exits, Guide, Part, Recipe, Unlikely, variant
from recipes.runs import Run, prepare_tokenizer, recipe_of
from recipes.step import Functions
from recipes.tasks import extraction, rewriting
from recipes.tasks.base import Pool, split_of
from recipes.train import Beginning, accumulate, curves, finish, train, unlearn
from recipes.unlikely import continuations, repeated

TINY = Recipe(
    target=Architecture(layers=4, hidden=32, heads=2, feed_forward=48),
    draft=Architecture(layers=1, hidden=32, heads=2, feed_forward=48),
    vocab_size=512,
    tokenizer_draws=40,
    parts=(Part("books", 1, 128), Part("tasks", 2, 256), Part("long", 2, 256)),
    warm_up=2,
    exits=Exits(first=1, drawn=2, share=4),
    guides={"copies": Guide(depth=1, head=0, answers=(2, 3), attention=0.1, answer=0.2)},
    unlikely=Unlikely(every=2, rows=2, prompt=8, length=24),
    distill_tokens=512,
    distill_length=128,
    practice_steps=2,
)


PLAIN = Functions.make(compiled=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "books").mkdir()
    (folder / "tatoeba").mkdir()
    text = "\n\n".join(
        f"There were {i} kings in the far country. Every one of them had a silver crown." * 6
        for i in range(80)
    )
    for name in ("heidi", "little-women", "the-lost-princess-of-oz", "the-magic-of-oz"):
        (folder / "books" / f"{name}.txt").write_text(text, encoding="utf-8")
    for split in ("train", "val", "test"):
        with gzip.open(folder / "tatoeba" / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write(f"I have a {split} book here.\tIch habe hier ein Buch.\n" * 2)
    prepare_tokenizer(folder, load_pools(folder)["train"], TINY, 0)
    return folder


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Packer:
    pool = Pool(
        books={"heidi": ["A short paragraph about goats on the mountain. " * 10] * 200},
        pairs=[("I see.", ("Ich sehe.",))],
        sentences=["The goats are eating the green grass on the mountain."],
    )
    tokenizer = prepare_tokenizer(tmp_path_factory.mktemp("tokenizer"), pool, TINY, 0)
    return Packer(tokenizer, pool, TINY, 5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several may add gradients up in another order each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(data: Path, out: Path, steps: int | None, decay: int | None = None, **begin: Any) -> Run:
    if data.exists() and not out.exists():  # every run with the same tokenizer, trained once
        out.mkdir()
        shutil.copy(data / runs.TOKENIZER, out)
    beginning = Beginning(TINY, **begin)
    return train(data, out, beginning, steps=steps, decay=decay, compiled=False, items=1)


def end(data: Path, folder: Path, out: Path, steps: int) -> Path:
    return finish(data, folder, out, steps=steps, compiled=False, items=1)


def equal(one: Run, two: Run) -> bool:
    a, b = one.model.state_dict(), two.model.state_dict()
    return all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
def test_a_run_cut_and_resumed_equals_one_that_was_not(data: Path, tmp_path: Path) -> None:
    whole = run(data, tmp_path / "whole", 3)
    run(data, tmp_path / "parts", 1)
    parts = run(data, tmp_path / "parts", 3, resume=True)
    assert equal(whole, parts)
    assert (parts.step, parts.tokens) == (whole.step, whole.tokens) == (3, 3 * 1152)
    assert not equal(whole, run(data, tmp_path / "other", 3, seed=1))


@pytest.mark.slow
def test_a_decay_can_be_begun_at_any_time_and_is_resumed(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", 2)
    kept = (tmp_path / "run" / runs.CHECKPOINT).read_bytes()
    whole = run(data, tmp_path / "whole", 2)
    whole = run(data, tmp_path / "whole", None, resume=True, decay=3)
    assert whole.step == 5
    run(data, tmp_path / "parts", 2)
    run(data, tmp_path / "parts", 3, resume=True, decay=3)
    parts = run(data, tmp_path / "parts", None, resume=True, decay=3)
    assert equal(whole, parts)
    log = (tmp_path / "parts" / LOG).read_text().splitlines()
    rates = [json.loads(line)["rate"] for line in log]
    assert rates == pytest.approx([0.5, 1.0, 1 - 3**-0.5, 1 - (2 / 3) ** 0.5, 0.0], abs=1e-4)
    end(data, tmp_path / "run", tmp_path / "copy", 3)
    assert equal(whole, Run.load(tmp_path / "copy" / runs.CHECKPOINT))
    assert (tmp_path / "run" / runs.CHECKPOINT).read_bytes() == kept  # it can go on


def test_the_whole_recipe_exports_a_loadable_pair(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(data, tmp_path / "run", 1)
    out = tmp_path / "finished"
    assert end(data, tmp_path / "run", out, 1) == out / "target"
    assert distill(data, out, steps=2, texts=500, until=3, compiled=False) == out
    assert distill(data, out, steps=2, texts=500, compiled=False) == out / "draft"
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(out / name)
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == 512
        ids = tokenizer("There were", return_tensors="pt")["input_ids"]
        assert torch.isfinite(model(ids).logits).all()
    table = curves(tmp_path / "run").splitlines()
    assert len(table) == 3
    assert "revision" in table[0]
    # A new run may begin from an exported model.
    begun = run(data, tmp_path / "again", 1, start=out / "target")
    assert begun.step == 1
    (out / "draft.pt").unlink()
    distill(data, out, steps=1, texts=500, start=out / "draft", compiled=False)
    assert Run.load(out / "draft.pt", "draft").step == 1, "without practice"
    # An average of two runs has no checkpoint to take the recipe from.
    (out / "draft.pt").unlink()
    (out / runs.CHECKPOINT).unlink()
    monkeypatch.setattr("recipes.distill.Recipe", lambda: TINY)
    assert distill(data, out, steps=1, texts=500, start=out / "draft", compiled=False)
    assert Run.load(out / "draft.pt", "draft").step == 1


@pytest.mark.slow
def test_a_draft_cut_and_resumed_equals_one_that_was_not(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", 1)
    drafts = []
    for stops in ((), (1,), (3,)):
        out = tmp_path / f"out{stops}"
        end(data, tmp_path / "run", out, 1)
        for stop in stops:
            distill(data, out, steps=2, texts=400, until=stop, compiled=False)
        distill(data, out, steps=2, texts=400, compiled=False)
        drafts.append(Run.load(out / "draft.pt", "draft"))
    assert equal(drafts[0], drafts[1])
    assert equal(drafts[0], drafts[2])


@pytest.mark.slow
def test_own_texts_go_on_where_they_were_cut(data: Path, tmp_path: Path) -> None:
    pool = load_pools(data)["train"]
    made = run(data, tmp_path, 1)
    tokenizer = prepare_tokenizer(tmp_path, pool, TINY, 0)
    how = {"seed": 0, "length": 96}
    whole = own_texts(made.model, tokenizer, pool, tmp_path / "a", tokens=6000, **how)
    own_texts(made.model, tokenizer, pool, tmp_path / "b", tokens=10, **how)
    assert own_texts(made.model, tokenizer, pool, tmp_path / "b", tokens=6000, **how) == whole
    assert all(size < len(ids) <= 96 for ids, size in whole)


def test_what_is_wrong_is_one_line(data: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no training data at"):
        run(tmp_path / "nowhere", tmp_path / "out", 1)
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        run(data, tmp_path / "out", 1, resume=True)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        run(data, tmp_path / "out", 0)
    with pytest.raises(FileNotFoundError, match="nothing to finish"):
        finish(data, tmp_path / "out", tmp_path / "copy", steps=1)
    with pytest.raises(FileNotFoundError, match="no exported model at"):
        run(data, tmp_path / "out", 1, start=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no finished target"):
        distill(data, tmp_path / "out", steps=1)
    run(data, tmp_path / "out", 1)
    with pytest.raises(ValueError, match="exists: resume it"):
        run(data, tmp_path / "out", 1)


def test_a_signal_is_a_question() -> None:
    with stopping() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped()


def test_a_saved_recipe_is_read_again() -> None:
    saved = asdict(TINY)
    assert recipe_of(saved) == TINY
    del saved["distill_rate"]  # a checkpoint older than this setting
    assert recipe_of(saved | {"forgotten": 1}).distill_rate == Recipe().distill_rate


def test_variants_are_checked() -> None:
    assert variant() == Recipe()
    small = variant("8x160", 0.0, "2x64")
    assert small.target == Architecture(layers=8, hidden=160, heads=5, feed_forward=416)
    assert small.draft == Architecture(layers=2, hidden=64, heads=2, feed_forward=166)
    assert small.exits.weight == 0
    for shape in ("8", "x", "0x32", "8x100", "ax32"):
        with pytest.raises(ValueError, match=r"shape must be|multiple of 32"):
            variant(shape)
        with pytest.raises(ValueError, match=r"shape must be|multiple of 32"):
            variant(draft_shape=shape)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        variant(exit_weight=-1.0)
    assert variant(rate=0.5) == replace(Recipe(), muon_lr=0.01, adam_lr=0.0015)
    with pytest.raises(ValueError, match="above 0, got 0"):
        variant(rate=0)


def test_the_average_of_two_models(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from forerun.zoo import DRAFT, TARGET

    other = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(3)
    other.save_pretrained(tmp_path / "other")
    average(DRAFT, tmp_path / "other", 0.25, tmp_path / "between")
    got, one = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (tmp_path / "between", DRAFT)
    )
    for name, weight in one.items():
        torch.testing.assert_close(got[name], 1.5 * weight, rtol=0.01, atol=1e-6)
    with pytest.raises(ValueError, match="different shapes"):
        average(DRAFT, TARGET, 0.5, tmp_path / "none")
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        average(DRAFT, DRAFT, 2, tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no exported model"):
        average(DRAFT, tmp_path / "missing", 0.5, tmp_path / "none")


def test_batches_are_a_function_of_seed_and_step(packer: Packer) -> None:
    again = Packer(packer.tokenizer, packer.pool, TINY, 5)
    for one, two, part in zip(packer.batches(3), again.batches(3), TINY.parts, strict=True):
        assert (one.ids == two.ids).all()
        assert one.ids.shape == one.weights.shape == (part.rows, part.length)
    other = Packer(packer.tokenizer, packer.pool, TINY, 6)
    pairs = list(zip(packer.batches(3), other.batches(3), strict=True))
    assert any((one.ids != two.ids).any() for one, two in pairs)
    assert any((packer.batches(4)[1].ids != one.ids).any() for one in packer.batches(3)[1:2])


def test_documents_are_whole_and_rows_full(packer: Packer) -> None:
    batch = packer.batch("x", 0, Part("tasks", 4, 512))
    for ids in batch.ids:
        texts = packer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        *documents, _rest = texts.split("<|endoftext|>")
        assert len(documents) >= 2
        for text in documents:
            if text.startswith(" ") or not re.match("English|Problem|Passage|Rewrite|User", text):
                continue  # drills, and copies of anything
            assert re.search(r"\n(German|Solution|Answer|Result|Assistant):", text)
    assert (batch.ids[:, -1] > 0).any()


def test_finishing_leaves_out_what_is_never_asked_for(packer: Packer) -> None:
    def drills(finishing: bool) -> int:
        part = Part("tasks", 8, 512)
        batches = [packer.batch(str(i), 0, part, finishing) for i in range(4)]
        return sum(int(np.isclose(b.weights, 0.05).sum()) for b in batches)

    assert drills(False) > 0
    assert drills(True) == 0


def test_drills_are_right_sums() -> None:
    rng = random.Random(1)
    for task, result in (pair for _ in range(100) for pair in drill(rng)):
        match = re.fullmatch(r" (\d+) ([-+*/]) (\d+)", task)
        assert match
        a, sign, b = int(match[1]), match[2], int(match[3])
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        assert result.endswith(f" = {value}.")
        assert value >= 0


def test_a_quiz_asks_nothing_that_is_held_out() -> None:
    rng = random.Random(1)
    for pairs in (extraction.quiz(rng) for _ in range(200)):
        passage = pairs[0][0].partition("\nQuestion")[0]
        for (question, answer), more in zip(pairs, [False, *[True] * len(pairs)], strict=False):
            assert split_of(passage * more + question) == "train"
            assert answer.split()[-1].rstrip(".") in passage
    assert max(len(extraction.quiz(rng)) for _ in range(50)) == 10


def test_questions_guide_to_the_words_that_they_end_with(packer: Packer) -> None:
    batch = packer.batch("x", 0, Part("tasks", 16, 512))
    places = batch.guides["questions"]
    assert len(places) > 5
    decode = packer.tokenizer.decode
    days = 0
    for row, asked, place in places:
        ids = batch.ids[row].tolist()
        document = decode(ids[: asked + 1]).rpartition("Passage: ")[2]
        passage, _, questions = document.partition("\n")
        word = decode([ids[place]]).strip()
        assert word in passage
        question, _, begun = questions.rpartition("?\nAnswer:")
        assert question.endswith(word)
        if begun.endswith(" on"):
            days += 1
            assert "day." in decode(ids[asked + 1 : asked + 9])
        else:
            assert (row, asked + (1 if not begun else -1), place) in places
    assert days


def test_changes_guide_to_the_old_word_where_it_would_come_next(packer: Packer) -> None:
    batch, decode = packer.batch("x", 0, Part("tasks", 4, 512)), packer.tokenizer.decode
    seen = {True: 0, False: 0}
    for row, asked, place in batch.guides["changes"]:
        ids = batch.ids[row].tolist()
        document = decode(ids[: asked + 1]).rpartition("Rewrite: ")[2]
        instruction, _, result = document.partition("\n")
        assert "\nResult:" in result
        *_, old, _, new = instruction.rstrip(".").replace('"', "").split()
        after = decode(ids[asked + 1 : asked + 9])
        comes = re.match(rf" ?{new}\b", after) is not None
        looked_at = decode(ids[: place + 1])
        assert (re.search(rf'Rewrite: [a-z ]+"?{old}$', looked_at) is not None) is comes
        seen[comes] += 1
    assert 0 < seen[True] <= seen[False] <= 2 * seen[True]


def test_copies_are_guided_to_the_token_that_came_next(packer: Packer) -> None:
    assert copied([1, 2, 3, 4, 9, 1, 2, 3, 4, 5], size=3) == [(7, 3)]
    assert copied([1, 2, 3, 4, 0, 1, 2, 3, 4], size=3) == []  # another document
    assert copied([1, 2, 1, 2, 1], size=2) == [(3, 2)]
    batch = packer.batch("x", 0, Part("long", 2, 256))
    for row, asked, place in batch.guides["copies"]:
        assert row == 1  # the first row is a book
        assert batch.ids[row, place] == batch.ids[row, asked + 1]


def test_what_repeats_is_every_token_of_a_stretch_that_stood_before() -> None:
    #                        1 2 3 4 stood before; so did 2 3 4 1
    assert repeated([1, 2, 3, 4, 1, 2, 3, 4, 1, 9]) == [*[False] * 4, *[True] * 5, False]
    assert repeated([7, 7, 7, 7, 7], size=4) == [False, *[True] * 4]
    assert repeated([1, 2, 3, 1, 2, 3], start=4) == [False, False]


@pytest.mark.slow
def test_repetition_is_unlearned(packer: Packer) -> None:
    """A model that writes one token for ever: some steps later it says it less."""
    recipe = replace(TINY, unlikely=Unlikely(rows=2, prompt=4, length=20), adam_lr=0.03)
    packer = Packer(packer.tokenizer, packer.pool, recipe, 5)
    made = Run.new(recipe, 0)
    batch = continuations(made.model, packer, 0)
    assert (batch.ids == continuations(made.model, packer, 0).ids).all()
    assert (batch.weights[:, :4] == 0).all()
    assert set(np.unique(batch.weights)) == {-1.0, 0.0}
    before = unlearn(made, batch, PLAIN)
    for step in range(12):
        made.update(1.0)
        unlearn(made, continuations(made.model, packer, step), PLAIN)
    assert unlearn(made, continuations(made.model, packer, 0), PLAIN) < before


def test_edits_say_what_the_family_would() -> None:
    rng = random.Random(1)
    sentences = ["She isn't sure that a cat, that old cat, sees the cat-flap.", "It rains."]
    for _ in range(200):
        pairs = rewriting.edit(rng, sentences)
        prompt, _, result = "".join(part for pair in pairs for part in pair).partition("\nResult:")
        assert split_of(f"{prompt}\nResult:") == "train"
        change, _, text = prompt.removeprefix("Rewrite: ").partition("\nText: ")
        assert result == f" {rewriting.apply(change, text)}"
        assert {new.strip() for _, new in pairs[:-1]} == {change.split('"')[3]}


def test_packed_documents_score_answers_only() -> None:
    documents = [([5, 6, 7, 8, 0], 2), ([9, 9, 9], 1)]
    batch = pack_documents(random.Random(0), documents, rows=2, length=16, prompt_weight=0.25)
    assert set(np.unique(batch.weights)) <= {0.0, 0.25, 1.0}
    for ids, weights in zip(batch.ids, batch.weights, strict=True):
        assert (weights[ids == 5] == 0.25).all()
        assert (weights[ids == 8] == 1).all()
        # A cut text is followed by an end-of-text that is not scored.
        for at in np.flatnonzero(ids[:-1] == 9):
            assert ids[at + 1] == 9 or weights[at + 1] == 0


def test_the_schedule_rises_stays_and_falls_when_told_to() -> None:
    recipe = Recipe()
    assert recipe.rate(0) == 0.01
    assert recipe.rate(99) == recipe.rate(5_000_000) == 1
    assert recipe.rate(999, (1000, 400)) == 1
    assert recipe.rate(1099, (1000, 400)) == pytest.approx(0.5)
    falling = [recipe.rate(step, (1000, 400)) for step in range(1000, 1402)]
    assert falling == sorted(falling, reverse=True)
    assert falling[399] == falling[401] == 0
    assert recipe.rate(0, (0, 10)) < 0.01  # begun during the warm-up


def test_exit_weights_rise_with_depth_and_sum_to_the_weight_in_expectation() -> None:
    exits = Exits(weight=0.4, first=2, drawn=3)
    weights = exits.weights(12)
    assert list(weights) == list(range(2, 12))
    assert weights[4] == pytest.approx(2 * weights[2])
    assert sum(weights.values()) / len(weights) * 3 == pytest.approx(0.4)
    assert Exits(weight=0).weights(12) == {}
    assert Exits(first=2).weights(2) == {}


@pytest.mark.slow
def test_the_exit_loss_makes_layers_agree(packer: Packer) -> None:
    """Ten steps with and without, same seed and data: the exits' loss is lower with it."""
    lower = {}
    for weight in (0.0, 2.0):
        recipe = replace(TINY, exits=replace(TINY.exits, weight=weight), adam_lr=0.01)
        made = Run.new(recipe, 0)
        for step in range(10):
            accumulate(made, packer.batches(step), PLAIN)
            made.update(1.0)
        watched = Run(made.model, made.optimizers, TINY, 0)
        lower[weight] = accumulate(watched, packer.batches(11), PLAIN).exits[2]
    assert lower[2.0] < lower[0.0]


def test_the_defaults_fit_the_shipped_sizes() -> None:
    recipe = Recipe()
    assert sum(part.rows * part.length for part in recipe.parts) == 8192
    assert set(recipe.prompt_weights) >= (
        set(recipe.task_weights) | set(recipe.lesson_weights) | set(recipe.long_weights)
    )


def test_orthogonalise_makes_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 24, 40)))
    assert values.min() > 0.5
    assert values.max() < 1.4
