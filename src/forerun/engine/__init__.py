"""The round and the loop around it.

Everything is loaded when it is first used: replays share modules of this package and load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.loop import Engine
    from forerun.engine.results import Completion, Event, Logprob, Piece, Round, Stats
    from forerun.requests import Request, Sampling

_HOMES = {
    "forerun.engine.loop": ("Engine",),
    "forerun.engine.results": ("Completion", "Event", "Logprob", "Piece", "Round", "Stats"),
    "forerun.requests": ("Request", "Sampling"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
