"""Log-probabilities of committed tokens, from the pass that judged them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.drafters.base import Proposal
from forerun.engine.judging import Judged, Judgements
from forerun.engine.results import Logprob
from forerun.engine.row import Row
from forerun.runtime.base import CHUNK, Rows
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
        top = rows[i].request.logprobs
        if top is None or not isinstance(kept, Judged):
            continue
        tokens = proposal.tokens[i][: kept.accepted]
        if kept.following is not None:
            tokens = [*tokens, kept.following]
        rows[i].logprobs.extend(score(logits[i, : len(tokens)], tokens, top))


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


@torch.inference_mode()
def score_text(target: Rows, ids: Sequence[int], top: int) -> list[Logprob]:
    """What the target says of every token of a text but the first; see `score`.

    The text is read in a row of its own, beside whatever else runs.
    """
    row, out = len(target.lengths), []
    target.join(1, len(ids))
    try:
        for start in range(0, len(ids) - 1, CHUNK):
            piece = list(ids[start : min(start + CHUNK, len(ids) - 1)])
            pieces: list[list[int]] = [*[[] for _ in range(row)], piece]
            logits = target.feed(pieces)[row]
            out += score(logits, ids[start + 1 : start + 1 + len(piece)], top)
    finally:
        target.keep(range(row))
    return out
