"""The round and the loop around it."""

from forerun.engine.loop import Engine
from forerun.engine.results import Completion, Event, Piece, Round, Stats
from forerun.engine.sampling import Sampling

__all__ = ["Completion", "Engine", "Event", "Piece", "Round", "Sampling", "Stats"]
