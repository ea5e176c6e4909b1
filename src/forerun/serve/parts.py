"""What a request may name, for the page and other programs."""

from __future__ import annotations

from typing import Any

from forerun.controllers import CONTROLLERS
from forerun.registry import Registry
from forerun.rules import RULES
from forerun.serve.plans import Planner


def parts(planner: Planner, chats: bool) -> dict[str, Any]:
    """Controllers, rules with whether they are lossless and allowed, defaults, the model."""
    policies, facts = planner.policies, planner.facts
    rules = [
        {
            **part,
            "lossless": RULES.load(part["name"]).lossless,
            "allowed": policies.allowed(part["name"]),
        }
        for part in _list(RULES)
    ]
    return {
        "model": facts.name,
        "max_model_len": facts.limit,
        "chat": chats,
        "sampling_defaults": facts.defaults,
        "default": policies.default.to_json(),
        "controllers": _list(CONTROLLERS),
        "rules": rules,
    }


def _list(registry: Registry) -> list[dict[str, Any]]:
    made = [(name, registry.load(name)) for name in registry.names()]
    return [{"name": name, "summary": cls.summary, "paper": cls.paper} for name, cls in made]
