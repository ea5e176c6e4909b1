"""Which cases of a table CI runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest

FAMILIES = frozenset({"llama", "gpt2", "gemma"})
"""Of tables of families: gated and not, rotary and not, with one pair of keys and values."""


def slow_but(values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """The values as parameters, slow but for those that `quick` takes; a tuple is several."""
    out = []
    for value in values:
        several = value if isinstance(value, tuple) else (value,)
        marks = () if quick(*several) else pytest.mark.slow
        out.append(pytest.param(*several, marks=marks))
    return out


def spread(every: int, *axes: Sequence[Any]) -> list[Any]:
    """The product of several lists as parameters, slow but for one row in `every`: those whose
    places add up to a multiple of it, so that each value is met as often as its neighbours, and
    each pair of values is where a third list is as long."""
    out = []
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        marks = () if sum(places) % every == 0 else pytest.mark.slow
        out.append(pytest.param(*values, marks=marks))
    return out
