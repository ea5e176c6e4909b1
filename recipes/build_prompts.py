"""Writes the shipped prompt files from held-out material, and prompts to train on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.corpus import load_pools
from recipes.recipe import Recipe
from recipes.tasks import FAMILIES, LONG_FAMILIES, arithmetic, digest, stories, translation
from recipes.tasks.base import Example, Pool

COUNTS = {"val": 100, "test": 250}
LONG_COUNTS = {"val": 20, "test": 50}
NEW_TOKENS = 96
"""Most tokens that a target writes on a prompt of the training."""
_MODULES = {**FAMILIES, **LONG_FAMILIES, digest.NAME: digest}


def _stories(pool: Pool, count: int) -> list[Example]:
    """Passages spread evenly over the held-out book, not overlapping in their first paragraph."""
    (paragraphs,) = pool.books.values()
    last = len(paragraphs) - 12
    first = 8  # the title page and the author's note
    return [stories.passage(paragraphs, first + i * (last - first) // count) for i in range(count)]


def _translation(pool: Pool, split: str, count: int) -> list[Example]:
    """Sentences of at least four words, in random order."""
    pairs = [pair for pair in pool.pairs if len(pair[0].split()) >= 4]
    random.Random(f"prompts/{split}").shuffle(pairs)
    return [
        Example(translation.prompt_for(english), f" {german[0]}", references=german)
        for english, german in pairs[:count]
    ]


def examples(family: str, split: str, pool: Pool, count: int) -> list[Example]:
    """``count`` different held-out examples."""
    if family == "stories":
        return _stories(pool, count)
    if family == "translation":
        return _translation(pool, split, count)
    rng = random.Random(f"prompts/{family}/{split}")
    chosen: dict[str, Example] = {}
    while len(chosen) < count:
        if family == "arithmetic":
            level = arithmetic.LEVELS[len(chosen) % 2]
            example = arithmetic.sample(rng, split, pool, level)
        else:
            example = _MODULES[family].sample(rng, split, pool)
        chosen.setdefault(example.prompt, example)
    return list(chosen.values())


def build(data: Path, folder: Path) -> None:
    """Writes ``<family>.jsonl`` for every family."""
    pools = load_pools(data)
    folder.mkdir(parents=True, exist_ok=True)
    for family, module in _MODULES.items():
        lines = []
        for split, count in (LONG_COUNTS if family in LONG_FAMILIES else COUNTS).items():
            for number, example in enumerate(examples(family, split, pools[split], count)):
                record: dict[str, Any] = {
                    "family": family,
                    "split": split,
                    "id": f"{family}-{split}-{number:03d}",
                    "prompt": example.prompt,
                    "answer": example.answer,
                    "max_new_tokens": module.MAX_NEW_TOKENS,
                }
                if example.references:
                    record["references"] = list(example.references)
                if example.level:
                    record["level"] = example.level
                lines.append(json.dumps(record, ensure_ascii=False))
        (folder / f"{family}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def training_prompts(pool: Pool, seed: int, tasks: int = 1) -> Iterator[tuple[str, Example, int]]:
    """Family, example and most new tokens of training prompts, of every family in turn: two
    stories, and of every task so many; no end."""
    rng = random.Random(f"exits/{seed}")
    # By tokens, stories get about twice the share of each task, as in the training of the draft.
    names = ["stories", "stories", *list(Recipe().task_weights) * tasks]
    while True:
        for name in names:
            family = FAMILIES[name]
            yield name, family.sample(rng, "train", pool), min(family.MAX_NEW_TOKENS, NEW_TOKENS)


def write_training_prompts(data: Path, path: Path, limit: int, seed: int, tasks: int = 1) -> int:
    """Write prompts as `forerun train-draft --data` and `forerun write` read them; returns how
    many."""
    pool = load_pools(data)["train"]
    lines = [
        json.dumps(
            {"prompt": example.prompt, "family": family, "id": str(number), "max_new_tokens": most},
            ensure_ascii=False,
        ) + "\n"
        for number, (family, example, most) in enumerate(
            islice(training_prompts(pool, seed, tasks), limit)
        )
    ]  # fmt: skip
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
