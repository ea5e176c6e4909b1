"""Arithmetic that is the same for one request and for many.

A policy is written once, for one request. Live its numbers are Python's own, for which an operation
takes a few dozen nanoseconds; in a replay they are arrays over prompts, and every expression works
element by element. `+ - * / < & |` do that by themselves, what they lack is here.

A *tree* is what states and memos are made of: numbers, arrays and (named) tuples of them. In a
replay every leaf has one more axis, the last: the prompts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forerun.types import IntArray

_Array = np.ndarray


def where(condition: Any, yes: Any, no: Any) -> Any:
    """The one tree where the condition holds, else the other; both were computed."""
    if not isinstance(condition, _Array):
        return yes if condition else no
    if not isinstance(yes, tuple):
        return np.where(condition, yes, no)
    return mapped(lambda a, b: np.where(condition, a, b), yes, no)


def minimum(a: Any, b: Any) -> Any:
    """The smaller one."""
    if isinstance(a, _Array) or isinstance(b, _Array):
        return np.minimum(a, b)
    return a if a <= b else b


def maximum(a: Any, b: Any) -> Any:
    """The larger one."""
    if isinstance(a, _Array) or isinstance(b, _Array):
        return np.maximum(a, b)
    return a if a >= b else b


def clip(x: Any, low: float, high: float) -> Any:
    """At least `low` and at most `high`, which are numbers."""
    if isinstance(x, _Array):
        return np.minimum(np.maximum(x, low), high)
    return low if x < low else high if x > high else x


def sigmoid(x: Any) -> Any:
    """Probability of log-odds above −700."""
    return 1 / (1 + (np.exp(-x) if isinstance(x, _Array) else math.exp(-x)))


def log(x: Any) -> Any:
    """Natural logarithm of numbers > 0."""
    return np.log(x) if isinstance(x, _Array) else math.log(x)


def sqrt(x: Any) -> Any:
    """Square root of numbers ≥ 0."""
    return np.sqrt(x) if isinstance(x, _Array) else math.sqrt(x)


def ceil(x: Any) -> Any:
    """The next whole number, as an integer."""
    return np.ceil(x).astype(np.int64) if isinstance(x, _Array) else math.ceil(x)


def floor(x: Any) -> Any:
    """The whole number below, as an integer."""
    return np.floor(x).astype(np.int64) if isinstance(x, _Array) else math.floor(x)


def picked(values: tuple[Any, ...], index: Any) -> Any:
    """One of some constants, by its place."""
    return np.array(values)[index] if isinstance(index, _Array) else values[index]


def entry(table: Any, index: Any) -> Any:
    """The number at a place of a table, of as many tables as there are places."""
    if isinstance(index, _Array):
        return np.take_along_axis(table, index[None], 0)[0]
    return float(table[index])


def entries(table: Any) -> Any:
    """A view of a table whose entries are read and written by that index."""
    return table.data if table.ndim == 1 else table  # of one request: Python's own numbers


def anywhere(condition: Any) -> bool:
    """Whether it holds for any request."""
    return bool(condition.any() if isinstance(condition, _Array) else condition)


def largest(x: Any) -> int:
    """The largest of whole numbers ≥ 0; 0 if there are none."""
    return int(x.max(initial=0) if isinstance(x, _Array) else x)


def column(tree: Any, prompt: int) -> Any:
    """One request of a tree of many, in Python's own numbers."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, _Array):
            return leaf
        return leaf[..., prompt].copy() if leaf.ndim > 1 else leaf[prompt].item()

    return mapped(one, tree)


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of as many requests as there are trees of one, at least one."""
    return mapped(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves], -1), *trees)


def taken(tree: Any, index: IntArray) -> Any:
    """A tree of these requests only. Numbers that all of them share stay as they are."""
    return mapped(lambda leaf: leaf.take(index, -1) if isinstance(leaf, _Array) else leaf, tree)


def joined(one: Any, other: Any) -> Any:
    """A tree of the requests of both."""
    return mapped(lambda a, b: np.concatenate([a, b], axis=-1), one, other)


def mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """A function of the leaves of trees of one shape."""
    if not isinstance(trees[0], tuple):
        return None if trees[0] is None else function(*trees)
    parts = [mapped(function, *leaves) for leaves in zip(*trees, strict=True)]
    kind = type(trees[0])
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
