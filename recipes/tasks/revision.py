"""Rewriting of whole paragraphs: one to three changes to 100 to 400 tokens of a book."""

from __future__ import annotations

import random

from recipes.tasks import rewriting
from recipes.tasks.base import Example, Pool, draw

NAME = "revision"
MAX_NEW_TOKENS = 448
LENGTHS = (350, 1300)
"""Characters of the text: at least and at most."""


def passage(rng: random.Random, pool: Pool) -> str:
    """Whole paragraphs of one book, joined by spaces, of a length in ``LENGTHS``."""
    low, high = LENGTHS
    while True:
        paragraphs = pool.books[rng.choice(sorted(pool.books))]
        at = rng.randrange(len(paragraphs))
        most = rng.randint(low, high)
        text = paragraphs[at]
        while len(text) < most and at + 1 < len(paragraphs):
            at += 1
            text = f"{text} {paragraphs[at]}"
        if low <= len(text) <= high:
            return text


def generate(rng: random.Random, pool: Pool) -> Example:
    """One task: the changes are applied in the order they are stated."""
    text = passage(rng, pool)
    changes: list[str] = []
    result = text
    for _ in range(rng.randint(1, 3)):
        change = rewriting.draw_instruction(rng, result)
        if change in changes or (change == "repeat the text." and changes):
            continue
        changes.append(change)
        result = rewriting.apply(change, result)
        if change == "repeat the text.":
            break
    prompt = f"Rewrite: {' '.join(changes)}\nText: {text}\nResult:"
    return Example(prompt=prompt, answer=f" {result}")


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A task of ``split`` on its own books."""
    return draw(lambda: generate(rng, pool), split)
