"""What both models say about one draft, computed when a rule asks for it, and at most once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.arrays import (
    at_most,
    beside,
    by_torch,
    cast,
    entropy,
    finite,
    library,
    numbers,
    one_hot,
    probability_type,
    put,
    softmax,
)
from forerun.errors import require
from forerun.lazy import torch
from forerun.signals import measure
from forerun.types import Array, Draft, Target


@dataclass(frozen=True)
class View:
    """Probabilities of some tokens at every drafted position: of the drafted ones, or of all."""

    target: Array  # `(rows, K, n)` the target's, processed; greedy rows are one-hot
    draft: Array  # `(rows, K, n)` the draft's, processed
    ratio: Array  # `(rows, K, n)` `min(1, target / draft)`
    logits: Array  # `(rows, K, n)` the target's processed logits, also in greedy rows


Chance = Callable[["Odds", View], Array]
"""Probability of keeping each token of a view of the odds, were it drafted; may exceed 1 (it is
clipped)."""


@dataclass(frozen=True)
class Weighed:
    """A rule's opinion of every drafted position, each given that all before it were kept."""

    accept: Array  # `(rows, K)` probability of keeping the drafted token
    drift: Callable[[Odds], Array] | None = None
    """Of odds taken from these (`Odds.take`), or of these themselves, `(rows, K)` as in `Verdict`;
    only judged positions have any, so only of those it is computed. None is 0."""
    residual: Array | bool = True
    """Whether a rejected token is replaced from `max(0, target − draft)` or from the target:
    `(rows, K)` bool, or one for all."""
    struck: Array | None = None
    """`(rows, K)` token that is struck out of the target's distribution first, −1 for none."""


class Odds:
    """The two models' word on one draft. Everything is over the `K` drafted positions.

    Args:
        draft: its tokens and lengths; its distributions are in `draft_probs` and `raw_draft`.
        target: which rows are greedy, and what they spent; its logits are in `logits` and `raw`.
        parent: the odds that these were taken from, and
        places: the rows and positions of these there.
        recorded: `(rows, K)` signals and `top5_overlap` of a trace, which holds no logits.
    """

    def __init__(
        self,
        draft: Draft,
        target: Target,
        parent: Odds | None = None,
        places: tuple[Array, ...] | None = None,
        recorded: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        self.draft, self.target, self.parent, self.places = draft, target, parent, places
        self.recorded, self.width = recorded, draft.tokens.shape[1]
        self.lib: Any = library(draft.tokens)  # numpy or torch, whose arrays these are
        self.dtype = probability_type(target.logits)  # what probabilities are computed in
        self.row: Array = numbers(len(draft.tokens), draft.tokens)[:, None]  # `(rows, 1)`, and
        self.place: Array = numbers(self.width, draft.tokens)  # `(K,)`: their numbers
        self.all_greedy = bool(target.greedy.all())  # whether every row decodes greedily, or
        self.some_greedy = bool(target.greedy.any())  # any
        of = parent or self
        self.certain: bool = draft.probs is None if of is self else of.certain
        """Whether the drafted tokens were, so that the draft has no probabilities."""
        same = target.raw is None or target.raw is target.logits
        self.untouched: bool = same if of is self else of.untouched
        """Whether the target's processed logits are those at temperature 1."""
        unshaped = not self.certain and draft.raw is None
        self.untouched_draft: bool = unshaped if of is self else of.untouched_draft
        """Whether the draft's processed distribution is that at temperature 1."""

    def take(self, where: Array) -> Odds:
        """The positions where `(rows, K)` is true, in order, as rows of one token each."""
        places = self.lib.where(where)
        row = places[0]
        greedy = self.greedy[row, 0]
        here = Odds(
            Draft(self.draft.tokens[places][:, None], self.lib.ones_like(row)),
            Target(self.target.logits[:0], greedy if self.lib is np else greedy.cpu()),
            self,
            places,
            {name: values[places][:, None] for name, values in self.recorded.items()},
        )
        for name in self.__dict__.keys() & CARRIED:
            here.__dict__[name] = here.at(self.__dict__[name])
        if (view := self.__dict__.get("tokens")) is not None:
            parts = view.target, view.draft, view.ratio, view.logits
            here.__dict__["tokens"] = View(*map(here.at, parts))
        return here

    def at(self, values: Array) -> Array:
        """`(rows, K, ...)` values of the odds that these were taken from, here."""
        return values if self.places is None else values[self.places][:, None]

    def of_tokens(self, values: Array, tokens: Array) -> Array:
        """Of `(rows, K, V)` values those of `(rows, K)` tokens."""
        return values[self.row, self.place, tokens]

    @cached_property
    def logits(self) -> Array:
        """`(rows, K, V)` the target's processed logits."""
        if self.parent is not None:
            return self.at(self.parent.logits)
        return self.target.logits[:, : self.width]

    @cached_property
    def raw(self) -> Array:
        """`(rows, K, V)` the target's logits at temperature 1."""
        if self.untouched:
            return self.logits
        if self.parent is not None:
            return self.at(self.parent.raw)
        assert self.target.raw is not None, "kept, unless it is the processed one"
        return self.target.raw[:, : self.width]

    @cached_property
    def draft_probs(self) -> Array:
        """`(rows, K, V)` the draft's processed distribution, unless its tokens were certain."""
        if self.parent is not None:
            return self.at(self.parent.draft_probs)
        assert self.draft.probs is not None, "tokens that were certain come without"
        return self.draft.probs

    @cached_property
    def raw_draft(self) -> Array:
        """`(rows, K, V)` the draft's logits at temperature 1, which a rule must have asked for."""
        if self.untouched_draft:
            return self.lib.log(self.draft_probs)
        if self.parent is not None:
            return self.at(self.parent.raw_draft)
        assert self.draft.raw is not None, "a rule that reads it says so"
        return self.draft.raw

    @cached_property
    def greedy(self) -> Array:
        """`(rows, 1)` bool, on the device."""
        return beside(self.target.greedy, self.draft.tokens)[:, None]

    @cached_property
    def spent(self) -> tuple[Array, Array]:
        """`(rows,)` each request's summed drift so far, and its tokens so far; float64."""
        spent = self.target.spent
        if spent is None:
            spent = np.zeros((len(self.draft.tokens), 2))
        return tuple(beside(spent, self.draft.tokens).T)

    @cached_property
    def lengths(self) -> Array:
        """`(rows,)` drafted tokens up to the first that either model has no number for."""
        if self.width == 0:
            return self.draft.lengths
        # Both models' logits at a place are known before its token is drawn, so that to end there
        # takes nothing from losslessness. A NaN is not.
        sound = finite(self.best_logit[..., 0]) if self.all_greedy else self._target_token >= 0
        if not self.certain:
            sound = sound & (self._draft_token > 0)
        if self.lib is np and sound.all():
            return self.draft.lengths
        return self.lib.minimum(self.draft.lengths, sound.cumprod(-1).sum(-1))

    @cached_property
    def inside(self) -> Array:
        """`(rows, K)` bool: before the end of the row's draft (see `lengths`)."""
        return self.place < self.lengths[:, None]

    @cached_property
    def match(self) -> Array:
        """`(rows, K)` bool: the drafted token is the target's arg-max."""
        return self.draft.tokens == self._best

    @cached_property
    def ratio(self) -> Array:
        """`(rows, K)` `min(1, target / draft)` of the drafted tokens."""
        if self.all_greedy:
            return cast(self.match, self.dtype)
        ratio = self._target_token
        if not self.certain:
            ratio = at_most(ratio / self._draft_token, 1)
        # A token that neither model allows gives 0 / 0: not a number, and not acceptable.
        ratio = self.lib.where(ratio >= 0, ratio, 0)
        return self._greedy_else(cast(self.match, self.dtype), ratio)

    @cached_property
    def top(self) -> Array:
        """`(rows, K, 1)` the target's highest probability; 1 in greedy rows."""
        if self.all_greedy:
            return self.lib.ones_like(self.ratio)[..., None]
        return self._greedy_else(1.0, self.lib.amax(self._target, -1))[..., None]

    @cached_property
    def target_entropy(self) -> Array:
        """`(rows, K, 1)` entropy in nats of the target's processed distribution; 0 if greedy."""
        if self.all_greedy:
            return self.lib.zeros_like(self.top)
        return self._greedy_else(0.0, entropy(self._target))[..., None]

    @cached_property
    def raw_entropy(self) -> Array:
        """`(rows, K)` entropy in nats of the target's distribution at temperature 1."""
        return entropy(self._target) if self.untouched else nats(self.raw)

    @cached_property
    def raw_draft_entropy(self) -> Array:
        """`(rows, K)` likewise of the draft's, which a rule must have asked for."""
        return self.draft_entropy if self.untouched_draft else nats(self.raw_draft)

    @cached_property
    def overlap(self) -> Array:
        """`(rows, K)` one less the total-variation distance of target and draft: the probability
        that `standard` keeps what is drafted there."""
        if self.certain:
            return self.tokens.target[..., 0]
        both = self.lib.minimum(self._target, self.draft_probs).sum(-1)
        if not self.some_greedy:
            return both
        return self._greedy_else(self.of_tokens(self.draft_probs, self._best), both)

    @cached_property
    def rank(self) -> Array:
        """`(rows, K)` how many tokens the target prefers to the drafted one."""
        return (self.logits > self.tokens.logits).sum(-1)

    @cached_property
    def open(self) -> Array:
        """`(rows, K)` bool: the target allows more than one token."""
        return (self.logits > -np.inf).sum(-1) > 1

    def shared(self, n: int) -> Array:
        """`(rows, K)` how many of each model's `n` likeliest tokens at temperature 1 both have."""
        if self.recorded:
            require(n == OVERLAPPED, "n of a rule in a replay", n, f"{OVERLAPPED}, as recorded")
            return (self.recorded["top5_overlap"] * n).round()
        n = min(n, self.raw.shape[-1])
        best, guess = (by_torch(lambda x: x.topk(n).indices, x) for x in (self.raw, self.raw_draft))
        return (guess[..., None] == best[..., None, :]).any(-1).sum(-1)

    def signals(self, names: Set[str]) -> Mapping[str, Array]:
        """What the draft's own distribution says of its tokens, `(rows, K)` each."""
        if self.recorded:
            return {name: self.recorded[name] for name in names}
        order = sorted(names)
        values = by_torch(
            lambda logits, tokens: torch.stack(
                [measure(logits, tokens, names)[name] for name in order]
            ),
            self.raw_draft,
            self.draft.tokens,
        )
        return dict(zip(order, values, strict=True))

    @cached_property
    def best_logit(self) -> Array:
        """`(rows, K, 1)` the target's highest processed logit; a NaN if there is one."""
        return self.of_tokens(self.logits, self._best)[..., None]

    @cached_property
    def tokens(self) -> View:
        """The drafted tokens only, `n = 1`."""
        logits = self.of_tokens(self.logits, self.draft.tokens)[..., None]
        target: Array = cast(self.match, self.dtype) if self.some_greedy else None
        if not self.all_greedy:
            target = self._greedy_else(target, self._target_token)
        draft = self.lib.ones_like(target) if self.certain else self._draft_token
        return View(target[..., None], draft[..., None], self.ratio[..., None], logits)

    @cached_property
    def vocabulary(self) -> View:
        """All tokens, `n = V`; only for drafts with a distribution."""
        target, draft = self.emitted, self.draft_probs
        ratio = target / draft.clip(self.lib.finfo(self.dtype).tiny)
        return View(target, draft, ratio.clip(None, 1), self.logits)

    def lenient(self, chance: Chance, residual: bool, excluded: bool = False) -> Weighed:
        """A rule of such chances; where `excluded`, also of tokens that the target excludes.

        With `residual` it accepts no less than `ratio` and keeps the standard residual, which is 0
        where it accepts more: the drift is just the mass it accepts besides,
        `Σ_v draft(v)·(chance(v) − ratio(v))`.

        Else it replaces what it rejects by a draw from the target: with `kept(v) =
        draft(v)·chance(v)` of mass `m` it emits `kept + (1 − m)·target`, which is
        `½·Σ_v |kept(v) − m·target(v)|` away from the target.
        """
        accept = self._kept(chance, self.tokens, excluded)[..., 0]

        def drift(at: Odds) -> Array:
            if at.certain:
                own = at.at(accept)
                return (own - at.ratio).clip(0) if residual else own * (1 - at.ratio)
            view = at.vocabulary
            kept = at._kept(chance, view, excluded)
            if residual:
                return (view.draft * (kept - view.ratio)).sum(-1).clip(0)
            kept = view.draft * kept
            return abs(kept - kept.sum(-1)[..., None] * view.target).sum(-1) / 2

        return Weighed(accept, drift, residual)

    def replaced_drift(self, kept: Array) -> Array:
        """`(rows, K)` drift as of `lenient` without residual, where a few tokens, `(rows, K, V)`
        bool, are kept for sure and all others never."""
        row, place, token = self.lib.where(kept)
        target, draft = (probs[row, place, token] for probs in (self._target, self.draft_probs))
        if self.some_greedy:
            one = cast(token == self._best[row, place], self.dtype)
            target = self.lib.where(self.greedy[row, 0], one, target)
        position, count = row * self.width + place, len(kept) * self.width
        mass, drawn = (self.lib.bincount(position, of, count) for of in (draft, target))
        off = self.lib.bincount(position, abs(draft - mass[position] * target), count)
        drift = (off + mass * (1 - drawn).clip(0)) / 2
        return cast(drift, self.dtype).reshape(-1, self.width)

    def _kept(self, chance: Chance, view: View, excluded: bool) -> Array:
        # Unless it is asked to, no rule keeps a token that the target excludes (top-k, bans): a
        # hard wish stays one.
        kept = chance(self, view).clip(0, 1)
        return kept if excluded else kept * (view.logits > -np.inf)

    @cached_property
    def emitted(self) -> Array:
        """`(rows, K, V)` the target's distribution, one-hot in greedy rows."""
        if not self.some_greedy:
            return self._target
        one = one_hot(self.logits)
        return one if self.all_greedy else self._greedy_else(one, self._target)

    @cached_property
    def drawn(self) -> Array:
        """`(rows, K, V)` the draft's distribution, one-hot where the tokens were certain."""
        if not self.certain:
            return self.draft_probs
        return put(self.lib.zeros_like(self.emitted), self.draft.tokens[..., None], 1)

    @cached_property
    def draft_entropy(self) -> Array:
        """`(rows, K)` entropy in nats of the draft's processed distribution; 0 if certain."""
        return self.lib.zeros_like(self.ratio) if self.certain else entropy(self.draft_probs)

    @cached_property
    def _best(self) -> Array:
        """`(rows, K)` the target's arg-max."""
        return self.logits.argmax(-1)

    @cached_property
    def _target(self) -> Array:
        """`(rows, K, V)` the target's distribution, as if no row were greedy."""
        if self.parent is None:
            return self.whole[:, : self.width]
        known = "_target" in self.parent.__dict__
        return self.at(self.parent._target) if known else softmax(self.logits)

    @cached_property
    def whole(self) -> Array:
        """`(rows, K + 1, V)` likewise, behind all of the draft, too."""
        return softmax(self.target.logits)

    @cached_property
    def _target_token(self) -> Array:
        """`(rows, K)`; a NaN where any of the target's logits is none, or +inf, or all are −inf."""
        return self.of_tokens(self._target, self.draft.tokens)

    @cached_property
    def _draft_token(self) -> Array:
        return self.of_tokens(self.draft_probs, self.draft.tokens)

    def _greedy_else(self, one: Array, other: Array) -> Array:
        """The first in greedy rows."""
        if not self.some_greedy:
            return other
        greedy = self.greedy if other.ndim == 2 else self.greedy[..., None]
        return self.lib.where(greedy, one, other)


OVERLAPPED = 5  # ranks of which a trace knows how many both models share
CARRIED = frozenset((
    "_best", "_target_token", "_draft_token", "match", "ratio", "top", "best_logit",
    "target_entropy", "draft_entropy", "raw_entropy", "raw_draft_entropy", "overlap", "rank",
    "open",
))  # fmt: skip
"""What is known of odds, and then of those taken from them; what is over the vocabulary is gathered
when it is read."""


def nats(logits: Array) -> Array:
    """`(...,)` entropy of the distributions of `(..., V)` logits."""
    return entropy(softmax(logits))
