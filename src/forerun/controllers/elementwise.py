"""Arithmetic that is the same for one request and for many.

A policy is written once, for one request. Live its numbers are Python's own, for which an operation
takes a few dozen nanoseconds; in a replay they are arrays over prompts, and every expression works
element by element. `+ - * / < & |` do that by themselves, what they lack is here.

A *tree* is what states and memos are made of: numbers, arrays and (named) tuples of them. In a
replay every leaf has one more axis, the last: the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import numpy as np

from forerun.types import IntArray

_Array = np.ndarray
_Function = TypeVar("_Function", bound=Callable[..., Any])


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`; both were computed."""
    if isinstance(condition, _Array):
        return np.where(condition, yes, no)
    return yes if condition else no


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


def entry(table: Any, place: Any) -> Any:
    """One entry of a table `(size,)`, or one per request of `(size, prompts)`."""
    return table[at(place)] if isinstance(place, _Array) else table.item(place)


def at(place: Any) -> Any:
    """The index of that entry."""
    return (place, np.arange(len(place))) if isinstance(place, _Array) else place


def entries(table: Any) -> Any:
    """A view of a table whose entries are read and written by that index."""
    return table.data if table.ndim == 1 else table  # of one request: Python's own numbers


def interpolated(table: list[float], place: Any, slope: float) -> Any:
    """A table's entry at a place ≥ 0, linear between two of them and by the slope beyond."""
    last = len(table) - 1
    if isinstance(place, _Array):
        beyond = np.maximum(place - last, 0)
        return np.interp(place, np.arange(last + 1), table) + slope * beyond
    if place >= last:
        return table[last] + slope * (place - last)
    whole = int(place)
    return table[whole] + (table[whole + 1] - table[whole]) * (place - whole)


def anywhere(condition: Any) -> bool:
    """Whether it holds for any request."""
    return bool(condition.any() if isinstance(condition, _Array) else condition)


def largest(x: Any) -> int:
    """The largest of whole numbers ≥ 0; 0 if there are none."""
    return int(x.max(initial=0) if isinstance(x, _Array) else x)


def spread(tree: Any, prompts: int) -> Any:
    """A tree of one request for as many as there are prompts."""
    return mapped(lambda leaf: np.repeat(np.asarray(leaf)[..., None], prompts, axis=-1), tree)


def filled(tree: Any, prompts: int) -> Any:
    """A tree of so many requests whose leaves may be numbers that all of them share."""
    return mapped(lambda leaf: leaf if isinstance(leaf, _Array) else np.full(prompts, leaf), tree)


def taken(tree: Any, index: IntArray) -> Any:
    """A tree of these requests only. Numbers that all of them share stay as they are."""
    return mapped(lambda leaf: leaf.take(index, -1) if isinstance(leaf, _Array) else leaf, tree)


def joined(one: Any, other: Any) -> Any:
    """A tree of the requests of both."""
    return mapped(lambda a, b: np.concatenate([a, b], axis=-1), one, other)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """The one tree where the condition holds, else the other."""
    if not isinstance(condition, _Array):
        return yes if condition else no
    return mapped(lambda a, b: np.where(condition, a, b), yes, no)


def remembered(function: _Function) -> _Function:
    """A pure function that is often asked the same of one request; it has the newest results at
    hand, but for those of arrays.

    >>> asked = []
    >>> double = remembered(lambda x: asked.append(x) or 2 * x)
    >>> double(2), double(2), double(np.array([3])).tolist(), asked
    (4, 4, [6], [2, array([3])])
    """
    known = lru_cache(64)(function)

    @wraps(function)
    def ask(*args: Any) -> Any:
        try:
            return known(*args)
        except TypeError:  # arrays have no hash
            return function(*args)

    return ask  # type: ignore[return-value]


def mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """A function of the leaves of trees of one shape."""
    if not isinstance(trees[0], tuple):
        return None if trees[0] is None else function(*trees)
    parts = [mapped(function, *leaves) for leaves in zip(*trees, strict=True)]
    kind = type(trees[0])
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
