"""Acceptance rules: what to keep. torch only; one method per file."""

from forerun.registry import Registry
from forerun.rules.base import AcceptanceRule, sample

RULES = Registry(
    "rule",
    "forerun.rules",
    {
        "exact": "forerun.rules.exact:Exact",
        "standard": "forerun.rules.standard:Standard",
    },
    AcceptanceRule,
)

__all__ = ["RULES", "AcceptanceRule", "sample"]
