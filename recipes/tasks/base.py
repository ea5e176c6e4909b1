"""What every task family shares: an example, the split of generated text, exact-match scoring."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Example:
    """One training or evaluation item; ``prompt + answer`` is the document, then end-of-text."""

    prompt: str
    answer: str
    level: str | None = None
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pool:
    """The text of one split that families draw on.

    ``books``: one list of paragraphs per book; ``pairs``: English sentence and its German
    translations; ``sentences``: single English sentences (from both); ``prose``: those of books.
    """

    books: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)


def split_of(text: str) -> str:
    """Which split a generated text belongs to, decided by its checksum: 29 : 1 : 2 of 32.

    The rule needs no list of held-out prompts: a training stream can never contain one.
    """
    bucket = zlib.crc32(text.encode()) % 32
    return "val" if bucket == 0 else "test" if bucket in (1, 2) else "train"


def draw(make: Callable[[], Example], split: str) -> Example:
    """Calls ``make`` until its prompt belongs to ``split``."""
    while True:
        example = make()
        if split_of(example.prompt) == split:
            return example


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def pick_distinct(rng: random.Random, items: Sequence[T], count: int) -> list[T]:
    """``count`` different items in random order."""
    return rng.sample(list(items), count)
