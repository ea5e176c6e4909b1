"""`gumbel`: accept what the target draws itself, by the same noise as the draft."""

from dataclasses import dataclass

from forerun.rules.exact import ArgMaxRule


@dataclass(frozen=True)
class Gumbel(ArgMaxRule):
    """Drafter-invariant speculative sampling: both models draw by the same noise.

    Reference: Daliri et al. 2025 [daliri2025], by Gumbel sampling.
    """

    gumbel_max = True
    needs = "'gumbel' needs noise in the logits, and got none for a sampling request"
