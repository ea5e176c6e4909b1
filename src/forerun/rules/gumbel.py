"""`gumbel`: draft and target draw by the same noise, and a seed's text depends on neither draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.citations import bibtex
from forerun.errors import SettingError
from forerun.rules.base import AcceptanceRule
from forerun.rules.exact import match_greedy, sampled_row
from forerun.types import Draft, Target, Verdict


@dataclass(frozen=True)
class Gumbel(AcceptanceRule):
    """Drafter-invariant speculative sampling: both models draw by the same noise.

    *Helps* requests that sample: with a seed their text is that of plain decoding, token for token
    (but for floating-point near-ties), whatever drafts and however far; so drafts may go by the
    clock and be thrown away. What the noise leaves of the draft's doubt tells better than the draft
    alone whether a token will be kept, and judging is a comparison. *Hurts* a little where the
    models differ: of two distributions at a total variation of `D` it keeps at least
    `(1 − D)/(1 + D)`, `standard` `1 − D`, which is the most there is.

    Rule: with `g_v` i.i.d. Gumbel(0, 1), made of the request's seed and prompt and the place in its
    text, the draft proposes `argmax_v log draft(v) + g_v`; it is accepted if it is
    `argmax_v log target(v) + g_v`, and that is the correction, and the bonus. So every token is
    drawn from the target by that place's own noise. At temperature T it is added to logits as
    `T·g_v`, which is the same and tends to greedy decoding, whose requests have none: `exact`.

    Rows come with the noise in their logits, as certain as greedy ones (`Target.greedy`).

    Reference: Daliri et al. 2025, "Drafter-Invariant Speculative Decoding" by Gumbel sampling.
    """

    summary: ClassVar[str] = "accept what the target draws itself, by the same noise as the draft"
    paper: ClassVar[str] = "Daliri et al. 2025"
    bibtex: ClassVar[str] = bibtex("daliri2025")
    lossless: ClassVar[bool] = True
    matches_greedy: ClassVar[bool] = True
    gumbel_max: ClassVar[bool] = True

    def decide(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Compare with the arg-max; `uniforms` is not read."""
        if (row := sampled_row(target)) is not None:
            raise SettingError(
                "rule 'gumbel' judges logits that hold a request's noise, and a sampling request "
                f"in row {row} has none; use rule 'standard'"
            )
        return match_greedy(draft, target.logits)
