"""`survival`: stop when a rejection is likely, by confidence and what was kept."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from forerun.checks import Share, Whole, Within
from forerun.controllers.base import Chance, Forecaster, Outlook, mechanism
from forerun.controllers.elementwise import largest, sigmoid, where
from forerun.types import RoundOutcome, Token


class LogOdds(NamedTuple):
    """Log-odds of being kept: of a drafted token, and of the next one before it is drafted."""

    constant: float  # of a drafted token
    per_margin: float  # per logit of its margin
    per_chosen: float  # per unit of its probability, where coins decide it
    first: float  # of a round's first token before it is drafted
    next_constant: float  # of a later one
    per_newest: float  # per logit of the margin before it

    def drafted(self, token: Token) -> float:
        z: float = self.constant + self.per_margin * token.logit_margin
        return z if token.chosen is None else z + self.per_chosen * token.chosen

    def following(self, token: Token) -> float:
        return self.next_constant + self.per_newest * token.logit_margin


GREEDY = LogOdds(-0.44, 1.37, 0.0, 1.23, 0.70, 0.35)
"""Where no coins decide; `python -m benchmarks.auto_prior` made both."""
SAMPLED = LogOdds(0.52, 0.0, 3.34, 0.97, 0.83, 0.29)  # where coins do
BLIND = 0.8, 2.0, 3.4, 4.0
"""First tokens of rounds, kept and judged, and later ones: what a draft that is not seen starts
from."""


class SurvivalState(NamedTuple):
    """State of `Survival`."""

    certain: bool = True  # whether no coins decide what is kept: which prior is the request's
    shift: float = 0.0  # the request's own constant, of drafted tokens and of the next one
    weight: float = 0.0  # `Σ w` it was learned from
    counts: tuple[float, ...] = BLIND  # first tokens kept and judged, and later ones


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
        pairs = zip(BLIND, before.counts, strict=True)
        counts = tuple(prior + self.carried * (count - prior) for prior, count in pairs)
        return SurvivalState(certain, self.carried * before.shift, 0.0, counts)

    def limit(self, state: SurvivalState) -> int:
        return self.length

    def outlook(self, state: SurvivalState) -> Outlook:
        """By what was kept of first and later tokens."""
        return Outlook(*_counted(state))

    def forecast(
        self, state: SurvivalState, memo: Chance | None, token: Token
    ) -> tuple[Chance, Chance]:
        """By the token's margin, or by its depth if it has none."""
        if token.logit_margin is None:
            first, later = _counted(state)
            kept, following = (later if memo else first), later
        else:
            by: LogOdds = where(state.certain, GREEDY, SAMPLED)
            kept = sigmoid(by.drafted(token) + state.shift)
            following = sigmoid(by.following(token) + state.shift)
        chance = Chance(memo.kept * kept if memo else kept, following)
        return chance, chance

    def observe(self, state: SurvivalState, round: RoundOutcome) -> SurvivalState:
        """A Newton step of ridge logistic regression on the constant, from the judged tokens."""
        count = round.judged
        most = largest(count)
        if not most:
            return state
        state = state._replace(counts=self._counts(state, round))
        if not round.shows("logit_margin"):
            return state
        by: LogOdds = where(state.certain, GREEDY, SAMPLED)
        guess, weight, miss = by.first, state.weight, 0.0
        for i in range(most):
            inside, token = 0.5 * (i < count), round.tokens[i]
            for z in (guess, by.drafted(token)):  # before it was drafted, and behind it
                chance = sigmoid(z + state.shift)
                weight = weight + inside * chance * (1 - chance)
                miss = miss + inside * (round.accept_prob[i] - chance)
            guess = by.following(token)
        shift = state.shift + miss / (weight + self.weight)
        learned = state._replace(shift=shift, weight=weight)
        return where(count > 0, learned, state)

    def _counts(self, state: SurvivalState, round: RoundOutcome) -> tuple[float, ...]:
        """What the state counts of first and later tokens, with one more round."""
        counts = list(state.counts)
        for i in range(largest(round.judged)):
            inside, kept = where(i < round.judged, 1.0, 0.0), 2 * (i > 0)
            counts[kept] = counts[kept] + inside * round.accept_prob[i]
            counts[kept + 1] = counts[kept + 1] + inside
        return tuple(counts)


def _counted(state: SurvivalState) -> tuple[float, float]:
    """Chances of a first token and of later ones, of a draft that is not seen."""
    first, judged, later, later_judged = state.counts
    return first / judged, later / later_judged
