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

_HOMES = {
    "forerun.controllers": ("CONTROLLERS", "LengthPolicy"),
    "forerun.drafters": ("DRAFTERS", "Drafter"),
    "forerun.engine": ("Completion", "Engine", "Event", "Piece", "Round", "Sampling", "Stats"),
    "forerun.errors": (
        "ForerunError",
        "MissingExtraError",
        "ModelError",
        "PromptError",
        "SettingError",
        "UnknownNameError",
        "UnsupportedModelError",
    ),
    "forerun.model": ("Model", "load"),
    "forerun.rules": ("RULES", "AcceptanceRule"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
