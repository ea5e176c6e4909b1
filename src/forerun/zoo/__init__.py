"""The small pair that ships with the package: weights, prompts, scoring and the recipe.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from forerun.zoo.promptset import (
    DRAFT,
    EXITS,
    PENALTY,
    TARGET,
    Prompt,
    card,
    families,
    long_families,
    prompts,
)
from forerun.zoo.scoring import score

__all__ = [
    "DRAFT",
    "EXITS",
    "PENALTY",
    "TARGET",
    "Prompt",
    "card",
    "families",
    "long_families",
    "prompts",
    "score",
]
