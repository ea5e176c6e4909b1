"""The exception tree. Every message says what was wrong, the value seen, and how to fix it.

::

    ForerunError
    ├── SettingError (ValueError)      a parameter is out of range or of the wrong kind
    │   └── UnknownNameError           no such controller, rule, drafter or key ("did you mean")
    ├── ModelError                     a model cannot be loaded or served
    │   ├── UnsupportedModelError      its architecture cannot work here (the reason is named)
    │   └── NumericalError             its logits are no numbers
    ├── GenerationError                a request ended in the middle; what was written is in it
    ├── PromptError (ValueError)       the prompt is no prompt, empty, or too long for the context
    └── MissingExtraError (ImportError)  an optional dependency is not installed

    ForerunWarning (UserWarning)       it works, but perhaps not as meant
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any


class ForerunError(Exception):
    """Base of every error forerun raises on purpose."""


class ForerunWarning(UserWarning):
    """Something works, but perhaps not as the user meant it; never about the library itself."""


class SettingError(ForerunError, ValueError):
    """A setting is out of range or of the wrong kind."""


class UnknownNameError(SettingError):
    """A name is not registered, or a key is not a parameter."""

    @classmethod
    def among(cls, what: str, name: str, known: Iterable[str]) -> UnknownNameError:
        """Say that `name` is no `what`, with the nearest known name."""
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        return cls(f"unknown {what} {name!r}; {hint}")


class ModelError(ForerunError):
    """A model cannot be loaded or served."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be served by a row cache; the message names the reason."""


class NumericalError(ModelError):
    """A model's logits are those of no distribution: NaN or +inf."""


class PromptError(ForerunError, ValueError):
    """The prompt is neither text nor token ids, is empty, or does not fit the context."""


class GenerationError(ForerunError):
    """A request ended with an error in the middle of its text.

    Attributes:
        completion: what was written before.
    """

    def __init__(self, message: str, completion: object = None) -> None:
        super().__init__(message)
        self.completion = completion


class MissingExtraError(ForerunError, ImportError):
    """An optional dependency is missing; the message names the extra that brings it."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingExtraError:
        """Say which extra brings `package`."""
        return cls(f"{package} is not installed; install it with: pip install 'forerun[{extra}]'")


def optional(package: str, extra: str) -> Any:
    """The module of an optional dependency, like "optuna" of the extra "lab".

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError.of(package.partition(".")[0], extra) from error


def first_line(error: BaseException) -> str:
    """One line; what a line that ends in a colon announces belongs to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines.pop(0) if lines else type(error).__name__
    while line.endswith(":") and lines:
        line = f"{line} {lines.pop(0)}"
    return line


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise `SettingError` unless `condition`: "`name` must be `wanted`, got `value`"."""
    if not condition:
        raise SettingError(f"{name} must be {wanted}, got {value!r}")
