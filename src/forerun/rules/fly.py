"""`fly`: forgive a mismatch if the target agrees with what the draft says after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.checks import between, whole
from forerun.rules.base import ComparedRow, PositionRule
from forerun.rules.odds import Odds, Weighed
from forerun.signals import entropy


@dataclass(frozen=True)
class FLy(PositionRule):
    """FLy's two tiers for greedy requests: an entropy gate, then a deferred window.

    Args:
        entropy: θ, in [0, 1], of the entropy over `log|V|` (0.3 in the paper).
        window: W, tokens, ≥ 0 (6 in the paper).
        top: n ≥ 1 takes the entropy terms of the n most likely tokens only, in nats (3 in the
            authors' code, against the same θ); 0, the default, is the paper's normalised entropy.

    Reference: Li et al. 2025 (FLy), §3.
    """

    entropy: float = 0.3
    window: int = 6
    top: int = 0

    summary: ClassVar[str] = "forgive a greedy mismatch at high entropy if the next tokens match"
    paper: ClassVar[str] = "Li et al. 2025 (FLy)"
    bibtex: ClassVar[str] = "fly2025"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        between("entropy", self.entropy, 0, 10)
        whole("window", self.window)
        whole("top", self.top)

    def weigh(self, odds: Odds) -> Weighed:
        """`standard`, and 1 where a greedy mismatch is forgiven."""
        most = math.log(odds.logits.shape[-1])
        match = odds.match & odds.inside
        seen = torch.nn.functional.pad(match.cumsum(-1), (1, 0))
        # Positions behind the end of the draft match nothing: their window does not fit.
        until = torch.nn.functional.pad(seen, (0, self.window), mode="replicate")
        ahead = until[:, 1 + self.window :] - seen[:, 1:]
        forgiven = ~match & (ahead == self.window) & odds.greedy
        forgiven &= odds.tokens.logits.squeeze(-1) > -torch.inf
        if forgiven.any():
            forgiven = forgiven.masked_scatter(forgiven, self._unsure(odds.take(forgiven), most))
        sure = torch.ones_like(odds.ratio)
        return Weighed(
            torch.where(forgiven, sure, odds.ratio), lambda at: at.at(forgiven).to(at.dtype)
        )

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Where the window behind the first token that is not the arg-max matches."""
        first, last = compared.accepted + 1, compared.accepted + 1 + self.window
        drafted = compared.drafted
        return len(drafted) >= last and list(drafted[first:last]) == list(compared.best[first:last])

    def _unsure(self, odds: Odds, most: float) -> torch.Tensor:
        """`(rows, K)` whether the target's entropy, `most` nats at most, is above the gate."""
        log = odds.logits.log_softmax(-1, dtype=odds.dtype)
        if self.top:
            best = log.topk(min(self.top, log.shape[-1]), dim=-1).values
            return entropy(best) >= self.entropy
        return entropy(log) >= self.entropy * most
