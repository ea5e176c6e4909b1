"""`cm-asd`: as many tokens as the drafter's mean confidence suggests."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from forerun.checks import Count, Within
from forerun.confidence import Confidence
from forerun.controllers.base import LengthPolicy
from forerun.controllers.elementwise import clip, floor, maximum, where
from forerun.types import Token


class CMASDState(NamedTuple):
    """State of `CMASD`."""

    two_pass: bool  # whether the literal form runs


class CMASDDraft(NamedTuple):
    """Of a round so far."""

    tokens: int  # how many, > 0
    total: float  # sum of their confidences


@dataclass(frozen=True)
class CMASD(Confidence, LengthPolicy):
    """CM-ASD's window: the mean confidence of the drafted tokens, times the longest length.

    Args:
        alpha: α, aggressiveness, in (0, 1]. The paper gives no value; this and `high` are ours, by
            a sweep over validation prompts (`benchmarks/results/sweep.md`).
        low: k_min, tokens, ≥ 1 (ours).
        high: k_max, tokens, ≥ low (ours; see `alpha`).
        two_pass: the literal form. Where coins decide the tokens the incremental one runs: a choice
            among drafts by what they say would make sampling lossy.

    Reference: Sen et al. 2025 (CM-ASD) [cmasd2025], §III.B (1) and (b).
    """

    alpha: Annotated[float, Within(0, above=True)] = 0.7
    low: Count = 1
    high: Count = 12
    two_pass: bool = False
    stops_early = True
    rising = ("low", "high")

    def signals(self, certain: bool) -> frozenset[str]:
        return self.reads

    def start(self, certain: bool = True, before: Any = None) -> CMASDState:
        return CMASDState(self.two_pass and certain)

    def limit(self, state: CMASDState) -> int:
        return self.high

    def step(
        self, state: CMASDState, memo: CMASDDraft | None, token: Token
    ) -> tuple[bool, CMASDDraft | None]:
        """Whether fewer tokens are drafted than their mean confidence suggests; the literal form
        drafts them all. The memo is None without a distribution."""
        wanted = {name: getattr(token, name) for name in self.reads}
        if any(value is None for value in wanted.values()):
            return True, memo
        count, total = memo or CMASDDraft(0, 0.0)
        memo = CMASDDraft(count + 1, total + self.score(**wanted))
        return state.two_pass | (memo.tokens < self._length(memo)), memo

    def trim(self, state: CMASDState, memo: CMASDDraft | None) -> int:
        """All beyond k of the tokens, in the literal form."""
        if memo is None:
            return 0
        beyond = maximum(memo.tokens - self._length(memo), 0)
        return where(state.two_pass, beyond, 0)

    def _length(self, drafted: CMASDDraft) -> int:
        # Rounding in a mean of ones must not cost a token.
        wanted = floor(self.alpha * drafted.total / drafted.tokens * self.high + 1e-9)
        return clip(wanted, self.low, self.high)
