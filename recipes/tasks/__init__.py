"""The task families, by name: six with short outputs, three with long ones."""

from __future__ import annotations

from types import ModuleType

from recipes.tasks import (
    arithmetic,
    chat,
    extraction,
    revision,
    rewriting,
    stories,
    tales,
    tours,
    translation,
)

FAMILIES: dict[str, ModuleType] = {
    module.NAME: module
    for module in (stories, translation, arithmetic, extraction, rewriting, chat)
}
LONG_FAMILIES: dict[str, ModuleType] = {module.NAME: module for module in (tales, tours, revision)}
"""Outputs of 100 to 500 tokens."""
