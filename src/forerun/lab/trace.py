"""The name by which `forerun.lab.traces.trace` was first known; it stays."""

from forerun.lab.traces.trace import Trace, concatenate

__all__ = ["Trace", "concatenate"]
