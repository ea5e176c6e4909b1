"""The small models that ship with the package: weights, prompts, scoring.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from forerun.zoo.promptset import (
    DIGEST,
    DRAFT,
    EXITS,
    NAMES,
    PENALTY,
    SOURCES,
    TARGET,
    TRANSLATOR,
    ShippedPrompt,
    card,
    families,
    is_shipped,
    locate,
    long_families,
    prompts,
    smollm2,
    sources,
)
from forerun.zoo.scoring import score

__all__ = [
    "DIGEST",
    "DRAFT",
    "EXITS",
    "NAMES",
    "PENALTY",
    "SOURCES",
    "TARGET",
    "TRANSLATOR",
    "ShippedPrompt",
    "card",
    "families",
    "is_shipped",
    "locate",
    "long_families",
    "prompts",
    "score",
    "smollm2",
    "sources",
]
