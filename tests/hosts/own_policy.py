"""A length policy of a package of its own: this one file, and an entry point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forerun.controllers.base import LengthPolicy
from forerun.controllers.elementwise import where

ENTRY_POINT = "[forerun.controllers]\nalternating = own_policy:Alternating\n"


class Place(NamedTuple):
    """How many rounds there were, modulo 2."""

    odd: int = 0


@dataclass(frozen=True)
class Alternating(LengthPolicy):
    """Draft `one` tokens, then `other`, and so on.

    Args:
        one: tokens of the first round, ≥ 0.
        other: of the second.
    """

    one: int = 4
    other: int = 1

    def start(self, certain: bool = True, before: Any = None) -> Place:
        return Place()

    def limit(self, state: Place) -> int:
        lengths: int = where(state.odd > 0, self.other, self.one)
        return lengths

    def observe(self, state: Place, round: Any) -> Place:
        return Place(1 - state.odd)


def install(folder: Path) -> None:
    """As `pip install` would: the module, and what says that it is there."""
    (folder / "own_policy.py").write_text(Path(__file__).read_text())
    about = folder / "own_policy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINT)
