"""The name by which `forerun.lab.traces.replay` was first known; it stays."""

from forerun.lab.traces.replay import Replay, replay, summarise

__all__ = ["Replay", "replay", "summarise"]
