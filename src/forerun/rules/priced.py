"""`priced`: leniency where it buys most: a draft that goes on as the target would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from forerun.checks import between
from forerun.rules.base import PositionRule
from forerun.rules.odds import Odds, Weighed


@dataclass(frozen=True)
class Priced(PositionRule):
    """Standard sampling that keeps a token for sure where what follows it is likely kept, too.

    Args:
        drift: what a request's mean drift per token is steered to, in [0, 1].
        floor: least share of the target's highest probability that such a token has, in [0, 1].
        start: the price, an overlap, before anything was spent, in [0, 1].
        pace: how much a unit of drift spent above the budget adds to the price, ≥ 0.
    """

    drift: float = 0.02
    floor: float = 0.0
    start: float = 0.9
    pace: float = 0.5

    summary: ClassVar[str] = "standard, lenient where the next token is likely kept, at a price"
    paper: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""
    lossless: ClassVar[bool] = False
    matches_greedy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("drift", "floor", "start"):
            between(name, getattr(self, name), 0, 1)
        between("pace", self.pace, 0, 100)

    def weigh(self, odds: Odds) -> Weighed:
        """1 where the two models' distributions of the next drafted token overlap by the price or
        more; which token that is has no say, so it stays the target's own."""
        ratio = odds.ratio
        token, top = odds.tokens, odds.top.squeeze(-1)
        asked = odds.inside & (ratio < 1) & (token.logits.squeeze(-1) > -torch.inf)
        asked &= token.target.squeeze(-1) >= self.floor * top
        asked[:, -1] = False  # nothing is drafted behind it
        asked[:, :-1] &= odds.inside[:, 1:]
        behind = asked.roll(1, -1)
        if not behind.any():
            return Weighed(ratio)
        keep = torch.zeros_like(asked)
        likely = odds.take(behind).overlap.view(-1)
        keep[asked] = likely >= self._price(odds).expand_as(ratio)[asked]
        if odds.some_greedy:
            keep &= ~odds.greedy
        # Of the tokens that were not drafted nobody knows whether they would be kept: this is the
        # drift in the mean over drafts.
        return Weighed(
            torch.where(keep, 1, ratio), lambda at: (1 - at.ratio) * at.at(keep).to(at.dtype)
        )

    def _price(self, odds: Odds) -> torch.Tensor:
        """`(rows, 1)` least overlap that is bought."""
        spent = odds.target.spent
        if spent is None:
            spent = torch.zeros(len(odds.lengths), 2, dtype=torch.float64)
        total, tokens = spent.to(odds.ratio.device, odds.dtype).unbind(-1)
        return (self.start + self.pace * (total - self.drift * tokens)).unsqueeze(-1)
