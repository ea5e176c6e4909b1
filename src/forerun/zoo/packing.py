"""Training batches: book stretches and packed task documents, a pure function of seed and step."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.zoo.recipe import Recipe
from forerun.zoo.tasks import FAMILIES, arithmetic, stories
from forerun.zoo.tasks.base import Example, Pool

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Batch:
    """``ids`` and loss ``weights`` (of predicting each position), both (rows, length)."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


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

    def batch(self, step: int, length: int, practice: float = 0.0) -> Batch:
        """The batch of ``step`` with rows of ``length`` tokens, each starting a document.

        ``practice`` in [0, 1] replaces a part of stories and rewriting by exercises in copying.
        """
        rows = max(1, self.recipe.batch_tokens // length)
        rng = random.Random(f"{self.seed}/{step}")
        used = {name: rng.random() * 200 for name in self.recipe.task_weights}
        ids = np.zeros((rows, length), dtype=np.int64)
        weights = np.ones((rows, length), dtype=np.float32)
        share, of = self.recipe.story_rows
        for row in range(rows):
            index = step * rows + row
            if index % 8 == 3 and rng.random() < practice:
                self.repeats(rng, ids[row], weights[row])
            elif index % 8 in self.recipe.drill_rows:
                self._drill(rng, ids[row], weights[row])
            elif index * share % of < share:
                ids[row] = self._stretch(index, length)
            else:
                self._fill(rng, used, ids[row], weights[row], practice)
        return Batch(ids, weights)

    def _stretch(self, index: int, length: int) -> NDArray[np.int64]:
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

    def _fill(
        self,
        rng: random.Random,
        used: dict[str, float],
        ids: NDArray[np.int64],
        weights: NDArray[np.float32],
        practice: float,
    ) -> None:
        """Packs whole task documents; the rest of the row is the beginning of a book stretch."""
        at, length = 0, len(ids)
        while True:
            name = min(used, key=lambda n: used[n] / self.recipe.task_weights[n])
            if name == "rewriting" and rng.random() < 0.7 * practice:
                example = self._short_repeat(rng)
            else:
                example = FAMILIES[name].sample(rng, "train", self.pool)
            prompt = self.tokenizer.encode(example.prompt).ids
            answer = self.tokenizer.encode(example.answer).ids
            size = len(prompt) + len(answer) + 1
            if at + size > length:
                break
            # Practice counts less: more documents of rewriting while it lasts.
            used[name] += size if name != "rewriting" else round(size / (1 + practice))
            ids[at : at + size - 1] = prompt + answer
            ids[at + size - 1] = 0
            weights[at : at + len(prompt)] = self.recipe.prompt_weights[name]
            at += size
        if at < length:
            ids[at:] = self._stretch(rng.randrange(1 << 30), length - at)

    def repeats(
        self, rng: random.Random, ids: NDArray[np.int64], weights: NDArray[np.float32]
    ) -> None:
        """Fills a row with strings of 4 to 40 tokens, each twice; only the second is scored."""
        at, length = 0, len(ids)
        weights[:] = 0
        while at < length:
            size = rng.randint(4, 40)
            if rng.random() < 0.5:
                start = rng.randrange(len(self.tokens) - size)
                string = self.tokens[start : start + size]
            else:
                top = self.tokenizer.get_vocab_size()
                string = np.array([rng.randrange(1, top) for _ in range(size)], dtype=np.int64)
            twice = np.concatenate([string, string, [0]])[: length - at]
            ids[at : at + len(twice)] = twice
            weights[at + size : at + len(twice)] = 1
            at += len(twice)

    def _drill(
        self, rng: random.Random, ids: NDArray[np.int64], weights: NDArray[np.float32]
    ) -> None:
        """Fills a row with single sums of generated problems; their results count threefold."""
        at, length = 0, len(ids)
        while at < length:
            answer = arithmetic.generate(rng, rng.choice(arithmetic.LEVELS)).answer
            for task, result in re.findall(r"( \d+ [-+*/] \d+ =)( \d+\.)", answer):
                asked = self.tokenizer.encode(task).ids
                row = (asked + self.tokenizer.encode(result).ids)[: length - at]
                ids[at : at + len(row)] = row
                weights[at : at + len(asked)] = 0.05
                weights[at + len(asked) : at + len(row)] = 3
                at += len(row)

    def _short_repeat(self, rng: random.Random) -> Example:
        """Three to nine words of different sentences to repeat, in the rewriting format."""
        sentences = self.pool.sentences
        chosen = [rng.choice(rng.choice(sentences).split()) for _ in range(rng.randint(3, 9))]
        text = " ".join(chosen)
        prompt = f"Rewrite: repeat the text.\nText: {text}\nResult:"
        return Example(prompt=prompt, answer=f" {text}")
