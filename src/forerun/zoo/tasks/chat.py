"""Dialogues in a fixed format on a small knowledge base; full-sentence answers.

A question (one phrasing of one fact) is held out everywhere, also as an earlier turn. The fact
itself is taught by its other phrasings, so the test asks whether the model can combine.
"""

from __future__ import annotations

import functools
import random

from forerun.zoo.tasks import knowledge, words
from forerun.zoo.tasks.base import Example, Pool, article, exact_match, split_of

NAME = "chat"
MAX_NEW_TOKENS = 48
matches = exact_match

_WRAPS = (
    "{q}",
    "Please tell me: {q}",
    "I have a question. {q}",
    "Do you know the answer? {q}",
    "Can you help me? {q}",
)
_SMALL_TALK = (
    ("Hello!", "Hello! How can I help you today?"),
    ("Hi there.", "Hello! How can I help you today?"),
    ("Good morning.", "Good morning! What would you like to know?"),
    ("Good evening.", "Good evening! What would you like to know?"),
    ("Who are you?", "I am a very small language model, and I like to answer short questions."),
    ("How are you?", "I am very well, thank you. What would you like to know?"),
    ("Thank you!", "You are welcome. Is there anything else you would like to know?"),
    ("Thank you very much.", "You are welcome. Is there anything else you would like to know?"),
    ("Goodbye.", "Goodbye! It was nice to talk with you."),
)


def _facts() -> list[tuple[list[str], str]]:
    """(phrasings, answer) of every fact."""
    facts: list[tuple[list[str], str]] = []

    def add(answer: str, *questions: str) -> None:
        facts.append((list(questions), answer))

    for land, city, language in knowledge.COUNTRIES:
        add(
            f"The capital of {land} is the city of {city}.",
            f"What is the capital of {land}?",
            f"Which city is the capital of {land}?",
            f"Name the capital of {land}.",
        )
        add(
            f"The city of {city} is the capital of {land}.",
            f"In which country is {city}?",
            f"Where is the city of {city}?",
            f"{city} is the capital of which country?",
        )
        add(
            f"The people of {land} speak {language}.",
            f"Which language do people speak in {land}?",
            f"What do people in {land} speak?",
            f"What is the language of {land}?",
        )
    for animal, young, sound, legs, food, home in knowledge.ANIMALS:
        one = article(animal).capitalize()
        add(
            f"A young {animal} is called {article(young)}.",
            f"What is a young {animal} called?",
            f"What do we call a young {animal}?",
            f"What is the name for the young of {article(animal)}?",
        )
        add(
            f"{one} {sound} when it wants to be heard.",
            f"What sound does {article(animal)} make?",
            f"What does {article(animal)} do when it wants to be heard?",
            f"How does {article(animal)} sound?",
        )
        add(
            f"{one} has {legs} legs.",
            f"How many legs does {article(animal)} have?",
            f"Count the legs of {article(animal)}.",
            f"What is the number of legs of {article(animal)}?",
        )
        add(
            f"{one} likes to eat {food}.",
            f"What does {article(animal)} eat?",
            f"What food does {article(animal)} like?",
            f"What should I give {article(animal)} to eat?",
        )
        add(
            f"{one} usually lives in {home}.",
            f"Where does {article(animal)} live?",
            f"What is the home of {article(animal)}?",
            f"Where can I find {article(animal)}?",
        )
    for word, other in knowledge.OPPOSITES + [(b, a) for a, b in knowledge.OPPOSITES]:
        add(
            f'The opposite of "{word}" is "{other}".',
            f'What is the opposite of "{word}"?',
            f'Which word means the opposite of "{word}"?',
            f'Give me the opposite of "{word}".',
        )
    for one, many in knowledge.PLURALS:
        add(
            f'The plural of "{one}" is "{many}".',
            f'What is the plural of "{one}"?',
            f'How do you write more than one "{one}"?',
            f'Give me the plural of "{one}".',
        )
    for thing, color in knowledge.COLORS:
        add(
            f"The color of {thing} is {color}.",
            f"What color is {thing}?",
            f"What is the color of {thing}?",
            f"Which color does {thing} have?",
        )
    for thing, use in knowledge.USES:
        add(
            f"You can use {thing} to {use}.",
            f"What can I do with {thing}?",
            f"What is the use of {thing}?",
            f"Why do people need {thing}?",
        )
    for who, does in knowledge.WORKERS:
        add(
            f"{article(who).capitalize()} is someone who {does}.",
            f"What does {article(who)} do?",
            f"What is the work of {article(who)}?",
            f"Who is {article(who)}?",
        )
    for kind, names in (("day", words.DAYS), ("month", words.MONTHS)):
        for i, name in enumerate(names):
            after, before = names[(i + 1) % len(names)], names[i - 1]
            add(
                f"The {kind} after {name} is {after}.",
                f"Which {kind} comes after {name}?",
                f"What {kind} follows {name}?",
                f"What is the {kind} after {name}?",
            )
            add(
                f"The {kind} before {name} is {before}.",
                f"Which {kind} comes before {name}?",
                f"What is the {kind} before {name}?",
                f"After which {kind} comes {name}?",
            )
    for n in range(1, 20):
        number = words.NUMBER_WORDS[n]
        add(
            f"The number after {number} is {words.NUMBER_WORDS[n + 1]}.",
            f"Which number comes after {number}?",
            f"What is the number after {number}?",
            f"Count one further than {number}.",
        )
        add(
            f"The number before {number} is {words.NUMBER_WORDS[n - 1]}.",
            f"Which number comes before {number}?",
            f"What is the number before {number}?",
            f"Count back by one from {number}.",
        )
    return facts


@functools.cache
def questions(split: str) -> tuple[tuple[str, str], ...]:
    """Every (question, answer) whose wording belongs to ``split``.

    The bare question decides, so no polite wrapping of a held-out question is trained on.
    """
    return tuple((q, a) for asks, a in _facts() for q in asks if _split(q) == split)


def _split(question: str) -> str:
    """Held-out share 1/8 (test) and 1/16 (val): the set of questions is small."""
    names = [split_of(f"{question}#{i}") for i in range(3)]
    return "test" if "test" in names else "val" if "val" in names else "train"


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A dialogue of one to three turns; the last question is of ``split``, earlier ones train."""
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.25:
        turns.append(rng.choice(_SMALL_TALK[:6]))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        turns.append(rng.choice(questions("train")))
    if split == "train" and rng.random() < 0.08:
        last = rng.choice(_SMALL_TALK)
    else:
        question, answer = rng.choice(questions(split))
        wrap = rng.choice(_WRAPS) if rng.random() < 0.3 else "{q}"
        last = (wrap.format(q=question), answer)
    lines = [f"User: {q}\nAssistant: {a}" for q, a in turns]
    lines.append(f"User: {last[0]}\nAssistant:")
    return Example(prompt="\n".join(lines), answer=f" {last[1]}")
