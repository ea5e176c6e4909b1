"""The contract of an acceptance rule: what to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from forerun.errors import require
from forerun.rules.odds import Odds, Weighed, finite, one_hot
from forerun.types import Draft, Target, Verdict


class ComparedRow(NamedTuple):
    """One greedy row's draft beside the target's arg-maxes, before its rule has a say."""

    drafted: Sequence[int]
    best: Sequence[int]
    """The target's arg-max at every drafted position, and maybe behind."""
    accepted: int
    """Drafted tokens before the first that is not the arg-max."""
    gap: float
    """In nats between the target's arg-max and that token; infinite if there is none."""
    draft_entropy: Callable[[int], float]
    """In nats, of the draft at temperature 1 at an accepted place, if rules read it."""


class AcceptanceRule(ABC):
    """Judges a draft against the target.

    Subclasses are frozen dataclasses whose fields are the settings; `decide` is pure and rows never
    influence each other. What is no number is never accepted: a draft ends where its distribution,
    or the target's, has a NaN, +inf, or nothing but −inf (`sound_length`), and a row whose next
    token would come from such logits of the target has failed (`Verdict.failed`).
    """

    summary: ClassVar[str]
    """One line for lists: what it does."""
    paper: ClassVar[str] = ""
    """Short citation; empty if there is none."""
    bibtex: ClassVar[str] = ""
    """BibTeX entries, or their keys in `citations.bib`."""
    lossless: ClassVar[bool]
    """Whether the output has exactly the target's distribution, whatever the draft."""
    matches_greedy: ClassVar[bool] = False
    """Whether all it does under greedy decoding is to keep tokens while they are the target's
    arg-max, so that only arg-maxes need be known; of others, `may_overrule` is asked."""
    greedy_only: ClassVar[bool] = False
    """Whether requests that sample are refused."""
    gumbel_max: ClassVar[bool] = False
    """Whether they get noise of their seed's, and all that is drawn is an arg-max."""

    takes_leaves: ClassVar[bool] = False
    """Whether, where a drafted token is rejected, the draft's second choice may be judged, too: it
    is kept if it is the target's arg-max, or in rows that toss coins by `second_draw`."""

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

    def judge(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Accept a prefix of each row's draft and choose the token after it.

        Args:
            draft: `(rows, K)` tokens with their distributions.
            target: `(rows, K + 1, V)` processed logits.
            uniforms: `(rows, K + 1)` float64 coins in [0, 1), each row's from its own stream:
                column `i` decides position `i`, the last column draws the next token.
        """
        verdict = self.decide(draft, target, uniforms)
        if verdict.failed is None:
            verdict = replace(verdict, failed=_failed(verdict, target))
        return verdict

    @abstractmethod
    def decide(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """What `judge` returns, arguments as there; `failed` may be left to it."""


class PositionRule(AcceptanceRule):
    """A rule that decides position by position: a coin each, the first failure ends the round."""

    @abstractmethod
    def weigh(self, odds: Odds) -> Weighed:
        """How likely each drafted token is kept, and what replaces it."""

    def decide(self, draft: Draft, target: Target, uniforms: torch.Tensor) -> Verdict:
        """Accept a prefix by coins, draw the next token."""
        odds, width = Odds(draft, target), draft.tokens.shape[1]
        if width == 0:  # plain decoding: nothing to weigh
            nothing = target.logits.new_zeros(len(draft.lengths), 0, dtype=odds.dtype)
            weighed = Weighed(nothing)
        else:
            weighed = self.weigh(odds)
        # Not a product: what stands beyond a row's draft may be no number.
        accept = torch.where(odds.inside, weighed.accept, 0)
        accepted = (uniforms[:, :width] < accept).cumprod(-1).sum(-1)
        probs = _following(odds, weighed, accepted)
        drift = None if self.lossless else drift_of(odds, weighed, accepted)
        if odds.all_greedy:
            return Verdict(accepted, probs.argmax(-1), accept, drift=drift)
        return Verdict(accepted, sample(probs, uniforms[:, -1]), accept, probs, drift)


def drift_of(odds: Odds, weighed: Weighed, accepted: torch.Tensor) -> torch.Tensor:
    """`(rows, K)` as in `Verdict`, of so many accepted tokens."""
    drift = torch.zeros_like(weighed.accept)
    if weighed.drift is not None:
        place = torch.arange(odds.width, device=accepted.device)
        judged = odds.inside & (place <= accepted.unsqueeze(-1))
        drift[judged] = weighed.drift(odds.take(judged)).squeeze(-1).clamp(0, 1)  # rounding
    return drift


def _failed(verdict: Verdict, target: Target) -> torch.Tensor:
    """`(rows,)` bool: the target's logits at the next token are those of no distribution.

    A token that was drawn has a finite logit and a probability. If the logits are not sound, either
    it is their arg-max, which is then not finite, or its probability is a NaN.
    """
    row = torch.arange(len(verdict.accepted), device=verdict.accepted.device)
    value = target.logits[row, verdict.accepted, verdict.next_token]
    if verdict.next_probs is not None:
        value = value * verdict.next_probs[row, verdict.next_token]
    return ~finite(value)


def _following(odds: Odds, weighed: Weighed, accepted: torch.Tensor) -> torch.Tensor:
    """`(rows, V)` distribution of the token after the accepted ones (greedy rows: one-hot, or
    logits if all are)."""
    draft, row = odds.draft, torch.arange(len(accepted), device=accepted.device)
    logits = odds.target.logits[row, accepted]
    at = accepted.clamp(max=max(odds.width - 1, 0))
    rejected = accepted < odds.lengths
    if weighed.struck is not None:
        token = weighed.struck[row, at].unsqueeze(-1)
        struck = logits.scatter(-1, token.clamp(min=0), -torch.inf)
        logits = torch.where(rejected.unsqueeze(-1) & (token >= 0), struck, logits)
    if odds.all_greedy:
        return logits
    probs = logits.softmax(-1, dtype=odds.dtype)
    if odds.width and weighed.residual is not False:
        if draft.logits is None:
            residual = probs.scatter(1, draft.tokens[row, at].unsqueeze(-1), 0)
        else:
            residual = (probs - draft.logits[row, at].softmax(-1, dtype=probs.dtype)).clamp(min=0)
        mass = residual.sum(-1, keepdim=True)
        use = rejected if weighed.residual is True else rejected & weighed.residual[row, at]
        # Rounding may leave nothing of the residual: then the target itself.
        probs = torch.where(use.unsqueeze(-1) & (mass > 0), residual / mass, probs)
    if odds.some_greedy:
        probs = torch.where(odds.greedy, one_hot(logits), probs)
    return probs


def sample(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw from each distribution by inverting its cumulative sum.

    Args:
        probs: `(..., V)` non-negative weights, not all zero; they need not sum to one.
        uniform: `(...,)` float64 in [0, 1).

    Returns:
        `(...,)` int64 token ids. A token of weight zero is never drawn.
    """
    cumulative = probs.to(torch.float64).cumsum(-1) * (probs > 0)
    total = cumulative.amax(-1, keepdim=True)
    # Rounding must not put the point on the total, where no token is left above it.
    point = torch.minimum(uniform.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    # The first token strictly above the point, and one of positive weight: not `searchsorted`,
    # since a parallel sum may differ by rounding across tokens of weight zero.
    return (cumulative > point).view(torch.uint8).argmax(-1)


def second_draw(
    probs: torch.Tensor, drawn_from: torch.Tensor, token: int
) -> tuple[float, torch.Tensor]:
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
    rest = (probs - drawn_from).clamp(min=0)
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

    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
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
