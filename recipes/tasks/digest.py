"""Digest (synthetic): what a passage says of people, among sentences of books, in one line.

For models with an encoder. It is no news summarisation: the facts are generated, and all that is
asked is to find them, in their order, and to say them shortly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from recipes.tasks.base import Example, Pool, draw
from recipes.tasks.extraction import person_facts

NAME = "digest"
MAX_NEW_TOKENS = 64

_FACT = re.compile(
    r"(\w+) (?:the (\w+) has lived in (\w+) for (\w+) years"
    r"|works as a (\w+) in the town of (\w+))\."
)


def facts(passage: str) -> list[str]:
    """The sentences of `extraction.person_facts` in a passage, in order."""
    return [match[0] for match in _FACT.finditer(passage)]


def condensed(fact: str) -> str:
    """One of `facts` in few words.

    >>> condensed("Anton the farmer has lived in Greenhill for four years.")
    'Anton, a farmer, four years in Greenhill'
    """
    match = _FACT.fullmatch(fact)
    assert match, fact
    who, job, town, years, trade, place = match.groups()
    return f"{who}, a {job}, {years} years in {town}" if job else f"{who}, a {trade} in {place}"


def generate(
    rng: random.Random, prose: Sequence[str], count: tuple[int, int], others: tuple[int, int]
) -> Example:
    """A passage of so many facts (least, most) among other sentences, and its digest."""
    chosen = [sentence for sentence, _ in person_facts(rng, rng.randint(*count))]
    passage = list(chosen)
    for _ in range(rng.randint(*others)):
        sentence = rng.choice(prose)
        while not 6 <= len(sentence.split()) <= 18:
            sentence = rng.choice(prose)
        passage.insert(rng.randint(0, len(passage)), sentence)
    return Example(" ".join(passage), "; ".join(map(condensed, chosen)) + ".")


def sample(rng: random.Random, split: str, pool: Pool) -> Example:
    """A passage of ``split`` with two to four facts among three to six sentences, and its digest.

    In training also with one fact or fewer sentences: from short passages copying is learned first.
    """
    count, others = ((1, 4), (0, 6)) if split == "train" else ((2, 4), (3, 6))
    return draw(lambda: generate(rng, pool.prose, count, others), split)
