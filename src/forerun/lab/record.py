"""The name by which `forerun.lab.traces.record` was first known; it stays."""

from forerun.lab.traces.record import Task, record

__all__ = ["Task", "record"]
