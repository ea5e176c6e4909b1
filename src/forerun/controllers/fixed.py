"""`fixed`: the same speculation length every round."""

from dataclasses import dataclass

from forerun.checks import Whole
from forerun.controllers.base import LengthPolicy, State


@dataclass(frozen=True)
class FixedLength(LengthPolicy):
    """Draft the same number of tokens in every round.

    Args:
        length: γ, tokens per round, ≥ 0. The default 5 is ours, inside the 4–10 range usual in
            the literature; a report should compare with the *best* length for its workload.
        tree: most nodes of a tree per round, the γ drafted ones among them, ≥ 0 (0: drafts are
            chains), of drafters that can be run along branches: a draft model and heads.

    Reference: Leviathan et al. 2023 [leviathan2023]; Chen et al. 2023 [chen2023].

    >>> controller = FixedLength(3)
    >>> controller.limit(controller.start())
    3
    """

    length: Whole = 5
    tree: Whole = 0

    def limit(self, state: State) -> int:
        return self.length
