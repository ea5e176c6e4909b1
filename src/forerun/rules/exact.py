"""`exact`: accept while the draft is the target's arg-max; greedy requests only."""

from dataclasses import dataclass
from typing import ClassVar

from forerun.errors import SettingError
from forerun.rules.base import AcceptanceRule, match_greedy
from forerun.types import Array, Draft, Target, Verdict


class ArgMaxRule(AcceptanceRule):
    """Accepts a drafted token while it is the target's arg-max, the only token there may be."""

    lossless = True
    matches_greedy = True
    takes_leaves = True
    needs: ClassVar[str]  # for that to be so, and what it got instead

    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Compare with the arg-max; `uniforms` is not read. Raises `SettingError`."""
        if not target.greedy.all():
            row = target.greedy.tolist().index(False)
            raise SettingError(f"rule {self.needs} in row {row}; use rule 'standard'")
        return match_greedy(draft, target.logits)


@dataclass(frozen=True)
class Exact(ArgMaxRule):
    """Accept a drafted token while it is the target's most likely token.

    Reference: Stern et al. 2018 (blockwise decoding); the greedy case of Leviathan et al. 2023
    [leviathan2023].
    """

    greedy_only = True
    needs = "'exact' needs temperature 0, got a sampling request"
