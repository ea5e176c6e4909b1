"""English to German: short sentence pairs (Tatoeba), split by English sentence."""

from __future__ import annotations

import random

from recipes.tasks.base import Example, Pool

NAME = "translation"
MAX_NEW_TOKENS = 48


def prompt_for(english: str) -> str:
    """The prompt for one English sentence."""
    return f"English: {english}\nGerman:"


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """One pair of the pool (which is of ``split``), with all its German references."""
    english, german = rng.choice(pool.pairs)
    return Example(prompt_for(english), f" {rng.choice(german)}", references=german)
