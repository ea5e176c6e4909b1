"""The six task families, by name."""

from __future__ import annotations

from types import ModuleType

from forerun.zoo.tasks import (
    arithmetic,
    chat,
    extraction,
    rewriting,
    stories,
    translation,
)

FAMILIES: dict[str, ModuleType] = {
    module.NAME: module
    for module in (stories, translation, arithmetic, extraction, rewriting, chat)
}
