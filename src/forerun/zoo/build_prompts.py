"""Writes the shipped prompt files from held-out material."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from forerun.zoo.corpus import load_pools
from forerun.zoo.tasks import FAMILIES, LONG_FAMILIES, arithmetic, digest, stories, translation
from forerun.zoo.tasks.base import Example, Pool

COUNTS = {"val": 100, "test": 250}
LONG_COUNTS = {"val": 20, "test": 50}
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
