"""Greedy decoding of a small model goes in circles: what it repeats by itself is made unlikely.

Reference: Welleck et al., "Neural Text Generation with Unlikelihood Training" (ICLR 2020),
section 5.2, on sequences that the model continues itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipes.distill import complete
from recipes.packing import Batch, Packer

NGRAM = 4
"""So many tokens that stood before make a repetition."""


def repeated(ids: Sequence[int], start: int = 0, size: int = NGRAM) -> list[bool]:
    """Per token from ``start`` on: is it in a stretch of ``size`` tokens that stood before?"""
    known: set[tuple[int, ...]] = set()
    marks = [False] * len(ids)
    for end in range(size, len(ids) + 1):
        stretch = tuple(ids[end - size : end])
        if stretch in known:
            marks[end - size : end] = [True] * size
        known.add(stretch)
    return marks[start:]


def continuations(model: Any, packer: Packer, step: int) -> Batch:
    """The model's own greedy continuations of books; tokens that repeat have weight -1, others 0.

    A function of the model, the packer's seed and ``step``.
    """
    how = packer.recipe.unlikely
    rng = random.Random(f"continuations/{packer.seed}/{step}")
    prompts = [
        [int(t) for t in packer.stretch(rng.randrange(1 << 30), how.prompt)]
        for _ in range(how.rows)
    ]
    model.eval()
    outputs = complete(model, prompts, how.length - how.prompt, greedy=True)
    ids = np.zeros((how.rows, how.length), dtype=np.int64)
    weights = np.zeros((how.rows, how.length), dtype=np.float32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        text = prompt + output
        ids[row, : len(text)] = text
        weights[row, how.prompt : len(text)] = -np.array(repeated(text, how.prompt), np.float32)
    return Batch(ids, weights)
