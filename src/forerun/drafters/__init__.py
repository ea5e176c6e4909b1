"""Drafters: who runs ahead. One per file."""

from forerun.drafters.base import Drafter, DrafterSpec, Proposal
from forerun.registry import Registry, described

DRAFTERS = Registry("drafter", "forerun.drafters", described("drafters"), DrafterSpec)

__all__ = ["DRAFTERS", "Drafter", "DrafterSpec", "Proposal"]
