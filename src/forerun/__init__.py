"""forerun: adaptive speculative decoding for language models.

>>> import forerun
>>> model = forerun.load()                      # the small pair that ships with forerun
>>> done = model.generate("Once upon a time", max_new_tokens=16)
>>> done.stats.tokens
16

Everything is loaded when it is first used: importing `forerun.controllers` loads numpy only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.controllers import CONTROLLERS, LengthPolicy
    from forerun.drafters import DRAFTERS, Drafter
    from forerun.engine import Completion, Engine, Event, Piece, Round, Sampling, Stats
    from forerun.errors import (
        ForerunError,
        MissingExtraError,
        ModelError,
        PromptError,
        SettingError,
        UnknownNameError,
        UnsupportedModelError,
    )
    from forerun.model import Model, load
    from forerun.rules import RULES, AcceptanceRule

__version__ = "0.2.0.dev0"

_HOMES = "errors", "controllers", "rules", "engine", "drafters", "model"
"""Modules that have the names, in the order in which they are looked in."""

__all__ = [
    "CONTROLLERS",
    "DRAFTERS",
    "RULES",
    "AcceptanceRule",
    "Completion",
    "Drafter",
    "Engine",
    "Event",
    "ForerunError",
    "LengthPolicy",
    "MissingExtraError",
    "Model",
    "ModelError",
    "Piece",
    "PromptError",
    "Round",
    "Sampling",
    "SettingError",
    "Stats",
    "UnknownNameError",
    "UnsupportedModelError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(f"forerun.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
