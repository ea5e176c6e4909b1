"""`gumbel`: accept what the target draws itself, by the same noise as the draft."""

from dataclasses import dataclass

from forerun.rules.base import AcceptanceRule, match_greedy
from forerun.rules.exact import refuse_coins
from forerun.types import Array, Draft, Target, Verdict


@dataclass(frozen=True)
class Gumbel(AcceptanceRule):
    """Drafter-invariant speculative sampling: both models draw by the same noise.

    Reference: Daliri et al. 2025 [daliri2025], by Gumbel sampling.
    """

    lossless = True
    matches_greedy = True
    takes_leaves = True
    gumbel_max = True

    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Compare with the arg-max; `uniforms` is not read."""
        refuse_coins(
            target, "rule 'gumbel' needs noise in the logits, and got none for a sampling request"
        )
        return match_greedy(draft, target.logits)
