"""`no-bonus`: another rule, on every token of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.rules.base import WrappedRule


@dataclass(frozen=True)
class NoBonus(WrappedRule):
    """A lossy rule without the target's own token after a draft that is kept whole.

    *Helps* to compare controllers and lengths under a lossy rule: such a bonus token is judged by
    nobody, so how far is drafted decides which tokens are judged leniently. Without it all are, and
    a greedy text is the same for every controller that drafts in every round (`fixed`,
    `gammatune`, ...). *Hurts* speed, by a token per round that was kept whole.

    Rule: that of the inner rule; a draft that is kept whole ends its round.

    Args:
        rule: the lossy rule; one that decides position by position (all of ours do). One that looks
            at later positions (`fly`) still depends on how far was drafted.

    >>> from forerun.rules import RULES
    >>> RULES.make("no-bonus(cm-asd)").has_bonus
    False
    """

    summary: ClassVar[str] = "another rule, without the untested token after a whole draft"

    @property
    def has_bonus(self) -> bool:
        """No."""
        return False
