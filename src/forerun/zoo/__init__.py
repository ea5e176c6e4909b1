"""The small models that ship with the package: weights, prompts, scoring and the recipe.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from forerun.zoo.promptset import (
    DRAFT,
    EXITS,
    NAMES,
    PENALTY,
    TARGET,
    TRANSLATOR,
    Prompt,
    card,
    families,
    is_shipped,
    locate,
    long_families,
    prompts,
    sources,
)
from forerun.zoo.scoring import score

__all__ = [
    "DRAFT",
    "EXITS",
    "NAMES",
    "PENALTY",
    "TARGET",
    "TRANSLATOR",
    "Prompt",
    "card",
    "families",
    "is_shipped",
    "locate",
    "long_families",
    "prompts",
    "score",
    "sources",
]
