"""Which controller and rule a request gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from forerun.controllers import CONTROLLERS, Controller
from forerun.registry import Registry
from forerun.rules import RULES, AcceptanceRule
from forerun.serve.config import ALL_RULES, Config
from forerun.serve.errors import ApiError, bad, blaming
from forerun.serve.protocol import Generation, SpeculativeFields

PLAIN = "fixed(0)"
"""The controller of `"speculative": false`."""


@dataclass(frozen=True)
class Policy:
    """How one request runs ahead, and how much it is told of that."""

    controller: Controller
    rule: AcceptanceRule
    report: str = "none"

    def to_json(self) -> dict[str, Any]:
        return {
            "controller": CONTROLLERS.text(self.controller),
            "rule": RULES.text(self.rule),
            "lossless": self.rule.lossless,
        }


class Policies:
    """Makes policies of requests, within what the operator allows."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.default = Policy(CONTROLLERS.make(config.controller), RULES.make(config.rule))
        if ALL_RULES not in config.allowed_rules:
            for name in config.allowed_rules:
                RULES.load(name)

    def of(self, request: Generation) -> Policy:
        """The policy of a request; `ApiError` for a spec that cannot be made, or a lossy rule that
        is not allowed."""
        asked, field = _asked(request)
        if asked is False:
            return Policy(CONTROLLERS.make(PLAIN), RULES.make("gumbel"))
        if asked is None or asked is True:
            return self.default
        with blaming(field):
            own = self.default
            name, kept = asked.controller, asked.rule
            controller = own.controller if name is None else CONTROLLERS.make(name)
            rule = own.rule if kept is None else RULES.make(kept)
        if rule != self.default.rule:
            self._permit(rule, field)
        return Policy(controller, rule, asked.report or self.default.report)

    def allowed(self, rule: str) -> bool:
        cls = RULES.load(rule)
        return cls.lossless or bool({rule, ALL_RULES} & self._config.allowed_rules)

    def to_json(self) -> dict[str, Any]:
        """What requests may name, and what is taken where they name nothing."""
        rules = _listed(RULES)
        for part in rules:
            name = part["name"]
            part |= {"lossless": RULES.load(name).lossless, "allowed": self.allowed(name)}
        controllers = _listed(CONTROLLERS)
        return {"default": self.default.to_json(), "controllers": controllers, "rules": rules}

    def _permit(self, rule: AcceptanceRule, field: str) -> None:
        if rule.lossless:
            return
        for name in _names(rule):
            if not self.allowed(name):
                raise ApiError(
                    403,
                    f"rule {name!r} is lossy and this server does not allow it; use a lossless "
                    f"one, or have the operator start it with --allow-rule {name}",
                    field,
                    "rule_not_allowed",
                )


def _listed(registry: Registry) -> list[dict[str, Any]]:
    made = [(name, registry.load(name)) for name in registry.names()]
    return [{"name": name, "summary": cls.summary, "paper": cls.paper} for name, cls in made]


def _names(rule: AcceptanceRule) -> Iterator[str]:
    """Of a rule and of the rules inside it."""
    yield RULES.text(rule).partition("(")[0]
    if is_dataclass(rule):
        for f in fields(rule):
            inner = getattr(rule, f.name)
            if isinstance(inner, AcceptanceRule):
                yield from _names(inner)


def _asked(request: Generation) -> tuple[bool | SpeculativeFields | None, str]:
    """`speculative`, or vLLM's flat spelling of it, and the field it stood in."""
    flat = request.vllm_xargs
    if flat is None or not flat.model_fields_set:
        return request.speculative, "speculative"
    if request.speculative is not None:
        raise bad("give speculative or vllm_xargs, not both", "vllm_xargs")
    return flat, "vllm_xargs"
