"""Drafters: who runs ahead. One per file."""

from forerun.drafters.base import Drafter, Proposal
from forerun.registry import Registry

DRAFTERS = Registry(
    "drafter",
    "forerun.drafters",
    {
        "model": "forerun.drafters.model:ModelDraft",
        "lookup": "forerun.drafters.lookup:Lookup",
        "specbound": "forerun.drafters.specbound:SpecBound",
        "none": "forerun.drafters.none:NoDraft",
    },
)

__all__ = ["DRAFTERS", "Drafter", "Proposal"]
