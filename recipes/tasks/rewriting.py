"""Repeat a text with one stated change; the texts are sentences of the split's own pool."""

from __future__ import annotations

import random
import re

from recipes.tasks import words
from recipes.tasks.base import Example, Pool, draw, split_of

NAME = "rewriting"
MAX_NEW_TOKENS = 96

_SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
_HE_WORDS = re.compile(r"\b(he|him|his|himself)\b", re.IGNORECASE)
_SHE_WORDS = re.compile(r"\b(she|her|hers|herself)\b", re.IGNORECASE)
_PLAIN_WORD = re.compile(r"\b[a-z]{3,9}\b")
_NAME_WORD = re.compile(r"\b(?:Dorothy|Tom|Mary|" + "|".join(words.BOYS + words.GIRLS) + r")\b")
_NEW_WORDS = (
    words.ANIMALS
    + words.OBJECTS
    + words.COLORS
    + words.JOBS
    + ["house", "garden", "river", "mountain", "forest", "window", "street", "table"]
)


def replace_word(text: str, old: str, new: str) -> str:
    """Every whole-word ``old`` becomes ``new``."""
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def he_to_she(text: str) -> str:
    """he, him, his, himself become she, her, her, herself, keeping the capital."""

    def swap(match: re.Match[str]) -> str:
        word = match.group(0)
        new = _SHE[word.lower()]
        return new.capitalize() if word[0].isupper() else new

    return _HE_WORDS.sub(swap, text)


def apply(instruction: str, text: str) -> str:
    """The text after the change that an instruction of this family states."""
    if match := re.fullmatch(r'replace "(.+)" with "(.+)"\.', instruction):
        return replace_word(text, match.group(1), match.group(2))
    if match := re.fullmatch(r"change the name (\w+) to (\w+)\.", instruction):
        return replace_word(text, match.group(1), match.group(2))
    if instruction == 'change "he" to "she".':
        return he_to_she(text)
    if instruction == "repeat the text.":
        return text
    if match := re.fullmatch(r'add "(.+)" at the end\.', instruction):
        return f"{text} {match.group(1)}"
    raise ValueError(f"unknown instruction: {instruction!r}")


def draw_instruction(rng: random.Random, text: str) -> str:
    """A change that applies to ``text``."""
    if _HE_WORDS.search(text) and not _SHE_WORDS.search(text) and rng.random() < 0.5:
        return 'change "he" to "she".'
    names = _NAME_WORD.findall(text)
    if names and rng.random() < 0.7:
        old = rng.choice(names)
        new = rng.choice([n for n in words.BOYS + words.GIRLS if n != old])
        return f"change the name {old} to {new}."
    kind = rng.random()
    plain = _PLAIN_WORD.findall(text)
    if kind < 0.65 and plain:
        old = rng.choice(plain)
        return f'replace "{old}" with "{rng.choice([w for w in _NEW_WORDS if w != old])}".'
    if kind < 0.85:
        return "repeat the text."
    ending = rng.choice(("That is all.", "Thank you.", "The end.", "Is that true?", "Good night."))
    return f'add "{ending}" at the end.'


def generate(rng: random.Random, sentences: list[str]) -> Example:
    """One rewriting task on one or two of the sentences."""
    first = rng.randrange(len(sentences))
    text = sentences[first]
    if len(text) < 70 and rng.random() < 0.6:
        text = f"{text} {rng.choice(sentences)}"
    instruction = draw_instruction(rng, text)
    return Example(prompt=_prompt(instruction, text), answer=f" {apply(instruction, text)}")


def _prompt(instruction: str, text: str) -> str:
    return f"Rewrite: {instruction}\nText: {text}\nResult:"


def edit(rng: random.Random, sentences: list[str]) -> list[tuple[str, str]]:
    """A lesson: a word replaced in three to twenty words; each pair ends with the new one.

    Most of a rewritten text is a copy: little of it says whether the change was understood.
    """
    parts = rng.choice(sentences).split()
    begin = rng.randrange(len(parts))
    text = " ".join(parts[begin : begin + rng.randint(3, 20)])
    old, new = rng.choice(_PLAIN_WORD.findall(text) or [""]), rng.choice(_NEW_WORDS)
    prompt = _prompt(f'replace "{old}" with "{new}".', text)
    if old in ("", new) or split_of(prompt) != "train":
        return edit(rng, sentences)
    *before, rest = re.split(rf"( ?)\b{re.escape(old)}\b", f" {text}")
    parts, spaces = before[::2], before[1::2]
    parts[0] = prompt + parts[0]
    return [*zip(parts, (space + new for space in spaces), strict=True), (rest, "")]


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A task of ``split`` on the pool's sentences (20 to 140 characters each)."""
    return draw(lambda: generate(rng, pool.sentences), split)
