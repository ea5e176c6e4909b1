"""`no-bonus`: another rule, without the untested token after a whole draft."""

from dataclasses import dataclass

from forerun.rules.base import WrappedRule


@dataclass(frozen=True)
class NoBonus(WrappedRule):
    """A lossy rule without the target's own token after a draft that is kept whole.

    Args:
        rule: the lossy rule; one that decides position by position (all of ours do). One that looks
            at later positions (`fly`) still depends on how far was drafted.

    >>> from forerun.rules import RULES
    >>> RULES.make("no-bonus(cm-asd)").has_bonus
    False
    """

    has_bonus = False
