"""`gumbel`: draft and target draw by the same noise, and a seed's text depends on neither draft."""

from dataclasses import dataclass
from typing import ClassVar

from forerun.rules.base import AcceptanceRule, match_greedy
from forerun.rules.exact import refuse_coins
from forerun.types import Array, Draft, Target, Verdict


@dataclass(frozen=True)
class Gumbel(AcceptanceRule):
    """Drafter-invariant speculative sampling: both models draw by the same noise.

    Reference: Daliri et al. 2025, "Drafter-Invariant Speculative Decoding" by Gumbel sampling.
    """

    summary: ClassVar[str] = "accept what the target draws itself, by the same noise as the draft"
    paper: ClassVar[str] = "Daliri et al. 2025"
    bibtex: ClassVar[str] = "daliri2025"
    lossless: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True
    takes_leaves: ClassVar[bool] = True
    gumbel_max: ClassVar[bool] = True

    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Compare with the arg-max; `uniforms` is not read."""
        refuse_coins(
            target, "rule 'gumbel' needs noise in the logits, and got none for a sampling request"
        )
        return match_greedy(draft, target.logits)
