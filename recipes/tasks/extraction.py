"""Answer a question by copying from a passage of generated facts with distractors."""

from __future__ import annotations

import random
from collections.abc import Callable

from recipes.tasks import words
from recipes.tasks.base import Example, Pool, draw, pick_distinct, split_of

NAME = "extraction"
MAX_NEW_TOKENS = 48

# A fact: its sentence, and questions with the answer copied from that sentence.
Fact = tuple[str, list[tuple[str, str]]]


def _thing(rng: random.Random, noun: str) -> str:
    return f"{rng.choice(words.SIZES)} {rng.choice(words.COLORS)} {noun}"


def person_facts(rng: random.Random, count: int) -> list[Fact]:
    """Where people live and what they do."""
    people = pick_distinct(rng, words.BOYS + words.GIRLS, count)
    towns = pick_distinct(rng, words.TOWNS, count)
    jobs = pick_distinct(rng, words.JOBS, count)
    facts: list[Fact] = []
    for who, town, job in zip(people, towns, jobs, strict=True):
        if rng.random() < 0.5:
            number = rng.choice(words.NUMBER_WORDS[2:12])
            sentence = f"{who} the {job} has lived in {town} for {number} years."
            facts.append(
                (
                    sentence,
                    [
                        (f"Where has {who} lived?", f"{who} has lived in {town}."),
                        (f"Who has lived in {town}?", f"{who} the {job}."),
                        (f"What does the passage say about {who}?", sentence),
                        (f"What does the passage say about {town}?", sentence),
                    ],
                )
            )
        else:
            sentence = f"{who} works as a {job} in the town of {town}."
            facts.append(
                (
                    sentence,
                    [
                        (f"Where does {who} work?", f"{who} works in the town of {town}."),
                        (f"What does {who} do?", f"{who} works as a {job}."),
                        (f"Which sentence is about {who}?", sentence),
                        (f"Which sentence is about the {job}?", sentence),
                    ],
                )
            )
    return facts


def _object_facts(rng: random.Random, count: int) -> list[Fact]:
    """Where things are kept and who put them there."""
    nouns = pick_distinct(rng, words.OBJECTS, count)
    places = pick_distinct(rng, words.PLACES, count)
    people = pick_distinct(rng, words.BOYS + words.GIRLS, count)
    facts: list[Fact] = []
    for noun, place, who in zip(nouns, places, people, strict=True):
        thing = _thing(rng, noun)
        if rng.random() < 0.5:
            sentence = f"{who} put the {thing} {place}."
            facts.append(
                (
                    sentence,
                    [
                        (f"Where did {who} put the {noun}?", f"The {noun} is {place}."),
                        (f"What did {who} do?", sentence),
                        (f"What is {place}?", f"The {thing} is {place}."),
                        (f"Which sentence is about the {noun}?", sentence),
                    ],
                )
            )
        else:
            sentence = f"The {thing} that belongs to {who} is {place}."
            facts.append(
                (
                    sentence,
                    [
                        (f"Where is the {noun}?", f"The {noun} is {place}."),
                        (f"What belongs to {who}?", f"The {thing} belongs to {who}."),
                        (f"Whose {noun} is {place}?", f"It is the {noun} of {who}."),
                        (f"Which sentence is about {who}?", sentence),
                    ],
                )
            )
    return facts


def _event_facts(rng: random.Random, count: int) -> list[Fact]:
    """What happened on which day."""
    days = pick_distinct(rng, words.DAYS, count)
    people = pick_distinct(rng, words.BOYS + words.GIRLS, count)
    animals = pick_distinct(rng, words.ANIMALS, count)
    towns = pick_distinct(rng, words.TOWNS, count)
    facts: list[Fact] = []
    for day, who, animal, town in zip(days, people, animals, towns, strict=True):
        seen = f"{rng.choice(words.SIZES[:6])} {rng.choice(words.COLORS)} {animal}"
        verb = rng.choice(("bought", "saw", "found", "painted"))
        sentence = f"On {day} {who} {verb} a {seen} near {town}."
        if seen[0] in "aeiou":
            sentence = sentence.replace(" a ", " an ", 1)
        facts.append(
            (
                sentence,
                [
                    (f"When was {who} near {town}?", f"{who} was near {town} on {day}."),
                    (f"What happened on {day}?", sentence),
                    (f"Who was near {town}?", f"{who} was near {town} on {day}."),
                    (f"Which sentence is about the {animal}?", sentence),
                ],
            )
        )
    return facts


_KINDS: tuple[Callable[[random.Random, int], list[Fact]], ...] = (
    person_facts,
    _object_facts,
    _event_facts,
)


def _facts(rng: random.Random) -> list[Fact]:
    """Three to five facts of one or two kinds, no name in two of them."""
    count = rng.randint(3, 5)
    first = rng.randint(1, count)
    one, two = rng.sample(_KINDS, 2)
    facts = one(rng, first) + (two(rng, count - first) if count > first else [])
    names = words.BOYS + words.GIRLS + words.TOWNS
    if any(_mentions(facts, name) > 1 for name in names):  # a question could be ambiguous
        return _facts(rng)
    rng.shuffle(facts)
    return facts


def _prompt(facts: list[Fact], question: str) -> str:
    passage = " ".join(sentence for sentence, _ in facts)
    return f"Passage: {passage}\nQuestion: {question}\nAnswer:"


def generate(rng: random.Random) -> Example:
    """A passage and one question about it."""
    facts = _facts(rng)
    question, answer = rng.choice(rng.choice(facts)[1])
    return Example(_prompt(facts, question), f" {answer}")


def quiz(rng: random.Random) -> list[tuple[str, str]]:
    """A lesson: a passage of training and up to ten questions about it, with their answers.

    A passage is read once and much is learned of it. A question whose prompt is held out is not
    asked.
    """
    facts = _facts(rng)
    asked = [pair for _, questions in facts for pair in rng.sample(questions, 3)]
    known = [(q, a) for q, a in asked if split_of(_prompt(facts, q)) == "train"]
    rng.shuffle(known)
    if not known:
        return quiz(rng)
    (first, answer), *more = known[:10]
    begun = [(_prompt(facts, first), f" {answer}")]
    return begun + [(f"\nQuestion: {q}\nAnswer:", f" {a}") for q, a in more]


def _mentions(facts: list[Fact], word: str) -> int:
    return sum(word in sentence.replace(".", " ").split() for sentence, _ in facts)


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A passage and question of ``split``."""
    return draw(lambda: generate(rng), split)
