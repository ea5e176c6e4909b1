"""Governors: what the rows of a pass draft together, weighed against what it costs."""

from forerun.governors.base import Governor, Outcome, Plan, Seat

__all__ = ["Governor", "Outcome", "Plan", "Seat"]
