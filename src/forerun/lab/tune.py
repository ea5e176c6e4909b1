"""The name by which `forerun.lab.traces.tune` was first known; it stays."""

from forerun.lab.traces.tune import judge, tune

__all__ = ["judge", "tune"]
