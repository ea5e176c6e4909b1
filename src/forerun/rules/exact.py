"""`exact`: accept while the draft is the target's arg-max; greedy requests only."""

from dataclasses import dataclass

from forerun.errors import SettingError
from forerun.rules.base import AcceptanceRule, match_greedy
from forerun.types import Array, Draft, Target, Verdict


@dataclass(frozen=True)
class Exact(AcceptanceRule):
    """Accept a drafted token while it is the target's most likely token.

    Reference: Stern et al. 2018 (blockwise decoding); the greedy case of Leviathan et al. 2023
    [leviathan2023].
    """

    lossless = True
    matches_greedy = True
    takes_leaves = True
    greedy_only = True

    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Compare with the arg-max; `uniforms` is not read."""
        refuse_coins(target, "rule 'exact' needs temperature 0, got a sampling request")
        return match_greedy(draft, target.logits)


def refuse_coins(target: Target, why: str) -> None:
    """Raise `SettingError` if in some row the arg-max is not the only token."""
    if not target.greedy.all():
        row = [bool(greedy) for greedy in target.greedy].index(False)
        raise SettingError(f"{why} in row {row}; use rule 'standard'")
