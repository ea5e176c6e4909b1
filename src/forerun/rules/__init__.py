"""Acceptance rules: what to keep. One method per file, on arrays of numpy or torch."""

from forerun.arrays import sample
from forerun.registry import Registry, described
from forerun.rules.base import AcceptanceRule, PositionRule

RULES = Registry("rule", "forerun.rules", described("rules"), AcceptanceRule)

__all__ = ["RULES", "AcceptanceRule", "PositionRule", "sample"]
