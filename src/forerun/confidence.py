"""A drafter's confidence in its own token: the score of CM-ASD."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from forerun.checks import Share, Within, check
from forerun.errors import require

PARTS = {
    "entropy": "normalized_entropy",
    "margin": "logit_margin",
    "softmax": "softmax_margin",
    "variance": "logit_variance",
}
"""Each weight and the signal it weighs."""


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """CM-ASD's weighted score in [0, 1], from the drafter's distribution at temperature 1.

    `C = λ1·C_ent + λ2·C_margin + λ3·C_soft`, with `C_ent = 1 − H / log |V|`,
    `C_margin = σ(β·(z1 − z2))` of the two highest logits, `C_soft = (P1 − P2) / P1` of the two
    highest probabilities, or `P1 − P2` if not `normalized`. A weight of 1 and others of 0 give
    one confidence alone, also that of the logits' variance `s²`, which the paper names without a
    formula (§III.A): here `s² / (1 + s²)`.

    Works on numpy arrays and torch tensors alike.

    Args:
        entropy: λ1, weight of `1 − H/log|V|`, in [0, 1] (ours: equal weights).
        margin: λ2, weight of the logit margin, in [0, 1].
        softmax: λ3, weight of the softmax margin, in [0, 1]; all weights sum to 1.
        sharpness: β of the logit margin's sigmoid, > 0 (ours).
        literal: let entropy count as confidence, as printed.
        normalized: whether the softmax margin is `(P1 − P2) / P1`, or `P1 − P2`; the paper has
            both.
        variance: weight of `s² / (1 + s²)`, s² the variance of the logits, in [0, 1]; the paper
            names it besides the others, without a formula.

    Reference: CM-ASD, §III.B (1).
    """

    entropy: Share = 1 / 3
    margin: Share = 1 / 3
    softmax: Share = 1 / 3
    sharpness: Annotated[float, Within(1e-30, 1e30)] = 1.0
    literal: bool = False
    normalized: bool = True
    variance: Share = 0.0

    def __post_init__(self) -> None:
        check(self)
        total = sum(getattr(self, name) for name in PARTS)
        # Room for weights written as 0.3333 each.
        require(abs(total - 1) < 1e-3, "the sum of the weights", total, f"1 ({', '.join(PARTS)})")

    @property
    def reads(self) -> frozenset[str]:
        signals = {field for name, field in PARTS.items() if getattr(self, name) > 0}
        if self.softmax and not self.normalized:
            signals.add("top1")
        return frozenset(signals)

    def score(self, **signals: Any) -> Any:
        """`C` in [0, 1], an array like the signals.

        Args:
            signals: the fields in `reads`, as numpy arrays or torch tensors.
        """
        parts = []
        if self.entropy:
            doubt = signals["normalized_entropy"]
            parts.append(self.entropy * (doubt if self.literal else 1 - doubt))
        if self.margin:
            # σ(x) for x ≥ 0, as an expression that arrays of either library understand.
            odds = math.e ** (-self.sharpness * signals["logit_margin"])
            parts.append(self.margin / (1 + odds))
        if self.softmax:
            margin = signals["softmax_margin"]
            parts.append(self.softmax * (margin if self.normalized else margin * signals["top1"]))
        if self.variance:
            spread = signals["logit_variance"]
            parts.append(self.variance * (spread / (1 + spread)))
        return sum(parts[1:], start=parts[0])
