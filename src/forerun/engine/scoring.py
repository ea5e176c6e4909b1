"""Log-probabilities and logits of committed tokens and given texts, from passes that read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.drafters.base import Proposal
from forerun.engine.judging import Judgements, RowVerdict
from forerun.engine.results import Logprob
from forerun.engine.row import Row
from forerun.runtime.base import Pieces
from forerun.signals import float_type

ALONE, BESIDE = 128, 32  # tokens of texts that a pass scores, and one that other rows wait for
LOGITS = 1 << 25  # most logits that a pass has for that, 128 MiB of float32


def note(rows: Sequence[Row], proposal: Proposal, logits: torch.Tensor, judged: Judgements) -> None:
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


def bound(rows: Sequence[Row], unread: list[int], vocab_size: int) -> None:
    """Leave as much of the texts to be scored as one pass takes, first come, first served; of each
    all but the last token is read, behind which nothing follows."""
    texts = [i for i, row in enumerate(rows) if row.request.scores is not None]
    room = ALONE if len(texts) == len(rows) else BESIDE
    room = max(min(room, LOGITS // (len(rows) * vocab_size)), 1)
    for i in texts:
        unread[i] = min(unread[i] - 1, room)
        room -= unread[i]


def wanted(rows: Sequence[Row], pieces: Pieces, counts: Sequence[int]) -> list[int]:
    """How many logits of each row are wanted, with those after every token of a text to score."""
    return [
        count if row.request.scores is None else len(piece)
        for row, piece, count in zip(rows, pieces, counts, strict=True)
    ]


def read(rows: Sequence[Row], pieces: Pieces, logits: torch.Tensor) -> None:
    """Keep with the texts to score what `(rows, ≥ n, V)` logits after their pieces say of them."""
    for row, piece, after in zip(rows, pieces, logits, strict=True):
        if row.request.scores is not None and piece:
            first = len(row.logprobs) + 1
            tokens = row.context[first : first + len(piece)]
            row.logprobs += score(after[: len(piece)], tokens, row.request.scores)
