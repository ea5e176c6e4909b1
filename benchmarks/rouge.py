"""ROUGE-1, -2 and -L (Lin 2004) as the package rouge-score has them, without stemming."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np


def rouge(references: Sequence[str], texts: Sequence[str]) -> tuple[float, float, float]:
    """Mean F1 in percent of the shared words, pairs of words, and the longest common subsequence.

    Words are runs of Latin letters and digits, in lower case.
    """
    rows = []
    for pair in zip(references, texts, strict=True):
        wanted, candidate = (re.findall("[a-z0-9]+", text.lower()) for text in pair)
        rows.append(
            (
                _grams(wanted, candidate, 1),
                _grams(wanted, candidate, 2),
                _longest(wanted, candidate),
            )
        )
    one, two, longest = 100 * np.mean(rows, axis=0)
    return float(one), float(two), float(longest)


def _f1(shared: int, wanted: int, candidate: int) -> float:
    return 2 * shared / (wanted + candidate) if shared else 0.0


def _grams(wanted: list[str], candidate: list[str], n: int) -> float:
    a, b = (
        Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (wanted, candidate)
    )
    return _f1((a & b).total(), a.total(), b.total())


def _longest(wanted: list[str], candidate: list[str]) -> float:
    before = [0] * (len(candidate) + 1)
    for word in wanted:
        row = [0]
        for j, other in enumerate(candidate):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
        before = row
    return _f1(before[-1], len(wanted), len(candidate))
