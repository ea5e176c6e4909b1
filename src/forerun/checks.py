"""Checks of settings that several controllers and rules share."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from forerun.errors import require


def whole(name: str, value: object, low: int = 0) -> None:
    """Raise `SettingError` unless `value` is an integer of at least `low`."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= low
    require(good, name, value, f"a whole number of at least {low}")


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise `SettingError` unless `value` is a number in `[low, high]`."""
    good = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high
    require(good, name, value, f"a number between {low:g} and {high:g}")


def flag(name: str, value: object) -> None:
    """Raise `SettingError` unless `value` is True or False."""
    require(isinstance(value, bool), name, value, "true or false")


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `SettingError` unless `value` is one of the words."""
    require(value in choices, name, value, " or ".join(repr(c) for c in choices))
