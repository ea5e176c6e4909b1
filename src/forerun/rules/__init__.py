"""Acceptance rules: what to keep. One method per file, on arrays of numpy or torch."""

from forerun.arrays import sample
from forerun.registry import Registry
from forerun.rules.base import AcceptanceRule, PositionRule

RULES = Registry(
    "rule",
    "forerun.rules",
    {
        "exact": "forerun.rules.exact:Exact",
        "standard": "forerun.rules.standard:Standard",
        "gumbel": "forerun.rules.gumbel:Gumbel",
        "block": "forerun.rules.block:Block",
        "ears": "forerun.rules.ears:EARS",
        "easd": "forerun.rules.easd:EASD",
        "cm-asd": "forerun.rules.cm_asd:CMASDRule",
        "spec-verification": "forerun.rules.spec_verification:SpecVerification",
        "typical": "forerun.rules.typical:Typical",
        "ensemble": "forerun.rules.ensemble:Ensemble",
        "fly": "forerun.rules.fly:FLy",
        "priced": "forerun.rules.priced:Priced",
        "budget": "forerun.rules.budget:Budget",
        "no-bonus": "forerun.rules.no_bonus:NoBonus",
    },
    AcceptanceRule,
)

__all__ = ["RULES", "AcceptanceRule", "PositionRule", "sample"]
