"""Methods and other implementations side by side, and the report of it."""

from forerun.lab.bench.bench import Results, load, measure

__all__ = ["Results", "load", "measure"]
