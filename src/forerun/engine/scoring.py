"""Log-probabilities and logits of committed tokens, from the pass that judged them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from forerun.drafters.base import Proposal
from forerun.engine.judging import Judgements, RowVerdict
from forerun.engine.results import Logprob
from forerun.engine.row import Row
from forerun.runtime.base import CHUNK, Columns, Rows
from forerun.signals import float_type


def note(rows: Sequence[Row], proposal: Proposal, logits: torch.Tensor, judged: Judgements) -> None:
    """Keep with each row that wants it what the target said of what will be committed.

    Args:
        rows: the batch.
        proposal: what was drafted.
        logits: `(rows, K + 1, V)` raw.
        judged: what is kept.
    """
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


def score_text(target: Rows, ids: Sequence[int], top: int) -> list[Logprob]:
    """What the target says of every token of a text but the first; see `score`.

    The text is read in a row of its own, beside whatever else runs.
    """
    return [score for part in score_parts(target, ids, top, CHUNK) for score in part]


def score_parts(target: Rows, ids: Sequence[int], top: int, size: int) -> Iterator[list[Logprob]]:
    """`score_text` in parts of `size` tokens; between two of them the target is free for others.

    An executor that cannot copy its cache reads the text in one part.
    """
    read: list[Columns] = []
    size = size if target.executor.copies else len(ids)
    for start in range(0, len(ids) - 1, size):
        yield _part(target, ids[: start + size + 1], top, read)


@torch.inference_mode()
def _part(target: Rows, ids: Sequence[int], top: int, read: list[Columns]) -> list[Logprob]:
    """The scores behind what was `read`, to which is added what is read here."""
    row, done, out = len(target.lengths), sum(columns.count for columns in read), []
    target.join(1, len(ids))
    try:
        for columns in read:
            target.extend(row, columns)
        for start in range(done, len(ids) - 1, CHUNK):
            piece = list(ids[start : min(start + CHUNK, len(ids) - 1)])
            pieces: list[list[int]] = [*[[] for _ in range(row)], piece]
            logits = target.feed(pieces)[row]
            out += score(logits, ids[start + 1 : start + 1 + len(piece)], top)
        if target.executor.copies:
            read.append(target.copy_out(row, done, len(ids) - 1))
    finally:
        target.keep(range(row))
    return out
