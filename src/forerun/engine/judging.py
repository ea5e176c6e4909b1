"""The third step of a round: put the draft before each row's rule, and note log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from forerun.arrays import beside, on_host
from forerun.drafters.base import Proposal
from forerun.engine.results import Logprob
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.errors import NumericalError, SettingError
from forerun.lazy import torch
from forerun.rules.base import AcceptanceRule, ComparedRow
from forerun.runtime.base import Best, Pieces
from forerun.signals import entropy_of, float_type
from forerun.types import Array, Draft, Target, Verdict


@dataclass
class RowVerdict:
    """What is kept of one row's draft."""

    accepted: int
    following: int | None
    """The target's own token after it; None if it has none, or the round ends without."""
    accept_prob: list[float]
    """Per drafted token the probability of keeping it given that all before it were kept."""
    drift: list[float] | None = None  # per drafted token under a lossy rule; see `Verdict.drift`
    error: Exception | None = None  # why there is no token to follow
    probs: Array | None = None
    """`(V,)` what `following` was drawn from, in a row with nodes; None if it was certain."""
    path: list[int] = field(default_factory=list)
    """Which of the row's nodes are kept behind the accepted tokens; `following` follows them."""

    @property
    def committed(self) -> int:
        """Tokens it adds to the text, unless that ends before."""
        return self.accepted + len(self.path) + (self.following is not None)


Judgements = dict[int, RowVerdict | Exception]
"""Per row that was judged; what its rule raised, if it did."""


def compare(
    rows: Sequence[Row], drafts: Sequence[Sequence[int]], best: Best, wanted: Sequence[int],
    logits: torch.Tensor | None = None,
) -> Judgements:  # fmt: skip
    """The judgement of rows that are certain by a rule that only compares with the arg-max.

    `wanted` is per row how many positions of the target's are known: none of a row that is not
    judged, one more than drafted, or as many if the round ends without a bonus token. `logits`,
    `(rows, n, V)`, are the target's before settings changed them, if these can leave no token: they
    tell an error of the model from one of settings.
    """
    out: Judgements = {}
    for row, known in enumerate(wanted):
        if not known:
            continue
        draft, top, sound, accepted = drafts[row], best.tokens[row], best.sound[row], 0
        while accepted < len(draft) and draft[accepted] == top[accepted] and sound[accepted]:
            accepted += 1
        prob = [1.0] * accepted + [0.0] * (len(draft) - accepted)
        drift = None if rows[row].request.rule.lossless else [0.0] * len(draft)
        out[row] = verdict = RowVerdict(accepted, None, prob, drift)
        if accepted < known and sound[accepted]:
            verdict.following = top[accepted]
        elif accepted < known:
            excluded = logits is not None and bool(logits[row, accepted].amax().isfinite())
            verdict.error = _unsound(rows[row], accepted, excluded)
    return out


def overrule(
    judged: Judgements, rows: Sequence[Row], proposal: Proposal, best: Best, shaped: Any,
    logits: Callable[[], torch.Tensor], sampler: Sampler, wanted: Sequence[int],
) -> None:  # fmt: skip
    """Replace what `compare` says by what rules do that do more, where they may do otherwise.

    `shaped` are `[row][column]` the `(V,)` logits that `best` is of; `logits` makes what `judge`
    takes.
    """
    again = [0] * len(rows)
    for row, kept in judged.items():
        rule, drafted = rows[row].request.rule, proposal.tokens[row]
        if rule.matches_greedy or not isinstance(kept, RowVerdict):
            continue
        gap, n = math.inf, kept.accepted
        if n < len(drafted):
            here = shaped[row][n]
            gap = float(here[best.tokens[row][n]] - here[drafted[n]])
        entropy = partial(_draft_entropy, proposal, row)
        if rule.may_overrule(ComparedRow(drafted, best.tokens[row], n, gap, entropy)):
            again[row] = wanted[row]
    if any(again):
        judged |= judge(rows, proposal, logits()[:, : max(wanted)], sampler, again)


def _draft_entropy(proposal: Proposal, row: int, place: int) -> float:
    own = proposal.raw[place][row]
    return entropy_of(own if isinstance(own, np.ndarray) else own.float().cpu().numpy())


def judge(
    rows: Sequence[Row], proposal: Proposal, logits: torch.Tensor, sampler: Sampler,
    wanted: Sequence[int],
) -> Judgements:  # fmt: skip
    """The judgement of some rows by each one's own rule, one call per distinct rule, by the raw
    `(rows, max(wanted), V)` logits of the target; `wanted` as in `compare`."""
    judged, width = [row for row, n in enumerate(wanted) if n], max(map(len, proposal.tokens))
    if logits.shape[1] <= width:  # a bonus that nobody wants is drawn from nothing
        logits = torch.nn.functional.pad(logits, (0, 0, 0, width + 1 - logits.shape[1]))
    processed = sampler.process(logits, rows, proposal.tokens)
    shaped = raw = on_host(processed)
    if processed is not logits:
        raw = on_host(logits)
    target = Target(shaped, sampler.certain_rows, raw, _spent(rows))
    draft = _drafted(proposal, width, shaped, sampler.untouched)
    uniforms = beside(_coins(rows, proposal, width, judged), shaped)
    groups: dict[AcceptanceRule, list[int]] = {}
    for row in judged:
        groups.setdefault(rows[row].request.rule, []).append(row)

    def ask(rule: AcceptanceRule, members: list[int]) -> Judgements:
        try:
            if len(members) == len(rows):
                verdict = rule.judge(draft, target, uniforms)
            else:
                verdict = rule.judge(draft.take(members), target.take(members), uniforms[members])
            return _per_row(rows, verdict, members, proposal, logits, wanted)
        except Exception as error:  # one of them is to blame: each by itself
            if len(members) == 1:
                return {members[0]: error}
            return dict(chain.from_iterable(ask(rule, [row]).items() for row in members))

    return dict(chain.from_iterable(ask(*group).items() for group in groups.items()))


def _unsound(row: Row, accepted: int, excluded: bool) -> Exception:
    """Why the target has no next token for a row that accepted so many of its draft."""
    done = f"after {row.produced + accepted} new tokens"
    if excluded:
        return SettingError(
            f"{done} logit_bias, min_new_tokens, bad_words, allowed_tokens and the constraint "
            "leave no token to choose; allow one"
        )
    return NumericalError(
        f"{done} the target's logits are no numbers (NaN or infinite); the checkpoint may be "
        "damaged, or its values too large for the dtype: try float32 or bfloat16"
    )


def _per_row(
    rows: Sequence[Row], verdict: Verdict, members: Sequence[int], proposal: Proposal,
    logits: torch.Tensor, wanted: Sequence[int],
) -> Judgements:  # fmt: skip
    """A verdict on some members of the batch, row by row."""
    accepted, following = verdict.accepted.tolist(), verdict.next_token.tolist()
    probs = verdict.accept_prob.tolist()
    drift = None if verdict.drift is None else verdict.drift.tolist()
    failed = [False] * len(members) if verdict.failed is None else verdict.failed.tolist()
    out: dict[int, Any] = {}
    for i, row in enumerate(members):
        n, kept = len(proposal.tokens[row]), accepted[i]
        lost = None if drift is None or rows[row].request.rule.lossless else drift[i][:n]
        out[row] = RowVerdict(kept, following[i], probs[i][:n], lost)
        if row in proposal.nodes and verdict.next_probs is not None:
            out[row].probs = verdict.next_probs[i]
        if kept == wanted[row]:
            out[row].following = None
        elif failed[i]:
            excluded = bool(logits[row, kept].amax().isfinite())
            out[row].following, out[row].error = None, _unsound(rows[row], kept, excluded)
    return out


def _drafted(proposal: Proposal, width: int, like: Array, untouched: bool) -> Draft:
    """The draft as rules see it, padded to `width`; `untouched` as of `Sampler`."""
    tokens, rows = proposal.tokens, len(proposal.tokens)
    padded = [[*draft, *[0] * (width - len(draft))] for draft in tokens]
    raw = None if untouched else raw_of(proposal, width)
    return Draft(
        beside(np.array(padded, np.int64).reshape(rows, width), like),
        beside(np.array([len(draft) for draft in tokens]), like),
        None if proposal.probs is None or not width else proposal.probs[:, :width],
        None if raw is None else on_host(raw),
    )


def raw_of(proposal: Proposal, width: int) -> torch.Tensor | None:
    """`(rows, width, V)` of the draft at temperature 1, if it is kept."""
    steps = [torch.as_tensor(step) for step in proposal.raw[:width]]
    return torch.stack(steps, dim=1) if steps else None


def _spent(rows: Sequence[Row]) -> Array | None:
    """`(rows, 2)` summed drift and tokens so far; None if no row's rule is lossy."""
    if all(row.request.rule.lossless for row in rows):
        return None
    return np.array([[row.drift or 0.0, row.produced] for row in rows])


def _coins(rows: Sequence[Row], proposal: Proposal, width: int, judged: Sequence[int]) -> Array:
    """`(rows, width + 1)` coins; each row draws as many as it needs, whoever its neighbours are."""
    uniforms = np.zeros((len(rows), width + 1))
    for row in judged:
        if not rows[row].certain:
            *coins, last = islice(rows[row].coins, len(proposal.tokens[row]) + 1)
            uniforms[row, : len(coins)], uniforms[row, width] = coins, last
    return uniforms


ALONE, BESIDE = 128, 32  # tokens of texts that a pass scores, and one that other rows wait for
LOGITS = 1 << 25  # most logits that a pass has for that, 128 MiB of float32


def note_scored(
    rows: Sequence[Row], proposal: Proposal, logits: torch.Tensor, judged: Judgements
) -> None:
    """Keep with each row that wants it what the target said of what will be committed."""
    for i, kept in judged.items():
        asked = rows[i].request
        if not isinstance(kept, RowVerdict):
            continue
        tokens = proposal.tokens[i][: kept.accepted]
        if kept.following is not None:
            tokens = [*tokens, kept.following]
        if asked.logprobs is not None:
            rows[i].logprobs.extend(score(logits[i, : len(tokens)], tokens, asked.logprobs))
        if asked.keep_logits:
            rows[i].logits.extend(logits[i, : len(tokens)].clone())


def score(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """What `(n, V)` logits say of the n tokens that followed, and of the `top` likeliest."""
    log = logits.log_softmax(-1, dtype=float_type(logits))
    chosen = log.gather(-1, torch.tensor(tokens, device=log.device).unsqueeze(-1))[:, 0].tolist()
    best = log.topk(min(top, log.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Logprob(value, list(zip(ids, values, strict=True)))
        for value, (ids, values) in zip(chosen, pairs, strict=True)
    ]


def bound_scored(rows: Sequence[Row], unread: list[int], vocab_size: int) -> None:
    """Leave as much of the texts to be scored as one pass takes, first come, first served; of each
    all but the last token is read, behind which nothing follows."""
    texts = [i for i, row in enumerate(rows) if row.request.scores is not None]
    room = ALONE if len(texts) == len(rows) else BESIDE
    room = max(min(room, LOGITS // (len(rows) * vocab_size)), 1)
    for i in texts:
        unread[i] = min(unread[i] - 1, room)
        room -= unread[i]


def read_scored(rows: Sequence[Row], pieces: Pieces, logits: torch.Tensor) -> None:
    """Keep with the texts to score what `(rows, ≥ n, V)` logits after their pieces say of them."""
    for row, piece, after in zip(rows, pieces, logits, strict=True):
        if row.request.scores is not None and piece:
            first = len(row.logprobs) + 1
            tokens = row.context[first : first + len(piece)]
            row.logprobs += score(after[: len(piece)], tokens, row.request.scores)
