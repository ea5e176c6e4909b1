"""The round and the loop around it."""

from forerun.engine.loop import Engine
from forerun.engine.results import Completion, Event, Logprob, Piece, Round, Stats
from forerun.requests import Request, Sampling

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
