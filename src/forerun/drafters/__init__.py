"""Drafters: who runs ahead. One per file."""

from forerun.drafters.base import Drafter, DrafterSpec, Proposal
from forerun.registry import Registry

DRAFTERS = Registry(
    "drafter",
    "forerun.drafters",
    {
        "model": "forerun.drafters.model:ModelDraft",
        "lookup": "forerun.drafters.lookup:Lookup",
        "suffix": "forerun.drafters.suffix:Suffix",
        "memory": "forerun.drafters.memory:MemoryDraft",
        "chain": "forerun.drafters.chain:Chain",
        "rest": "forerun.drafters.rest:REST",
        "lookahead": "forerun.drafters.lookahead:Lookahead",
        "medusa": "forerun.drafters.medusa:Medusa",
        "shared": "forerun.drafters.shared:SharedDraft",
        "block": "forerun.drafters.block:BlockDraft",
        "eagle": "forerun.drafters.eagle:Eagle",
        "eagle3": "forerun.drafters.eagle3:Eagle3",
        "mtp": "forerun.drafters.mtp:MTP",
        "specbound": "forerun.drafters.specbound:SpecBound",
        "adadecode": "forerun.drafters.adadecode:AdaDecode",
        "kangaroo": "forerun.drafters.kangaroo:Kangaroo",
        "none": "forerun.drafters.none:NoDraft",
    },
    DrafterSpec,
)

__all__ = ["DRAFTERS", "Drafter", "DrafterSpec", "Proposal"]
