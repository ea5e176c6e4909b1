"""Chat with long answers: everything the knowledge base has on a few subjects, lists, interviews.

The prompt decides every answer, so it can be scored by exact match.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from recipes.tasks import knowledge, words
from recipes.tasks.base import Example, Pool, article, draw, pick_distinct

NAME = "tours"
MAX_NEW_TOKENS = 384

_ORDINALS = ("First", "Second", "Third", "Fourth", "Fifth")


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _animal(row: tuple[str, ...]) -> list[str]:
    animal, young, sound, legs, food, home = row
    one = article(animal).capitalize()
    return [
        f"{one} has {legs} legs.",
        f"{one} likes to eat {food}.",
        f"{one} usually lives in {home}.",
        f"{one} {sound} when it wants to be heard.",
        f"A young {animal} is called {article(young)}.",
    ]


def _land(row: tuple[str, ...]) -> list[str]:
    land, city, language = row
    return [
        f"The capital of {land} is the city of {city}.",
        f"The people of {land} speak {language}.",
    ]


def _animals(rng: random.Random) -> tuple[str, str]:
    rows = pick_distinct(rng, knowledge.ANIMALS, rng.randint(2, 4))
    names = [f"the {row[0]}" for row in rows]
    parts = [
        f"{order}, {name}. {' '.join(_animal(r))}"
        for order, name, r in zip(_ORDINALS, names, rows, strict=False)
    ]
    return f"Tell me everything about {_join(names)}.", " ".join(parts)


def _lands(rng: random.Random) -> tuple[str, str]:
    rows = pick_distinct(rng, knowledge.COUNTRIES, rng.randint(3, 5))
    parts = [
        f"{order}, {r[0]}. {' '.join(_land(r))}" for order, r in zip(_ORDINALS, rows, strict=False)
    ]
    return f"Tell me about {_join([row[0] for row in rows])}.", " ".join(parts)


def _opposites(rng: random.Random) -> tuple[str, str]:
    rows = pick_distinct(rng, knowledge.OPPOSITES, rng.randint(4, 8))
    answer = " ".join(f'The opposite of "{a}" is "{b}".' for a, b in rows)
    return f"What are the opposites of {_join([row[0] for row in rows])}?", answer


def _plurals(rng: random.Random) -> tuple[str, str]:
    rows = pick_distinct(rng, knowledge.PLURALS, rng.randint(4, 8))
    answer = " ".join(f'The plural of "{a}" is "{b}".' for a, b in rows)
    return f"What are the plurals of {_join([row[0] for row in rows])}?", answer


def _workers(rng: random.Random) -> tuple[str, str]:
    rows = pick_distinct(rng, knowledge.WORKERS, rng.randint(4, 7))
    answer = " ".join(f"{article(w).capitalize()} is someone who {does}." for w, does in rows)
    return f"What do these people do: {_join([row[0] for row in rows])}?", answer


def _interview(rng: random.Random) -> tuple[str, str]:
    """A conversation of several turns, written out by the assistant."""
    rows = pick_distinct(rng, knowledge.ANIMALS, rng.randint(2, 3))
    child = rng.choice(words.BOYS + words.GIRLS)
    lines = []
    for animal, young, _, legs, food, home in rows:
        one = article(animal)
        lines += [
            f"{child}: Do you know where {one} lives?",
            f"Teacher: {one.capitalize()} usually lives in {home}.",
            f"{child}: What does it eat?",
            f"Teacher: It likes to eat {food}.",
            f"{child}: How many legs does it have, and what is its young called?",
            f"Teacher: It has {legs} legs, and its young is called {article(young)}.",
        ]
    lines.append(f"{child}: Thank you!")
    asked = _join([f"the {row[0]}" for row in rows])
    return f"Write a talk between {child} and a teacher about {asked}.", "\n".join(lines)


def _list(rng: random.Random) -> tuple[str, str]:
    """A run of numbers, days or months, with what each of them follows."""
    kind, names = rng.choice(
        (("number", words.NUMBER_WORDS), ("day", words.DAYS), ("month", words.MONTHS))
    )
    first = rng.randrange(len(names) - 5)
    last = rng.randint(first + 4, len(names) - 1)
    answer = " ".join(f"The {kind} after {names[i]} is {names[i + 1]}." for i in range(first, last))
    who = rng.choice(words.BOYS + words.GIRLS)
    asked = f"I am {who}. Go from {names[first]} to {names[last]}, please."
    return asked, f"Yes, {who}. {answer}"


_KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _animals,
    _lands,
    _opposites,
    _plurals,
    _workers,
    _interview,
    _list,
)


def generate(rng: random.Random) -> Example:
    """One question with its long answer."""
    question, answer = rng.choice(_KINDS)(rng)
    return Example(prompt=f"User: {question}\nAssistant:", answer=f" {answer}")


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A question of ``split``."""
    return draw(lambda: generate(rng), split)
