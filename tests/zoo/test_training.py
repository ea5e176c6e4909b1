"""The recipe on a tiny configuration: runs, resumes, exports."""

from __future__ import annotations

import gzip
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from forerun.zoo.optim import orthogonalise
from forerun.zoo.packing import Packer
from forerun.zoo.recipe import Architecture, Recipe
from forerun.zoo.tasks.base import Pool
from forerun.zoo.train import Pair, main, prepare_tokenizer, train

TINY = Recipe(
    target=Architecture(layers=2, hidden=32, heads=2, feed_forward=48),
    draft=Architecture(layers=1, hidden=32, heads=2, feed_forward=48),
    vocab_size=512,
    batch_tokens=512,
    length=256,
    long_length=512,
    tokenizer_draws=40,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "books").mkdir()
    (folder / "tatoeba").mkdir()
    text = "\n\n".join(
        f"There were {i} kings in the far country. Every one of them had a silver crown."
        for i in range(80)
    )
    for name in ("heidi", "little-women", "the-lost-princess-of-oz", "the-magic-of-oz"):
        (folder / "books" / f"{name}.txt").write_text(text, encoding="utf-8")
    for split in ("train", "val", "test"):
        with gzip.open(folder / "tatoeba" / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write(f"I have a {split} book here.\tIch habe hier ein Buch.\n" * 2)
    return folder


def run(data: Path, out: Path, steps: int, **more: object) -> Pair:
    return train(data, out, steps=steps, recipe=TINY, compiled=False, **more)  # type: ignore[arg-type]


def weights(pair: Pair) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value
        for name, model in (("target", pair.target), ("draft", pair.draft))
        for key, value in model.state_dict().items()
    }


def test_resuming_gives_the_weights_of_an_uninterrupted_run(data: Path, tmp_path: Path) -> None:
    whole = weights(run(data, tmp_path / "whole", 2))
    run(data, tmp_path / "parts", 2, stop_after=1)
    parts = weights(run(data, tmp_path / "parts", 2, resume=True))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    fresh = weights(run(data, tmp_path / "other", 2, seed=1))
    assert not all(torch.equal(whole[key], fresh[key]) for key in whole)


def test_the_whole_recipe_exports_a_loadable_pair(data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    main(
        data, tmp_path, steps=1, distill_steps=1, distill_minutes=0.01, recipe=TINY, compiled=False
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.vocab_size == 512
        ids = tokenizer("There were", return_tensors="pt")["input_ids"]
        assert torch.isfinite(model(ids).logits).all()


def test_missing_data_and_missing_checkpoint_are_one_line(data: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no training data at"):
        run(tmp_path / "nowhere", tmp_path / "out", 1)
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        run(data, tmp_path / "out", 1, resume=True)


def test_batches_are_a_function_of_seed_and_step(data: Path, tmp_path: Path) -> None:
    pool = Pool(
        books={"heidi": ["A short paragraph about goats on the mountain."] * 200},
        pairs=[("I see.", ("Ich sehe.",))],
        sentences=["The goats are eating the green grass on the mountain."],
    )
    tokenizer = prepare_tokenizer(tmp_path, pool, TINY, 0)
    one, two = (Packer(tokenizer, pool, TINY, 5).batch(3, 256) for _ in range(2))
    assert (one.ids == two.ids).all()
    assert one.ids.shape == one.weights.shape == (2, 256)
    assert (one.weights > 0).all()
    other = Packer(tokenizer, pool, TINY, 6).batch(3, 256)
    assert (one.ids != other.ids).any()


def test_practice_rows_are_repeats_and_drill_rows_are_right_sums(tmp_path: Path) -> None:
    pool = Pool(
        books={"heidi": ["A short paragraph about goats on the mountain."] * 200},
        pairs=[("I see.", ("Ich sehe.",))],
        sentences=["The goats are eating the green grass on the mountain."],
    )
    tokenizer = prepare_tokenizer(tmp_path, pool, TINY, 0)
    packer = Packer(tokenizer, pool, Recipe(batch_tokens=2048), 0)
    batch = packer.batch(0, 256, practice=1.0)
    ends = [-1, *(i for i, token in enumerate(batch.ids[3]) if token == 0)]
    for begin, end in pairwise(ends):
        string = batch.ids[3][begin + 1 : end]
        half = len(string) // 2
        assert (string[:half] == string[half:]).all()
        assert (batch.weights[3][begin + 1 + half : end] == 1).all()
        assert (batch.weights[3][begin + 1 : begin + 1 + half] == 0).all()
    text = tokenizer.decode(batch.ids[4].tolist())
    sums = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", text)
    assert len(sums) > 10
    for left, sign, right, result in sums:
        a, b = int(left), int(right)
        assert int(result) == {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]


def test_the_schedule_rises_stays_and_falls_to_zero() -> None:
    recipe = Recipe()
    assert recipe.rate(0) < 0.1
    assert recipe.rate(0.3) == 1
    assert recipe.rate(0.75) == pytest.approx(0.5)
    assert recipe.rate(1) == 0


def test_orthogonalise_makes_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 24, 40)))
    assert values.min() > 0.5
    assert values.max() < 1.4
