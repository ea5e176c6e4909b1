"""Dialogues in a fixed format on a small knowledge base; full-sentence answers.

A question (one phrasing of one fact) is held out everywhere, also as an earlier turn. The fact
itself is taught by its other phrasings, so the test asks whether the model can combine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from recipes.tasks import knowledge, words
from recipes.tasks.base import Example, Pool, article, split_of

NAME = "chat"
MAX_NEW_TOKENS = 48

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


_Facts = tuple[tuple[str, str, str, str], ...]
"""An answer and three questions each."""
_COUNTRY: _Facts = (
    (
        "The capital of {land} is the city of {city}.",
        "What is the capital of {land}?",
        "Which city is the capital of {land}?",
        "Name the capital of {land}.",
    ),
    (
        "The city of {city} is the capital of {land}.",
        "In which country is {city}?",
        "Where is the city of {city}?",
        "{city} is the capital of which country?",
    ),
    (
        "The people of {land} speak {language}.",
        "Which language do people speak in {land}?",
        "What do people in {land} speak?",
        "What is the language of {land}?",
    ),
)
_ANIMAL: _Facts = (
    (
        "A young {animal} is called {a_young}.",
        "What is a young {animal} called?",
        "What do we call a young {animal}?",
        "What is the name for the young of {an_animal}?",
    ),
    (
        "{An_animal} {sound} when it wants to be heard.",
        "What sound does {an_animal} make?",
        "What does {an_animal} do when it wants to be heard?",
        "How does {an_animal} sound?",
    ),
    (
        "{An_animal} has {legs} legs.",
        "How many legs does {an_animal} have?",
        "Count the legs of {an_animal}.",
        "What is the number of legs of {an_animal}?",
    ),
    (
        "{An_animal} likes to eat {food}.",
        "What does {an_animal} eat?",
        "What food does {an_animal} like?",
        "What should I give {an_animal} to eat?",
    ),
    (
        "{An_animal} usually lives in {home}.",
        "Where does {an_animal} live?",
        "What is the home of {an_animal}?",
        "Where can I find {an_animal}?",
    ),
)
_OPPOSITE: _Facts = (
    (
        'The opposite of "{word}" is "{other}".',
        'What is the opposite of "{word}"?',
        'Which word means the opposite of "{word}"?',
        'Give me the opposite of "{word}".',
    ),
)
_PLURAL: _Facts = (
    (
        'The plural of "{one}" is "{many}".',
        'What is the plural of "{one}"?',
        'How do you write more than one "{one}"?',
        'Give me the plural of "{one}".',
    ),
)
_COLOR: _Facts = (
    (
        "The color of {thing} is {color}.",
        "What color is {thing}?",
        "What is the color of {thing}?",
        "Which color does {thing} have?",
    ),
)
_USE: _Facts = (
    (
        "You can use {thing} to {use}.",
        "What can I do with {thing}?",
        "What is the use of {thing}?",
        "Why do people need {thing}?",
    ),
)
_WORKER: _Facts = (
    (
        "{A_worker} is someone who {does}.",
        "What does {a_worker} do?",
        "What is the work of {a_worker}?",
        "Who is {a_worker}?",
    ),
)
_DATE: _Facts = (
    (
        "The {kind} after {name} is {after}.",
        "Which {kind} comes after {name}?",
        "What {kind} follows {name}?",
        "What is the {kind} after {name}?",
    ),
    (
        "The {kind} before {name} is {before}.",
        "Which {kind} comes before {name}?",
        "What is the {kind} before {name}?",
        "After which {kind} comes {name}?",
    ),
)
_NUMBER: _Facts = (
    (
        "The number after {number} is {after}.",
        "Which number comes after {number}?",
        "What is the number after {number}?",
        "Count one further than {number}.",
    ),
    (
        "The number before {number} is {before}.",
        "Which number comes before {number}?",
        "What is the number before {number}?",
        "Count back by one from {number}.",
    ),
)


def _things() -> Iterator[tuple[_Facts, dict[str, str | int]]]:
    """Everything there are facts about: which, and what they say of it."""
    for land, city, language in knowledge.COUNTRIES:
        yield _COUNTRY, {"land": land, "city": city, "language": language}
    for animal, young, sound, legs, food, home in knowledge.ANIMALS:
        one, ways = article(animal), {"sound": sound, "legs": legs, "food": food, "home": home}
        names = {"animal": animal, "an_animal": one, "An_animal": one.capitalize()}
        yield _ANIMAL, {**names, **ways, "a_young": article(young)}
    for word, other in knowledge.OPPOSITES + [(b, a) for a, b in knowledge.OPPOSITES]:
        yield _OPPOSITE, {"word": word, "other": other}
    for one, many in knowledge.PLURALS:
        yield _PLURAL, {"one": one, "many": many}
    for thing, color in knowledge.COLORS:
        yield _COLOR, {"thing": thing, "color": color}
    for thing, use in knowledge.USES:
        yield _USE, {"thing": thing, "use": use}
    for who, does in knowledge.WORKERS:
        one = article(who)
        yield _WORKER, {"a_worker": one, "A_worker": one.capitalize(), "does": does}
    for kind, order in (("day", words.DAYS), ("month", words.MONTHS)):
        for i, name in enumerate(order):
            around = {"after": order[(i + 1) % len(order)], "before": order[i - 1]}
            yield _DATE, {"kind": kind, "name": name, **around}
    numbers = words.NUMBER_WORDS
    for before, number, after in zip(numbers, numbers[1:], numbers[2:], strict=False):
        yield _NUMBER, {"number": number, "before": before, "after": after}


def _facts() -> Iterator[tuple[str, str]]:
    """(question, answer) of every fact, in every wording."""
    for facts, values in _things():
        for answer, *asks in facts:
            for question in asks:
                yield question.format_map(values), answer.format_map(values)


@functools.cache
def questions(split: str) -> tuple[tuple[str, str], ...]:
    """Every (question, answer) whose wording belongs to ``split``.

    The bare question decides, so no polite wrapping of a held-out question is trained on.
    """
    return tuple((q, a) for q, a in _facts() if _split(q) == split)


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
