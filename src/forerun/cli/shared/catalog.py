"""Registered parts as lists, cards and the generated documentation show them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.resources import files
from typing import Any

from forerun.citations import BIBTEX
from forerun.errors import UnknownNameError
from forerun.registry import Registry, Spec, parse

KINDS = ("controllers", "rules", "drafters")

QUESTIONS = {
    "controllers": "how far to run ahead? With a lossless rule it only changes speed; with a lossy "
    "one it also decides which tokens are judged leniently.",
    "rules": "what to keep? It alone decides whether the output is lossless.",
    "drafters": "who runs ahead?",
}

_DRAFTER_PAPERS = {
    "model": ("leviathan2023", "chen2023"),
    "lookup": ("saxena2023",),
    "rest": ("rest2024",),
    "lookahead": ("lookahead2024",),
    "medusa": ("medusa2024",),
    "eagle": ("eagle32025",),
    "eagle3": ("eagle32025",),
    "mtp": ("deepseekv32024",),
    "suffix": ("suffix2025",),
    "shared": ("cmasd2025",),
    "block": ("specdec2023", "cmasd2025"),
    "specbound": ("specbound2026",),
    "adadecode": ("adadecode2025",),
    "kangaroo": ("kangaroo2024",),
}


@dataclass(frozen=True)
class Card:
    """One registered part."""

    kind: str
    """"controllers", "rules" or "drafters"."""
    name: str
    cls: type[Any]

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return str(getattr(self.cls, "summary", ""))

    @property
    def paper(self) -> str:
        return str(getattr(self.cls, "paper", ""))

    @property
    def lossless(self) -> bool | None:
        """Of a rule; None for others, which cannot change the output."""
        return bool(self.cls.lossless) if self.kind == "rules" else None

    @property
    def settings(self) -> list[tuple[str, str | None]]:
        """Names and defaults; None where a setting must be given."""
        if not is_dataclass(self.cls):
            return []
        out: list[tuple[str, str | None]] = []
        for f in fields(self.cls):
            if f.init:
                default = f.default_factory() if f.default_factory is not MISSING else f.default
                out.append((f.name, None if default is MISSING else _literal(default)))
        return out

    @property
    def signature(self) -> str:
        """Settings in one line: ``length=5, eta=0.3``."""
        return ", ".join(n if d is None else f"{n}={d}" for n, d in self.settings)

    @property
    def doc(self) -> str:
        """The docstring; behind its first paragraph what `methods/` has to say, if anything."""
        text = inspect.getdoc(self.cls) or self.summary
        prose = files("forerun").joinpath("methods", self.kind, f"{self.name}.md")
        if not (self.cls.__module__.startswith("forerun.") and prose.is_file()):
            return text
        first, *rest = text.split("\n\n", 1)
        return "\n\n".join([first, prose.read_text("utf-8").rstrip(), *rest])

    @property
    def bibtex(self) -> str:
        own = getattr(self.cls, "bibtex", None)
        if own is None and self.kind == "drafters":
            return "\n".join(BIBTEX[k] for k in _DRAFTER_PAPERS.get(self.name, ()))
        return str(own or "")


def _literal(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    # Text that a spec would not read as one word needs its quotes.
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.+/-]*", value)
    return value if plain else repr(value)


def registry(kind: str) -> Registry:
    """The registry of a kind; loading it may take a second (torch)."""
    if kind == "controllers":
        from forerun.controllers import CONTROLLERS

        return CONTROLLERS
    if kind == "rules":
        from forerun.rules import RULES

        return RULES
    from forerun.drafters import DRAFTERS

    return DRAFTERS


def cards(kind: str) -> list[Card]:
    """All parts of a kind, in registry order."""
    registered = registry(kind)
    return [Card(kind, name, registered.load(name)) for name in registered.names()]


def find(name: str) -> list[Card]:
    """The parts of that name (a spec names its part).

    Raises:
        UnknownNameError: with the nearest name.
        SettingError: the spec cannot be read.
    """
    part = parse(name).name
    kinds = [kind for kind in KINDS if part in registry(kind)]
    if not kinds:
        names = {n for kind in KINDS for n in registry(kind).names()}  # cm-asd is two things
        raise UnknownNameError.among("controller, rule or drafter", part, names)
    return [Card(kind, part, registry(kind).load(part)) for kind in kinds]


def names_in(text: str) -> Iterator[str]:
    """All part names in a spec, from the outside in: ``bounded(gammatune)`` names two."""
    yield from _names(parse(text))


def _names(spec: Spec) -> Iterator[str]:
    yield spec.name
    for value in (*spec.args, *spec.kwargs.values()):
        if isinstance(value, Spec):
            yield from _names(value)
