"""The round and the loop around it.

Everything is loaded when it is first used: replays share modules of this package and load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.loop import Engine
    from forerun.engine.results import Completion, Event, Logprob, Piece, Round, Stats
    from forerun.requests import Request, Sampling

_HOMES = "forerun.requests", "forerun.engine.results", "forerun.engine.loop"

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "Logprob",
    "Piece",
    "Request",
    "Round",
    "Sampling",
    "Stats",
]


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(home), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
