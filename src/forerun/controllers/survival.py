"""`survival`: stop when a rejection is likely, by confidence and what was kept."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from forerun.checks import Share, Whole, Within
from forerun.controllers.base import Chance, Forecaster, Outlook, mechanism
from forerun.controllers.elementwise import largest, sigmoid, where
from forerun.types import RoundOutcome, Token


class LogOdds(NamedTuple):
    """Log-odds of being kept."""

    constant: float  # of a drafted token
    per_margin: float  # per logit of its margin
    per_chosen: float  # per unit of its probability, where coins decide it
    first: float  # of a round's first token before it is drafted
    later: float  # of a later one
    per_newest: float  # per logit of the margin before it

    def chances(self, token: Token, shift: float) -> tuple[float, float]:
        """That a drafted token is kept, and then the next one, before it is drafted."""
        kept = self.constant + self.per_margin * token.logit_margin
        if token.chosen is not None:
            kept = kept + self.per_chosen * token.chosen
        following = self.later + self.per_newest * token.logit_margin
        return sigmoid(kept + shift), sigmoid(following + shift)


GREEDY = LogOdds(-0.44, 1.37, 0.0, 1.23, 0.70, 0.35)
"""Where no coins decide; `python -m benchmarks.auto_prior` made both."""
SAMPLED = LogOdds(0.52, 0.0, 3.34, 0.97, 0.83, 0.29)  # where coins do


class SurvivalState(NamedTuple):
    """State of `Survival`."""

    certain: bool = True  # whether no coins decide what is kept: which prior is the request's
    shift: float = 0.0  # the request's own constant, of drafted tokens and of the next one
    weight: float = 0.0  # `Σ w` it was learned from
    counts: tuple[float, ...] = (0.8, 2.0, 3.4, 4.0)
    """First tokens of rounds, kept and judged, and later ones."""


@dataclass(frozen=True)
class Survival(Forecaster):
    """Read the draft's confidence, corrected by what is kept; without signals, count by depth.

    Args:
        threshold: for its own word, in [0, 1]; without a governor a draft stops where the chance
            that all of it is kept falls below (ours: 0.4).
        length: for its own word, the most tokens per round, ≥ 0 (ours).
        weight: of a constant of 0, in `Σ w`, `w` the variance of a judged token's chance, > 0.
        carried: share of what a request learned that the next one starts from, in [0, 1].

    Reference: ours; the stopping rule is that of Huang et al. 2024 (SpecDec++) [specdecpp2024].
    """

    threshold: Share = 0.4
    length: Whole = 24
    weight: Annotated[float, Within(0, 1e9)] = mechanism(4.0, off=1e9)
    carried: Annotated[float, Within(0)] = mechanism(0.5, off=0.0)

    def signals(self, certain: bool) -> frozenset[str]:
        """The margin, and by coins the probability of the drafted token."""
        return frozenset({"logit_margin"} if certain else {"logit_margin", "chosen"})

    def start(self, certain: bool = True, before: Any = None) -> SurvivalState:
        """From a share of what the request before has learned."""
        if before is None:
            return SurvivalState(certain)
        pairs = zip(SurvivalState().counts, before.counts, strict=True)
        counts = tuple(prior + self.carried * (count - prior) for prior, count in pairs)
        return SurvivalState(certain, self.carried * before.shift, 0.0, counts)

    def limit(self, state: SurvivalState) -> int:
        return self.length

    def outlook(self, state: SurvivalState) -> Outlook:
        """By what was kept of first and later tokens."""
        first, judged, later, later_judged = state.counts
        return Outlook(first / judged, later / later_judged)

    def forecast(
        self, state: SurvivalState, memo: Chance | None, token: Token
    ) -> tuple[Chance, Chance]:
        """By the token's margin, or by its depth if it has none."""
        if token.logit_margin is None:
            first, following = self.outlook(state)
            kept = following if memo else first
        else:
            by: LogOdds = where(state.certain, GREEDY, SAMPLED)
            kept, following = by.chances(token, state.shift)
        chance = Chance(memo.kept * kept if memo else kept, following)
        return chance, chance

    def observe(self, state: SurvivalState, round: RoundOutcome) -> SurvivalState:
        """Counts, and a Newton step of ridge logistic regression on the constant, of what was
        judged."""
        by: LogOdds = where(state.certain, GREEDY, SAMPLED)
        counts, weight, miss = list(state.counts), state.weight, 0.0
        guess, seen = sigmoid(by.first + state.shift), round.shows("logit_margin")
        for i in range(largest(round.judged)):
            inside, kept, at = where(i < round.judged, 1.0, 0.0), round.accept_prob[i], 2 * (i > 0)
            counts[at] = counts[at] + inside * kept
            counts[at + 1] = counts[at + 1] + inside
            if seen:
                drafted, following = by.chances(round.tokens[i], state.shift)
                for chance in (guess, drafted):  # before it was drafted, and behind it
                    weight = weight + 0.5 * inside * chance * (1 - chance)
                    miss = miss + 0.5 * inside * (kept - chance)
                guess = following
        shift = state.shift + miss / (weight + self.weight)
        return SurvivalState(state.certain, shift, weight, tuple(counts))
