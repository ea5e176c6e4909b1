"""Checks of settings that several controllers and rules share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from numbers import Real
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from forerun.errors import PromptError, SettingError, require

Bytes = Annotated[int, "bytes"]  # a number of bytes, which options take as text: see `size`
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Within:
    """Of a setting's annotation: between which numbers it is; a whole number has no upper bound."""

    low: float
    high: float = 1
    above: bool = False  # whether it must be more than `low`


class Named(NamedTuple):
    """Of a setting's annotation: what its text names, or what it is an instance of, in words."""

    wanted: str
    empty: bool = False  # whether it may name nothing


Share = Annotated[float, Within(0)]
Whole = Annotated[int, Within(0)]
Count = Annotated[int, Within(1)]


def check(part: Any, whose: str = "") -> None:
    """Raise `SettingError` unless the settings of a dataclass are what their annotations say: one
    of the words of a `Literal`, true or false, a number `Within` bounds, what is `Named`; or None,
    or text, where it may be. Of those that its class lists as `rising`, none is above the next.
    `whose` begins their names in the message.
    """
    for name, hint in _hints(part.__class__).items():
        value, kinds = getattr(part, name), get_args(hint)
        if type(None) in kinds:
            hint = kinds[0]
            if value is None or (str in kinds and isinstance(value, str)):
                continue
        name = f"{whose} {name}".strip()
        kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if get_origin(kind) is Literal:
            choice(name, value, get_args(kind))
        elif kind is bool:
            flag(name, value)
        for bound in bounds:
            if isinstance(bound, Named):
                good = isinstance(value, kind) and (bound.empty or value != "")
                require(good, name, value, bound.wanted)
            elif kind is int:
                whole(name, value, int(bound.low))
            else:
                between(name, value, bound.low, bound.high)
                good = not bound.above or value > bound.low
                require(good, name, value, f"above {bound.low:g}")
    for name, other in pairwise(getattr(part, "rising", ())):
        value, most = getattr(part, name), getattr(part, other)
        good = most is None or value <= most
        require(good, f"{whose} {name}".strip(), value, f"at most {other}={most}")


@cache
def _hints(part: type[Any]) -> dict[str, Any]:
    """Of the settings; none of somebody's own class whose types are behind `TYPE_CHECKING`."""
    try:
        hints = get_type_hints(part, include_extras=True)
    except NameError:
        return {}
    return {name: hint for name, hint in hints.items() if name in part.__dataclass_fields__}


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


def encodable(text: str, name: str) -> str:
    """The text, if a tokenizer can read it; else `PromptError`, which calls it by the name."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name} holds half a character (a lone surrogate) at place {error.start}: "
            f"{text[error.start]!r}; decode its bytes with errors='replace'"
        ) from error
    return str(text)


def size(text: str) -> int:
    """Bytes from text.

    >>> size("8GB"), size("512 MiB"), size("1000")
    (8000000000, 536870912, 1000)
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise SettingError(f"cannot read the size {text!r}; write a number with KB, MB or GB")
    number, unit, binary = match.groups()
    power = list(_UNITS).index(unit.upper())
    return round(float(number) * (1024**power if binary else _UNITS[unit.upper()]))
