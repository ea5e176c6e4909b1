"""What both models say about one draft, computed when a rule asks for it, and at most once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property

import torch

from forerun.errors import require
from forerun.signals import entropy, float_type, measure
from forerun.types import Draft, Target


@dataclass(frozen=True)
class View:
    """Probabilities of some tokens at every drafted position: of the drafted ones, or of all."""

    target: torch.Tensor
    """`(rows, K, n)` the target's, processed; greedy rows are one-hot."""
    draft: torch.Tensor
    """`(rows, K, n)` the draft's, processed."""
    ratio: torch.Tensor
    """`(rows, K, n)` `min(1, target / draft)`."""
    logits: torch.Tensor
    """`(rows, K, n)` the target's processed logits, also in greedy rows."""


Chance = Callable[["Odds", View], torch.Tensor]
"""Probability of keeping each token of a view of the odds, were it drafted; may exceed 1 (it is
clipped)."""


@dataclass(frozen=True)
class Weighed:
    """A rule's opinion of every drafted position, each given that all before it were kept."""

    accept: torch.Tensor
    """`(rows, K)` probability of keeping the drafted token."""
    drift: Callable[[Odds], torch.Tensor] | None = None
    """Of odds taken from these (`Odds.take`), or of these themselves, `(rows, K)` as in `Verdict`;
    only judged positions have any, so only of those it is computed. None is 0."""
    residual: torch.Tensor | bool = True
    """Whether a rejected token is replaced from `max(0, target − draft)` or from the target:
    `(rows, K)` bool, or one for all."""
    struck: torch.Tensor | None = None
    """`(rows, K)` token that is struck out of the target's distribution first, −1 for none."""


@dataclass(frozen=True, eq=False)
class Odds:
    """The two models' word on one draft. Everything is over the `K` drafted positions."""

    draft: Draft
    """Its tokens and lengths; its logits are in `draft_logits` and `raw_draft`."""
    target: Target
    """Which rows are greedy, and what they spent; its logits are in `logits` and `raw`."""
    parent: Odds | None = None
    """The odds that these were taken from, and"""
    places: tuple[torch.Tensor, ...] | None = None
    """the rows and positions of these there."""
    recorded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`(rows, K)` signals and `top5_overlap` of a trace, which holds no logits."""

    def take(self, where: torch.Tensor) -> Odds:
        """The positions where `(rows, K)` is true, in order, as rows of one token each."""
        places = where.nonzero(as_tuple=True)
        row = places[0]
        here = Odds(
            Draft(self.draft.tokens[places].unsqueeze(1), torch.ones_like(row)),
            Target(self.target.logits[:0], self.target.greedy[row.cpu()]),
            self,
            places,
            {name: values[places].unsqueeze(1) for name, values in self.recorded.items()},
        )
        here.__dict__.update(
            certain=self.certain, untouched=self.untouched, untouched_draft=self.untouched_draft
        )
        for name in self.__dict__.keys() & CARRIED:
            here.__dict__[name] = here.at(self.__dict__[name])
        if (view := self.__dict__.get("tokens")) is not None:
            parts = view.target, view.draft, view.ratio, view.logits
            here.__dict__["tokens"] = View(*map(here.at, parts))
        return here

    def at(self, values: torch.Tensor) -> torch.Tensor:
        """`(rows, K, ...)` values of the odds that these were taken from, here."""
        return values if self.places is None else values[self.places].unsqueeze(1)

    @cached_property
    def logits(self) -> torch.Tensor:
        """`(rows, K, V)` the target's processed logits."""
        if self.parent is not None:
            return self.at(self.parent.logits)
        return self.target.logits[:, : self.width]

    @cached_property
    def raw(self) -> torch.Tensor:
        """`(rows, K, V)` the target's logits at temperature 1."""
        if self.untouched:
            return self.logits
        if self.parent is not None:
            return self.at(self.parent.raw)
        return _there(self.target.raw)[:, : self.width]

    @cached_property
    def draft_logits(self) -> torch.Tensor | None:
        """`(rows, K, V)` the draft's processed logits; None if its tokens were certain."""
        if self.parent is None or self.certain:
            return self.draft.logits
        return self.at(_there(self.parent.draft_logits))

    @cached_property
    def raw_draft(self) -> torch.Tensor:
        """`(rows, K, V)` the draft's logits at temperature 1, which a rule must have asked for."""
        if self.untouched_draft:
            return _there(self.draft_logits)
        if self.parent is not None:
            return self.at(self.parent.raw_draft)
        return _there(self.draft.raw)

    @cached_property
    def certain(self) -> bool:
        """Whether the drafted tokens were, so that the draft has no logits."""
        return self.draft.logits is None

    @cached_property
    def untouched(self) -> bool:
        """Whether the target's processed logits are those at temperature 1."""
        return self.target.raw is None or self.target.raw is self.target.logits

    @cached_property
    def untouched_draft(self) -> bool:
        """Whether the draft's processed logits are those at temperature 1."""
        return not self.certain and self.draft.raw is self.draft.logits

    @property
    def width(self) -> int:
        return self.draft.tokens.shape[1]

    @cached_property
    def dtype(self) -> torch.dtype:
        """What probabilities are computed in."""
        return float_type(self.target.logits)

    @cached_property
    def all_greedy(self) -> bool:
        """Whether every row decodes greedily."""
        return bool(self.target.greedy.all())

    @cached_property
    def greedy(self) -> torch.Tensor:
        """`(rows, 1)` bool, on the device."""
        greedy = self.target.greedy.to(self.draft.tokens.device, non_blocking=True)
        return greedy.unsqueeze(-1)

    @cached_property
    def some_greedy(self) -> bool:
        """Whether any row decodes greedily."""
        return bool(self.target.greedy.any())

    @cached_property
    def lengths(self) -> torch.Tensor:
        """`(rows,)` drafted tokens up to the first that either model has no number for."""
        if self.width == 0:
            return self.draft.lengths
        if self.all_greedy:
            sound = finite(self.best_logit.squeeze(-1))
        else:
            sound = self._log_target_token == self._log_target_token  # a NaN is not
        if not self.certain:
            sound &= self._log_draft_token > -torch.inf
        return sound_length(self.draft.lengths, sound)

    @cached_property
    def inside(self) -> torch.Tensor:
        """`(rows, K)` bool: before the end of the row's draft (see `lengths`)."""
        place = torch.arange(self.width, device=self.draft.tokens.device)
        return place < self.lengths.unsqueeze(-1)

    @cached_property
    def match(self) -> torch.Tensor:
        """`(rows, K)` bool: the drafted token is the target's arg-max."""
        return self.draft.tokens == self._best.squeeze(-1)

    @cached_property
    def ratio(self) -> torch.Tensor:
        """`(rows, K)` `min(1, target / draft)` of the drafted tokens."""
        if self.all_greedy:
            return self.match.to(self.dtype)
        log = self._log_target_token
        if not self.certain:
            log = log - self._log_draft_token
        # A token that neither model allows gives −inf + inf: not a number, and not acceptable.
        ratio = log.clamp(max=0).exp().nan_to_num(0)
        return self._greedy_else(self.match.to(self.dtype), ratio)

    @cached_property
    def top(self) -> torch.Tensor:
        """`(rows, K, 1)` the target's highest probability; 1 in greedy rows."""
        if self.all_greedy:
            return torch.ones_like(self.ratio).unsqueeze(-1)
        top = self._log_target.amax(-1).exp()
        return self._greedy_else(torch.ones_like(top), top).unsqueeze(-1)

    @cached_property
    def target_entropy(self) -> torch.Tensor:
        """`(rows, K, 1)` entropy in nats of the target's processed distribution; 0 if greedy."""
        if self.all_greedy:
            return torch.zeros_like(self.top)
        nats = entropy(self._log_target)
        return self._greedy_else(torch.zeros_like(nats), nats).unsqueeze(-1)

    @cached_property
    def raw_entropy(self) -> torch.Tensor:
        """`(rows, K)` entropy in nats of the target's distribution at temperature 1."""
        return entropy(self._log_target) if self.untouched else nats(self.raw)

    @cached_property
    def raw_draft_entropy(self) -> torch.Tensor:
        """`(rows, K)` likewise of the draft's, which a rule must have asked for."""
        return self.draft_entropy if self.untouched_draft else nats(self.raw_draft)

    @cached_property
    def overlap(self) -> torch.Tensor:
        """`(rows, K)` one less the total-variation distance of target and draft: the probability
        that `standard` keeps what is drafted there."""
        if self.certain:
            return self.tokens.target.squeeze(-1)
        both = torch.minimum(self._log_target, self._log_draft).exp().sum(-1)
        if not self.some_greedy:
            return both
        return self._greedy_else(self._log_draft.gather(-1, self._best).squeeze(-1).exp(), both)

    @cached_property
    def rank(self) -> torch.Tensor:
        """`(rows, K)` how many tokens the target prefers to the drafted one."""
        return (self.logits > self.tokens.logits).sum(-1)

    @cached_property
    def open(self) -> torch.Tensor:
        """`(rows, K)` bool: the target allows more than one token."""
        return (self.logits > -torch.inf).sum(-1) > 1

    def shared(self, n: int) -> torch.Tensor:
        """`(rows, K)` how many of each model's `n` likeliest tokens at temperature 1 both have."""
        if self.recorded:
            require(n == OVERLAPPED, "n of a rule in a replay", n, f"{OVERLAPPED}, as recorded")
            return (self.recorded["top5_overlap"] * n).round()
        n = min(n, self.raw.shape[-1])
        best = self.raw.topk(n, dim=-1).indices
        guess = self.raw_draft.topk(n, dim=-1).indices
        return (guess.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).sum(-1)

    def signals(self, names: Set[str]) -> dict[str, torch.Tensor]:
        """What the draft's own distribution says of its tokens, `(rows, K)` each."""
        if self.recorded:
            return {name: self.recorded[name] for name in names}
        return measure(self.raw_draft, self.draft.tokens, names)

    @cached_property
    def best_logit(self) -> torch.Tensor:
        """`(rows, K, 1)` the target's highest processed logit; a NaN if there is one."""
        return self.logits.gather(-1, self._best)

    @cached_property
    def tokens(self) -> View:
        """The drafted tokens only, `n = 1`."""
        token = self.draft.tokens.unsqueeze(-1)
        if self.all_greedy:
            target = self.match.unsqueeze(-1).to(self.dtype)
        else:
            target = self._log_target_token.exp()
            target = self._greedy_else(self.match.to(self.dtype), target).unsqueeze(-1)
        draft = torch.ones_like(target)
        if not self.certain:
            draft = self._log_draft_token.exp().unsqueeze(-1)
        logits = self.logits.gather(-1, token)
        return View(target, draft, self.ratio.unsqueeze(-1), logits)

    @cached_property
    def vocabulary(self) -> View:
        """All tokens, `n = V`; only for drafts with a distribution."""
        logits = self.logits
        target, draft = self._log_target.exp(), self._log_draft.exp()
        if self.some_greedy:
            target = torch.where(self.greedy.unsqueeze(-1), one_hot(logits), target)
        tiny = torch.finfo(self.dtype).tiny
        return View(target, draft, (target / draft.clamp(min=tiny)).clamp(max=1), logits)

    def lenient(self, chance: Chance, residual: bool, excluded: bool = False) -> Weighed:
        """A rule of such chances; where `excluded`, also of tokens that the target excludes.

        With `residual` it accepts no less than `ratio` and keeps the standard residual, which is 0
        where it accepts more: the drift is just the mass it accepts besides,
        `Σ_v draft(v)·(chance(v) − ratio(v))`.

        Else it replaces what it rejects by a draw from the target: with `kept(v) =
        draft(v)·chance(v)` of mass `m` it emits `kept + (1 − m)·target`, which is
        `½·Σ_v |kept(v) − m·target(v)|` away from the target.
        """
        accept = self._kept(chance, self.tokens, excluded).squeeze(-1)

        def drift(at: Odds) -> torch.Tensor:
            if at.certain:
                own = at.at(accept)
                return (own - at.ratio).clamp(min=0) if residual else own * (1 - at.ratio)
            view = at.vocabulary
            kept = at._kept(chance, view, excluded)
            if residual:
                return (view.draft * (kept - view.ratio)).sum(-1).clamp(min=0)
            kept = view.draft * kept
            return (kept - kept.sum(-1, keepdim=True) * view.target).abs().sum(-1) / 2

        return Weighed(accept, drift, residual)

    def replaced_drift(self, kept: torch.Tensor) -> torch.Tensor:
        """`(rows, K)` drift as of `lenient` without residual, where a few tokens, `(rows, K, V)`
        bool, are kept for sure and all others never."""
        row, place, token = kept.nonzero(as_tuple=True)
        target, draft = (
            log[row, place, token].exp() for log in (self._log_target, self._log_draft)
        )
        if self.some_greedy:
            one = (token == self._best[row, place, 0]).to(target.dtype)
            target = torch.where(self.greedy[row, 0], one, target)
        position = row * self.width + place
        nothing = target.new_zeros(kept.shape[0] * self.width)
        mass = nothing.index_add(0, position, draft)
        off = nothing.index_add(0, position, (draft - mass[position] * target).abs())
        others = 1 - nothing.index_add(0, position, target)
        return ((off + mass * others.clamp(min=0)) / 2).view(-1, self.width)

    def _kept(self, chance: Chance, view: View, excluded: bool) -> torch.Tensor:
        # Unless it is asked to, no rule keeps a token that the target excludes (top-k, bans): a
        # hard wish stays one.
        kept = chance(self, view).clamp(0, 1)
        return kept if excluded else kept * (view.logits > -torch.inf)

    @cached_property
    def emitted(self) -> torch.Tensor:
        """`(rows, K, V)` the target's distribution, one-hot in greedy rows."""
        one = one_hot(self.logits)
        if self.all_greedy:
            return one
        return self._greedy_else(one, self._log_target.exp(), 3)

    @cached_property
    def drawn(self) -> torch.Tensor:
        """`(rows, K, V)` the draft's distribution, one-hot where the tokens were certain."""
        if not self.certain:
            return self._log_draft.exp()
        return torch.zeros_like(self.emitted).scatter(-1, self.draft.tokens.unsqueeze(-1), 1)

    @cached_property
    def draft_entropy(self) -> torch.Tensor:
        """`(rows, K)` entropy in nats of the draft's processed distribution; 0 if certain."""
        if self.certain:
            return torch.zeros_like(self.ratio)
        return entropy(self._log_draft)

    @cached_property
    def _best(self) -> torch.Tensor:
        """`(rows, K, 1)` the target's arg-max."""
        return self.logits.argmax(-1, keepdim=True)

    @cached_property
    def _log_target(self) -> torch.Tensor:
        if self.parent is not None and "_log_target" in self.parent.__dict__:
            return self.at(self.parent._log_target)
        return self.logits.log_softmax(-1, dtype=self.dtype)

    @cached_property
    def _log_draft(self) -> torch.Tensor:
        if self.parent is not None and "_log_draft" in self.parent.__dict__:
            return self.at(self.parent._log_draft)
        return _there(self.draft_logits).log_softmax(-1, dtype=self.dtype)

    @cached_property
    def _log_target_token(self) -> torch.Tensor:
        """`(rows, K)`; a NaN where any of the target's logits is none, or +inf, or all are −inf."""
        return self._log_target.gather(-1, self.draft.tokens.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def _log_draft_token(self) -> torch.Tensor:
        return self._log_draft.gather(-1, self.draft.tokens.unsqueeze(-1)).squeeze(-1)

    def _greedy_else(self, one: torch.Tensor, other: torch.Tensor, dims: int = 2) -> torch.Tensor:
        greedy = self.greedy if dims == 2 else self.greedy.unsqueeze(-1)
        return torch.where(greedy, one, other) if self.some_greedy else other


OVERLAPPED = 5
"""Ranks of which a trace knows how many both models share."""
CARRIED = frozenset((
    "_best", "match", "ratio", "top", "best_logit", "target_entropy", "draft_entropy",
    "raw_entropy", "raw_draft_entropy", "overlap", "rank", "open",
))  # fmt: skip
"""What is known of odds, and then of those taken from them; what is over the vocabulary is gathered
when it is read."""


def _there(logits: torch.Tensor | None) -> torch.Tensor:
    assert logits is not None, "there is a distribution, and a rule that reads it says so"
    return logits


def nats(logits: torch.Tensor) -> torch.Tensor:
    """`(...,)` entropy of the distributions of `(..., V)` logits."""
    return entropy(logits.log_softmax(-1, dtype=float_type(logits)))


def sound_length(lengths: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
    """`(rows,)` how long drafts of these lengths are if they end before what is not sound.

    Both models' logits at a position are known before its token is drawn, so this takes nothing
    from losslessness.

    Args:
        lengths: `(rows,)` drafted tokens.
        sound: `(rows, K)` bool: both models' logits there are those of a distribution. It shows in
            a single number: the highest logit is finite, or a log-probability is no NaN.
    """
    return torch.minimum(lengths, sound.cumprod(-1).sum(-1))


def finite(values: torch.Tensor) -> torch.Tensor:
    """`values.isfinite()` in half the time, which counts for a few numbers."""
    return values.abs() < torch.inf


def one_hot(logits: torch.Tensor) -> torch.Tensor:
    """All mass on the arg-max."""
    best = logits.argmax(-1, keepdim=True)
    return torch.zeros_like(logits, dtype=float_type(logits)).scatter_(-1, best, 1)
