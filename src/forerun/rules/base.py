"""The contract of an acceptance rule: what to keep."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from forerun.arrays import (
    at_least,
    at_most,
    cast,
    finite,
    library,
    numbers,
    one_hot,
    probability_type,
    put,
    sample,
    softmax,
)
from forerun.checks import check
from forerun.errors import require
from forerun.rules.odds import Odds, Weighed
from forerun.types import Array, Draft, Target, Verdict


class ComparedRow(NamedTuple):
    """One greedy row's draft beside the target's arg-maxes, before its rule has a say."""

    drafted: Sequence[int]
    best: Sequence[int]  # the target's arg-max at every drafted position, and maybe behind
    accepted: int  # drafted tokens before the first that is not the arg-max
    gap: float  # in nats between the target's arg-max and that token; infinite if there is none
    draft_entropy: Callable[[int], float]
    """In nats, of the draft at temperature 1 at an accepted place, if rules read it."""


class AcceptanceRule(ABC):
    """Judges a draft against the target.

    Subclasses are frozen dataclasses whose fields are the settings; `decide` is pure and rows never
    influence each other. What is no number is never accepted: a draft ends where its distribution,
    or the target's, has a NaN, +inf, or nothing but −inf (`Odds.lengths`), and a row whose next
    token would come from such logits of the target has failed (`Verdict.failed`).
    """

    lossless: ClassVar[bool] = False
    """Whether the output has exactly the target's distribution, whatever the draft."""
    matches_greedy: ClassVar[bool] = False
    """Whether all it does under greedy decoding is to keep tokens while they are the target's
    arg-max, so that only arg-maxes need be known; of others, `may_overrule` is asked."""
    greedy_only: ClassVar[bool] = False  # whether requests that sample are refused
    gumbel_max: ClassVar[bool] = False
    """Whether they get noise of their seed's, and all that is drawn is an arg-max."""

    takes_leaves: ClassVar[bool] = False
    """Whether, where a drafted token is rejected, the draft's second choice may be judged, too: it
    is kept if it is the target's arg-max, or in rows that toss coins by `second_draw`."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def has_bonus(self) -> bool:
        """Whether a draft that is kept whole is followed by a token of the target's own in the same
        round. Without, every token but a plain round's stands where the rule has judged."""
        return True

    @property
    def reads_draft(self) -> bool:
        """Whether the rule reads more of the draft's distribution (`Draft.raw`) than what tokens
        were drawn from; a drafter without one is refused."""
        return False

    def may_overrule(self, compared: ComparedRow) -> bool:
        """Whether the rule may do other in a greedy row than to keep tokens while they are the
        target's arg-max: true in vain costs a full judgement, false must be right."""
        return not self.matches_greedy

    def judge(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Accept a prefix of each row's draft and choose the token after it.

        Args:
            draft: `(rows, K)` tokens with their distributions; all arrays are of numpy, or all of
                torch on a device (`forerun.arrays`).
            target: `(rows, K + 1, V)` processed logits.
            uniforms: `(rows, K + 1)` float64 coins in [0, 1), each row's from its own stream:
                column `i` decides position `i`, the last column draws the next token.
        """
        with np.errstate(all="ignore"):
            verdict = self.decide(draft, target, uniforms)
            if verdict.failed is None:
                verdict = replace(verdict, failed=_failed(verdict, target))
            return verdict

    @abstractmethod
    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """What `judge` returns, arguments as there; `failed` may be left to it."""


class PositionRule(AcceptanceRule):
    """A rule that decides position by position: a coin each, the first failure ends the round."""

    @abstractmethod
    def weigh(self, odds: Odds) -> Weighed:
        """How likely each drafted token is kept, and what replaces it."""

    def decide(self, draft: Draft, target: Target, uniforms: Array) -> Verdict:
        """Accept a prefix by coins, draw the next token."""
        if self.lossless and target.greedy.all():
            return match_greedy(draft, target.logits)
        odds, width = Odds(draft, target), draft.tokens.shape[1]
        if width == 0:  # plain decoding: nothing to weigh
            nothing = odds.lib.zeros_like(target.logits[:, :0, 0], dtype=odds.dtype)
            weighed = Weighed(nothing)
        else:
            weighed = self.weigh(odds)
        # Not a product: what stands beyond a row's draft may be no number.
        accept = odds.lib.where(odds.inside, weighed.accept, 0)
        accepted = (uniforms[:, :width] < accept).cumprod(-1).sum(-1)
        probs = _following(odds, weighed, accepted)
        drift = None if self.lossless else drift_of(odds, weighed, accepted)
        if odds.all_greedy:
            return Verdict(accepted, probs.argmax(-1), accept, drift=drift)
        return Verdict(accepted, sample(probs, uniforms[:, -1]), accept, probs, drift)


def match_greedy(draft: Draft, logits: Array) -> Verdict:
    """The verdict when every row decodes greedily: no softmax, no host synchronisation."""
    choice, width = logits.argmax(-1), draft.tokens.shape[1]
    row, place = numbers(len(choice), choice), numbers(width + 1, choice)
    sound = finite(logits[row[:, None], place, choice])
    inside = place[:width] < draft.lengths[:, None]
    match = (draft.tokens == choice[:, :width]) & inside & sound[:, :width]
    if draft.probs is not None:  # sampled neighbours: greedy rows on their own have none
        match &= library(choice).amax(draft.probs, -1) > 0
    accepted = match.cumprod(-1).sum(-1)
    chance = cast(match, probability_type(logits))
    return Verdict(accepted, choice[row, accepted], chance, failed=~sound[row, accepted])


def drift_of(odds: Odds, weighed: Weighed, accepted: Array) -> Array:
    """`(rows, K)` as in `Verdict`, of so many accepted tokens."""
    drift = odds.lib.zeros_like(weighed.accept)
    if weighed.drift is not None:
        judged = odds.inside & (odds.place <= accepted[:, None])
        drift[judged] = weighed.drift(odds.take(judged))[:, 0].clip(0, 1)  # rounding
    return drift


def _failed(verdict: Verdict, target: Target) -> Array:
    """`(rows,)` bool: the target's logits at the next token are those of no distribution.

    A token that was drawn has a finite logit and a probability. If the logits are not sound, either
    it is their arg-max, which is then not finite, or its probability is a NaN.
    """
    row = numbers(len(verdict.accepted), verdict.accepted)
    value = target.logits[row, verdict.accepted, verdict.next_token]
    if verdict.next_probs is not None:
        value = value * verdict.next_probs[row, verdict.next_token]
    return ~finite(value)


def _following(odds: Odds, weighed: Weighed, accepted: Array) -> Array:
    """`(rows, V)` distribution of the token after the accepted ones (greedy rows: one-hot, or
    logits if all are)."""
    draft, row, where = odds.draft, odds.row[:, 0], odds.lib.where
    logits = odds.target.logits[row, accepted]
    at, rejected = at_most(accepted, odds.width - 1), accepted < odds.lengths
    if weighed.struck is not None:
        token = weighed.struck[row, at][:, None]
        struck = put(logits, token.clip(0), -np.inf)
        logits = where(rejected[:, None] & (token >= 0), struck, logits)
    if odds.all_greedy:
        return logits
    probs = odds.whole[row, accepted] if weighed.struck is None else softmax(logits)
    if odds.width and weighed.residual is not False:
        use = rejected if weighed.residual is True else rejected & weighed.residual[row, at]
        if use.any():
            if draft.probs is None:
                residual = put(probs, draft.tokens[row, at][:, None], 0)
            else:
                residual = at_least(probs - draft.probs[row, at], 0)
            mass = residual.sum(-1)[:, None]
            # Rounding may leave nothing of the residual: then the target itself.
            probs = where(use[:, None] & (mass > 0), residual / mass, probs)
    if odds.some_greedy:
        probs = where(odds.greedy, one_hot(logits), probs)
    return probs


def second_draw(probs: Array, drawn_from: Array, token: int) -> tuple[float, Array]:
    """Recursive rejection sampling: judge a second token where the first was rejected.

    Args:
        probs: `(V,)` what comes there, if nothing else is judged (`Verdict.next_probs`).
        drawn_from: `(V,)` the distribution that the token was drawn from, after the first.
        token: the second.

    Returns:
        How likely it is kept, and `(V,)` the distribution of what comes if it is not. Together they
        emit `probs`.

    Reference: Yang et al. 2024, Multi-Candidate Speculative Decoding, Algorithm 1; Jeon et al.
    2024, Recursive Speculative Decoding (without replacement).
    """
    rest = (probs - drawn_from).clip(0)
    mass = rest.sum()
    # Rounding may leave nothing: then the token is kept, or the first answer stands.
    return float(probs[token] / drawn_from[token]), rest / mass if mass > 0 else probs


@dataclass(frozen=True)
class WrappedRule(PositionRule):
    """A lossy rule around another one.

    Args:
        rule: one that decides position by position.

    Raises:
        SettingError: it does not, or is lossless.
    """

    rule: AcceptanceRule

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.rule, PositionRule) and not self.rule.lossless
        require(good, "rule", self.rule, "a lossy rule that decides position by position")

    @property
    def reads_draft(self) -> bool:
        return self.rule.reads_draft

    def may_overrule(self, compared: ComparedRow) -> bool:
        return self.rule.may_overrule(compared)

    @property
    def has_bonus(self) -> bool:
        return self.rule.has_bonus

    def weigh(self, odds: Odds) -> Weighed:
        assert isinstance(self.rule, PositionRule)
        return self.rule.weigh(odds)
