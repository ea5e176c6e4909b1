"""Which cases of a table CI runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
