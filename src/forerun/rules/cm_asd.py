"""`cm-asd`: keep near-best tokens, by a margin that moves with the drafter's confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.checks import between, choice, whole
from forerun.citations import bibtex
from forerun.confidence import Confidence
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.rules.spec_verification import within


@dataclass(frozen=True)
class CMASD(Confidence, PositionRule):
    """CM-ASD's confidence-modulated verification: top β, and a gap of at most τ_t.

    *Helps* where the drafter knows when it is right: near-misses are kept where it is sure, and
    refused where it is not. *Hurts* like `spec-verification` where the second best token is wrong.
    It is lossy, also for greedy requests: watch the drift.

    Rule: accept `x` if `log p(x) ≥ log p(y^(β))` and `log p(y^(1)) − log p(x) ≤ τ_t`, with
    `τ_t = τ_base + γ·C_t` (`mode="prose"`) or `τ_t = τ_base + γ·(1 − C_t)` (`mode="formula"`) and
    `C_t` the drafter's confidence at that position (`forerun.confidence`). The first failure ends
    the round and a token of the target's own takes its place. γ = 0 is `spec-verification`.

    The paper's formula is lenient where the drafter is unsure, its text and Figure 1 say the
    opposite: both readings are here.

    With sampling the test is put to the processed target distribution and the replacement is
    drawn from it, while confidences are always those of temperature 1; lossy as well. The paper
    defines greedy decoding only. Confidences are of the draft's own logits, before penalties and
    biases: how sure the drafter is of its token does not depend on what a request forbids. (Those
    of the controller are after them: it wants to know what is drafted next.)

    A bonus token is the target's own, so how far is drafted decides which tokens are judged
    (`no-bonus` judges all).

    Args:
        mode: `prose` (lenient where sure) or `formula` (as printed).
        top: β, ranks of the target that count, ≥ 1 (ours).
        tau: τ_base in nats, ≥ 0 (0.1 in the paper's example).
        gamma: γ in nats, ≥ 0: how much the margin moves (ours).
        entropy: λ1, weight of `1 − H/log|V|`, in [0, 1] (ours: equal weights).
        margin: λ2, weight of the logit margin, in [0, 1].
        softmax: λ3, weight of the softmax margin, in [0, 1]; all weights sum to 1.
        sharpness: β of the logit margin's sigmoid, > 0 (ours).
        literal: let entropy count as confidence, as printed.
        normalized: whether the softmax margin is `(P1 − P2) / P1`, or `P1 − P2`; the paper has
            both.
        variance: weight of `s² / (1 + s²)`, s² the variance of the logits, in [0, 1]; the paper
            names it besides the others, without a formula.

    Reference: CM-ASD, §III.B (c).
    """

    mode: str = "prose"
    top: int = 3
    tau: float = 0.1
    gamma: float = 0.4

    summary: ClassVar[str] = "keep near-best tokens, by a margin that follows the confidence"
    paper: ClassVar[str] = "Sen et al. 2025 (CM-ASD)"
    bibtex: ClassVar[str] = bibtex("cmasd2025")
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("mode", self.mode, ("prose", "formula"))
        whole("top", self.top, 1)
        between("tau", self.tau, 0, 100)
        between("gamma", self.gamma, 0, 100)

    @property
    def signals(self) -> frozenset[str]:
        """What the confidence is made of."""
        return self.reads

    def weigh(self, odds: Odds) -> Weighed:
        """0 or 1."""
        sure = self.score(**odds.draft.signals).to(odds.dtype)
        lenient = sure if self.mode == "prose" else 1 - sure
        return within(odds, self.top, (self.tau + self.gamma * lenient).unsqueeze(-1))
