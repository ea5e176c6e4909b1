"""The values that pass between the parts, with one definition of each word.

Words: the *drafter* proposes *drafted* tokens, the *target* checks them in one pass; *accepted*
drafted tokens and one token of the target's own (a *correction* after a rejection, a *bonus* token
after none) are *committed*. Rows are sequences; everything is batched, batch 1 is one row.

This module imports numpy only: controllers must not pull in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = Any  # A numpy array, or a torch tensor
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class Stop(IntEnum):
    """Why drafting stopped in a row. The last three cut the round short from outside."""

    LIMIT = 0  # the controller's limit was reached
    CONFIDENCE = 1  # the policy's `step` or its governor said no, or its `trim`
    DIFFICULT = 2  # the drafter itself met a difficult token (early exits)
    EXHAUSTED = 3  # the drafter had nothing (more) to propose
    END_OF_TEXT = 4  # an end-of-text token was drafted
    BUDGET = 5  # the token budget or the context is nearly used up

    @property
    def label(self) -> str:
        """The name in reports and JSON, e.g. ``"end-of-text"``."""
        return self.name.lower().replace("_", "-")


CENSORING = (Stop.EXHAUSTED, Stop.END_OF_TEXT, Stop.BUDGET)  # the last of `Stop`, contiguous
"""Reasons that are nobody's decision about length: a fully accepted draft that ended for one of
them says nothing about a longer one."""
_CENSORING, _DIFFICULT = int(CENSORING[0]), int(Stop.DIFFICULT)  # numpy is slow with enumerations


SIGNALS = (
    "top1", "chosen", "entropy", "normalized_entropy", "logit_margin", "softmax_margin"
)  # fmt: skip
"""What a draft distribution says about a drafted token (fields of `Token`); traces hold these."""
LIVE_SIGNALS = ("logit_variance", "second")
"""What a distribution says of a token besides, but only while a model runs."""
DRAWN = frozenset({"id", "previous", "chosen"})
"""Fields of `Token` that depend on which token was drawn."""


class Token(NamedTuple):
    """A drafted token as a controller sees it.

    The signals describe the draft distribution at temperature 1 and before any truncation, with
    the request's penalties and biases. One is None when nobody asked for it
    (`LengthPolicy.signals` names what is wanted) or the drafter has no distribution (lookup).

    Numbers live; arrays `(prompts,)` in a replay.
    """

    id: Any = None
    previous: Any = None
    """Id of the token before it, drafted or committed; -1 of the first one behind the prompt."""
    top1: Any = None  # probability of the most likely token, in (0, 1]
    chosen: Any = None  # probability of the drafted token, in [0, 1]
    entropy: Any = None  # shannon entropy in nats, in [0, log |V|]
    normalized_entropy: Any = None  # entropy over its maximum log |V|, in [0, 1]
    logit_margin: Any = None
    """Logit of the most likely token less that of the second, ≥ 0 (infinite if no other is
    possible)."""
    softmax_margin: Any = None  # (P1 − P2) / P1 of the two highest probabilities, in [0, 1]
    logit_variance: Any = None
    """Variance of the logits of all tokens that are possible, ≥ 0; not in traces."""
    second: Any = None  # id of the second most likely token; not in traces


class RoundOutcome(NamedTuple):
    """What became of one round of one request, as a controller sees it.

    Numbers live; arrays `(prompts,)` in a replay, where a prompt takes part in depth i of
    `accept_prob` and `tokens` while i < `drafted`.
    """

    drafted: Any  # tokens really drafted (after clipping to the budget), ≥ 0
    accepted: Any  # drafted tokens the rule kept, `0 ≤ accepted ≤ drafted`
    accept_prob: Sequence[Any] = ()
    """Probability (not the coin) of keeping each drafted token given that all before it were
    kept; at least `drafted` of them."""
    stopped_by: Any = Stop.LIMIT  # A value of `Stop`
    tokens: Sequence[Token] = ()
    """The drafted tokens in order, with what was shown of them; at least `drafted`, or none."""
    took: Any = 1.0
    """Time of a round that drafts so many tokens, by its request's costs, in plain rounds."""

    @property
    def full(self) -> Any:
        """Whether something was drafted and all of it was accepted."""
        return (self.accepted == self.drafted) & (self.drafted > 0)

    @property
    def difficult(self) -> Any:
        """Whether the drafter could not say what follows its tokens, all of which were kept."""
        return (self.stopped_by == _DIFFICULT) & (self.accepted == self.drafted)

    @property
    def teaches(self) -> Any:
        """Whether something was drafted and it ended by a rejection or by a decision."""
        return (self.drafted > 0) & (
            (self.accepted < self.drafted) | (self.stopped_by < _CENSORING)
        )

    @property
    def judged(self) -> Any:
        """Drafted tokens that teach: the accepted ones and the first rejected one, or none."""
        return self.teaches * (self.accepted + (self.accepted < self.drafted))

    def shows(self, signal: str) -> bool:
        """Whether the drafter said this of its tokens."""
        return len(self.tokens) > 0 and getattr(self.tokens[0], signal) is not None


def _at(values: Array | None, index: list[int]) -> Array | None:
    return None if values is None else values[index]


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one round, in arrays of the host or of a GPU."""

    tokens: Array  # `(rows, K)` int64 token ids, padded with 0 beyond `lengths`
    lengths: Array  # `(rows,)` int64, `0 ≤ lengths ≤ K`
    probs: Array | None = None
    """`(rows, K, V)` processed probabilities that the tokens were drawn with, all NaN where the
    draft's logits are those of no distribution; None means every token was certain (a one-hot
    distribution: greedy drafts, lookup)."""
    raw: Array | None = None
    """`(rows, K, V)` the draft's logits at temperature 1, before any transform; None if no rule
    reads them (`AcceptanceRule.reads_draft`), or nothing transforms them, so that `probs` say
    the same."""

    def take(self, rows: Sequence[int]) -> Draft:
        index = list(rows)
        probs, raw = _at(self.probs, index), _at(self.raw, index)
        return Draft(self.tokens[index], self.lengths[index], probs, raw)


@dataclass(frozen=True)
class Target:
    """The target's side of one round: position `i` follows the first `i` drafted tokens."""

    logits: Array
    """`(rows, K + 1, V)` after the request's sampling transform (penalties, bias, temperature,
    top-k, ...); excluded tokens are −inf. Greedy rows are not divided by a temperature."""
    greedy: Array
    """`(rows,)` bool, on the CPU: the arg-max is the only token, as the request decodes greedily
    or its noise is in the logits."""
    raw: Array | None = None
    """`(rows, K + 1, V)` before the transform, i.e. at temperature 1; `logits` itself where that
    does nothing, None if nobody kept it."""
    spent: Array | None = None
    """`(rows, 2)` float64, on the CPU: the request's summed drift so far and its tokens so far."""

    def take(self, rows: Sequence[int]) -> Target:
        index = list(rows)
        logits = self.logits[index]
        raw = logits if self.raw is self.logits else _at(self.raw, index)
        return Target(logits, self.greedy[index], raw, _at(self.spent, index))


@dataclass(frozen=True)
class Verdict:
    """What a rule keeps."""

    accepted: Array  # `(rows,)` int64
    next_token: Array
    """`(rows,)` int64: the correction after a rejection, the bonus token otherwise."""
    accept_prob: Array
    """`(rows, K)` float: probability of keeping token `i` given that all before it were kept, 0
    beyond the draft's length. `E[accepted] = accept_prob.cumprod(-1).sum(-1)`."""
    next_probs: Array | None = None
    """`(rows, V)` distribution `next_token` was drawn from; None when it was certain."""
    drift: Array | None = None
    """`(rows, K)` exact total-variation distance, in [0, 1], between what the rule emits at a
    position and the target's distribution there, given the tokens before it; 0 beyond the first
    rejected token, where nothing is emitted. (`priced` knows it in the mean over drafts only.) None
    for lossless rules."""
    failed: Array | None = None
    """`(rows,)` bool: the target's logits after the accepted tokens are those of no distribution (a
    NaN, +inf, or every token excluded), so `next_token` means nothing. None if nobody looked."""
