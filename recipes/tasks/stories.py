"""Raw text of public-domain children's books; one whole book each is held out for val and test."""

from __future__ import annotations

import random
import re

from recipes.tasks.base import Example, Pool

NAME = "stories"
MAX_NEW_TOKENS = 96
PROMPT_WORDS = 45
ANSWER_WORDS = 90

HELD_OUT = {"the-lost-princess-of-oz": "val", "the-magic-of-oz": "test"}
LEFT_OUT = (
    "pride-and-prejudice",
    "the-adventures-of-sherlock-holmes",
    "the-hound-of-the-baskervilles",
    "the-memoirs-of-sherlock-holmes",
)
# Long novels for older readers: kept, at a lower weight than the simpler books.
LESS_OFTEN = (
    "anne-of-avonlea",
    "anne-of-green-gables",
    "anne-of-the-island",
    "at-the-back-of-the-north-wind",
    "little-men",
    "little-women",
    "the-adventures-of-tom-sawyer",
    "treasure-island",
)


def passage(paragraphs: list[str], at: int) -> Example:
    """The opening words from paragraph ``at`` on, and how the book goes on."""
    text = "\n\n".join(paragraphs[at : at + 30])
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    cut = ends[min(PROMPT_WORDS, len(ends)) - 1]
    stop = ends[min(PROMPT_WORDS + ANSWER_WORDS, len(ends)) - 1]
    return Example(text[:cut], text[cut:stop])


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A passage that starts at a random paragraph of a random book of the pool."""
    paragraphs = pool.books[rng.choice(sorted(pool.books))]
    return passage(paragraphs, rng.randrange(max(1, len(paragraphs) - 30)))
