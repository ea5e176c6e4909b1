"""Training batches: book stretches and packed task documents, a pure function of seed and step."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.recipe import Part, Recipe
from recipes.tasks import (
    FAMILIES,
    LONG_FAMILIES,
    arithmetic,
    extraction,
    rewriting,
    stories,
    words,
)
from recipes.tasks.base import Pool

_GOLDEN = 0.6180339887498949
_REPLACE = re.compile(r'Rewrite: (?:replace|change the name) "?(\w+)"? (?:with|to) "?(\w+)"?\.')
GUIDED = 128
"""The most copies of a micro-batch that are guided."""
Places = list[tuple[int, int, int]]
"""Row, place from which a token is predicted, and place to look at."""


@dataclass(frozen=True)
class Batch:
    """``ids`` and loss ``weights`` (of predicting each position), both (rows, length)."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    guides: dict[str, Places] = field(default_factory=dict)
    """By the guide's name."""


class Packer:
    """Makes batches; holds the tokenised books."""

    def __init__(self, tokenizer: Any, pool: Pool, recipe: Recipe, seed: int) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.recipe = recipe
        self.seed = seed
        books = []
        starts: list[NDArray[np.int64]] = []
        offset = 0
        simple = [b for b in sorted(pool.books) if b not in stories.LESS_OFTEN]
        for part, titles in ((0, simple), (1, sorted(set(pool.books) - set(simple)))):
            begins: list[int] = []
            for title in titles:
                paragraphs = [text + "\n\n" for text in pool.books[title]]
                for encoding in tokenizer.encode_batch(paragraphs):
                    begins.append(offset)
                    books.append(np.array(encoding.ids, dtype=np.int64))
                    offset += len(encoding.ids)
            starts.append(np.array(begins, dtype=np.int64))
            if part == 0:
                simple_end = offset
        self.tokens = np.concatenate(books)
        self.starts = starts
        self.simple_share = simple_end / offset

    def batches(self, step: int, finishing: bool = False) -> list[Batch]:
        """The micro-batches of ``step``: one per part of the recipe.

        ``finishing`` leaves out copies and `LESSONS`, which teach but are not asked for.
        """
        return [
            self.batch(f"{step}/{number}", step * len(self.recipe.parts) + number, part, finishing)
            for number, part in enumerate(self.recipe.parts)
        ]

    def batch(self, key: str, index: int, part: Part, finishing: bool = False) -> Batch:
        """A micro-batch: a function of the seed, ``key`` (documents) and ``index`` (books)."""
        rng = random.Random(f"{self.seed}/{key}")
        guides: dict[str, Places] = {}
        ids = np.zeros((part.rows, part.length), dtype=np.int64)
        weights = np.ones((part.rows, part.length), dtype=np.float32)
        books = {"books": part.rows, "tasks": 0, "long": part.rows // 2}[part.kind]
        for row in range(books):
            ids[row] = self.stretch(index * part.rows + row, part.length)
        if books < part.rows:
            shares = self.recipe.long_weights
            if part.kind == "tasks":
                shares = self.recipe.task_weights | self.recipe.lesson_weights
            if finishing:
                shares = {n: w for n, w in shares.items() if n not in (*LESSONS, "copies")}
            for name, places in self._pack(rng, shares, ids[books:], weights[books:]).items():
                guides[name] = [(books + row, at, place) for row, at, place in places]
            again = [(r, *p) for r in range(books, part.rows) for p in copied(ids[r].tolist())]
            guides["copies"] = rng.sample(again, min(GUIDED, len(again)))
        return Batch(ids, weights, guides)

    def stretch(self, index: int, length: int) -> NDArray[np.int64]:
        """A stretch of a book from a paragraph on; starts are spread evenly over the corpus."""
        place = (index * _GOLDEN + self.seed * 0.1) % 1.0
        # The simple books are visited about twice as often per token as the long novels.
        border = 2 * self.simple_share / (1 + self.simple_share)
        part, inside = (
            (0, place / border) if place < border else (1, (place - border) / (1 - border))
        )
        starts = self.starts[part] if len(self.starts[part]) else self.starts[1 - part]
        first, last = int(starts[0]), int(starts[-1])
        start = int(starts[np.searchsorted(starts, first + inside * (last - first))])
        start = max(0, min(start, len(self.tokens) - length))
        return self.tokens[start : start + length]

    def _pack(
        self,
        rng: random.Random,
        shares: Mapping[str, float],
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
    ) -> dict[str, Places]:
        """Packs whole documents, each where it first fits; beginnings of book stretches fill up.

        Returns where `questions` and `changes` guide.
        """
        rows, length = ids.shape
        guides: dict[str, Places] = {"questions": [], "changes": []}
        ends = [0] * rows
        used = {name: rng.random() * 200 for name in shares}
        misses = 0
        while misses < 6:
            name = min(used, key=lambda n: used[n] / shares[n])
            segments = self.document(rng, name)
            size = sum(len(tokens) for tokens, _ in segments)
            row = next((r for r in range(rows) if ends[r] + size <= length), None)
            if row is None:
                misses += 1
                used[name] += size / 8  # let shorter families try
                continue
            for guide, find, families in (
                ("questions", self.questions, ("extraction", "quiz")),
                ("changes", lambda s: self.changes(rng, s), ("rewriting", "edits")),
            ):
                places = find(segments) if name in families else []
                guides[guide] += [(row, ends[row] + at, ends[row] + to) for at, to in places]
            for tokens, weight in segments:
                begin, ends[row] = ends[row], ends[row] + len(tokens)
                ids[row, begin : ends[row]] = tokens
                weights[row, begin : ends[row]] = weight
            used[name] += size
        for row, end in enumerate(ends):
            if end < length:
                ids[row, end:] = self.stretch(rng.randrange(1 << 30), length - end)
        return guides

    def questions(self, segments: list[tuple[list[int], float]]) -> list[tuple[int, int]]:
        """Of questions about a passage: where an answer's first two tokens and a day at its end
        are predicted, and the place to look at.

        That is the word which the question ends with, if the passage has it just once.
        """
        line, on = (self.tokenizer.token_to_id(token) for token in ("Ċ", "Ġon"))
        first = segments[0][0]
        passage = first[: first.index(line)]
        places, at = [], 0
        for (prompt, _), (answer, _) in zip(segments[::2], segments[1::2], strict=True):
            word = prompt[prompt.index(line, len(prompt) - 4) - 2]  # before "?\nAnswer:"
            if passage.count(word) == 1:
                place, before = passage.index(word), at + len(prompt) - 1
                places += [(before, place), (before + 1, place)]
                end = answer.index(on) + 1 if on in answer else len(answer)
                if self.tokenizer.decode(answer[end:]).strip(" .") in words.DAYS:
                    places.append((before + end, place))
            at += len(prompt) + len(answer)
        return places

    def changes(
        self, rng: random.Random, segments: list[tuple[list[int], float]]
    ) -> list[tuple[int, int]]:
        """Of texts in which a word is replaced: places of the result, and where to look from there.

        That is the end of the old word in the instruction if that would come next; twice as many
        others look at the document's beginning.
        """
        ids = [token for tokens, _ in segments for token in tokens]
        text = self.tokenizer.decode(ids)
        change, end = _REPLACE.match(text), text.index("\nResult:") + len("\nResult:")
        encoded = self.tokenizer.encode(text)
        if change is None or change[2] in text[change.end() : end] or encoded.ids != ids[:-1]:
            return []
        new = re.finditer(rf"\b{change[2]}\b", text[end:])
        here = {encoded.char_to_token(end + word.start()) - 1 for word in new}
        result = range(encoded.char_to_token(end - 1), len(ids) - 2)
        others = sorted(set(result) - here)
        place = encoded.char_to_token(change.end(1) - 1)
        rest = rng.sample(others, min(2 * len(here), len(others)))
        return [(at, place) for at in sorted(here)] + [(at, 0) for at in rest]

    def document(self, rng: random.Random, name: str) -> list[tuple[list[int], float]]:
        """A training document of the family ``name``: pieces of token ids and their loss weight."""
        prompt_weight = self.recipe.prompt_weights[name]
        if name == "copies":
            string = self.string(rng)
            return [(string, prompt_weight), ([*string, 0], 1.0)]
        if name in LESSONS:
            pieces = [piece for task in LESSONS[name](rng, self.pool) for piece in task]
        else:
            family = FAMILIES.get(name) or LONG_FAMILIES[name]
            example = family.sample(rng, "train", self.pool)
            pieces = [example.prompt, example.answer]
        encoded = [self.tokenizer.encode(piece).ids for piece in pieces]
        encoded[-1].append(0)
        weights = [prompt_weight, 1.0] * (len(pieces) // 2)
        return list(zip(encoded, weights, strict=True))

    def string(self, rng: random.Random) -> list[int]:
        """4 to 40 tokens to copy: of a book, or at random."""
        size = rng.randint(4, 40)
        if rng.random() < 0.5:
            start = rng.randrange(len(self.tokens) - size)
            return [int(token) for token in self.tokens[start : start + size]]
        top = self.tokenizer.get_vocab_size()
        return [rng.randrange(1, top) for _ in range(size)]

    def repeats(
        self, rng: random.Random, ids: NDArray[np.int64], weights: NDArray[np.float32]
    ) -> None:
        """Fills a row with strings, each twice; only the second is scored."""
        at, length = 0, len(ids)
        weights[:] = 0
        while at < length:
            string = self.string(rng)
            twice = [*string, *string, 0][: length - at]
            ids[at : at + len(twice)] = twice
            weights[at + len(string) : at + len(twice)] = 1
            at += len(twice)


def copied(ids: list[int], size: int = 3) -> list[tuple[int, int]]:
    """Places whose next token continues a stretch of ``size`` tokens that stood before in the
    document, and the place of that token there."""
    places, known, begin = [], dict[tuple[int, ...], int](), 0
    for at, token in enumerate(ids[:-1]):
        if token == 0:
            known, begin = {}, at + 1
        elif at - begin + 1 >= size:
            stretch = tuple(ids[at - size + 1 : at + 1])
            if stretch in known and ids[known[stretch] + 1] == ids[at + 1]:
                places.append((at, known[stretch] + 1))
            known[stretch] = at
    return places


def drill(rng: random.Random) -> list[tuple[str, str]]:
    """Four to twelve sums, each as task and (worked) result; a third of them of single digits."""
    sums = []
    for _ in range(rng.randint(4, 12)):
        top = rng.choice((9, 99, 99))
        left, right = rng.randint(1, top), rng.randint(1, top)
        sign = rng.choice("++--*/")
        if sign == "-":
            left, right = max(left, right) + rng.choice((0, 0, 100)), min(left, right)
        elif sign == "+":
            left += rng.choice((0, 0, 100))
        elif sign == "*":
            right = rng.randint(2, 9)
        else:
            right = rng.randint(2, 10)
            left *= right
        task = f" {left} {sign} {right}"
        sums.append((task, f" {arithmetic.worked(left, sign, right)}"[len(task) :]))
    return sums


LESSONS: dict[str, Callable[[random.Random, Pool], list[tuple[str, str]]]] = {
    "drills": lambda rng, pool: drill(rng),
    "quiz": lambda rng, pool: extraction.quiz(rng),
    "edits": lambda rng, pool: rewriting.edit(rng, pool.sentences),
}
"""What teaches more per token than a family does: each makes pairs of a task and its result."""
