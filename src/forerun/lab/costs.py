"""The name by which `forerun.lab.traces.costs` was first known; it stays."""

from forerun.lab.traces.costs import Cell, Costs, Spread

__all__ = ["Cell", "Costs", "Spread"]
