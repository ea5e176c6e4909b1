"""The third step of a round: put the draft before each row's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.drafters.base import Proposal
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.rules.base import AcceptanceRule
from forerun.runtime.base import Best
from forerun.types import Draft, Target, Verdict


@dataclass
class Judged:
    """What is kept of one row's draft."""

    accepted: int
    following: int
    """The target's own token after it."""
    accept_prob: list[float]
    """Per drafted token the probability of keeping it given that all before it were kept."""
    drift: list[float] | None = None
    """Per drafted token under a lossy rule; see `Verdict.drift`."""


Judgements = dict[int, Judged | Exception]
"""Per row that was judged; what its rule raised, if it did."""


def compare(drafts: Sequence[Sequence[int]], best: Best, judged: Sequence[int]) -> Judgements:
    """The judgement where all rows are greedy and their rules only compare with the arg-max."""
    out: Judgements = {}
    for row in judged:
        draft, said, accepted = drafts[row], best.tokens[row], 0
        while accepted < len(draft) and draft[accepted] == said[accepted]:
            accepted += 1
        if not all(best.sound[row][: accepted + 1]):
            out[row] = unsound()
            continue
        prob = [1.0] * accepted + [0.0] * (len(draft) - accepted)
        out[row] = Judged(accepted, said[accepted], prob)
    return out


def judge(
    rows: Sequence[Row],
    proposal: Proposal,
    logits: torch.Tensor,
    sampler: Sampler,
    judged: Sequence[int],
) -> Judgements:
    """The judgement of some rows by each one's own rule, one call per distinct rule.

    Args:
        rows: the batch.
        proposal: what was drafted.
        logits: `(rows, K + 1, V)` the target's raw logits.
        sampler: the rows' sampling.
        judged: rows that have logits.
    """
    width = logits.shape[1] - 1
    target = Target(
        sampler.process(logits, rows, proposal.tokens), sampler.greedy, logits, _spent(rows)
    )
    draft = _as_tensors(proposal, width, logits.device)
    uniforms = _coins(rows, proposal, width, judged).to(logits.device)
    groups: dict[AcceptanceRule, list[int]] = {}
    for row in judged:
        groups.setdefault(rows[row].request.rule, []).append(row)
    out: Judgements = {}
    for rule, members in groups.items():
        whole = len(members) == len(rows)
        try:
            if whole:
                verdict = rule.judge(draft, target, uniforms)
            else:
                verdict = rule.judge(draft.take(members), target.take(members), uniforms[members])
            out.update(_per_row(verdict, members, proposal, rule.lossless))
        except Exception:  # one of them is to blame: each by itself
            for row in members:
                try:
                    verdict = rule.judge(draft.take([row]), target.take([row]), uniforms[[row]])
                    out.update(_per_row(verdict, [row], proposal, rule.lossless))
                except Exception as error:
                    out[row] = error
    best = target.logits.amax(-1)
    for row, kept in out.items():
        if isinstance(kept, Judged) and not bool(_usable(best[row, : kept.accepted + 1])):
            out[row] = unsound()
    return out


def unsound() -> Exception:
    """What ends a request whose target says no numbers."""
    from forerun.errors import ModelError

    return ModelError(
        "the target's logits are not numbers here, so its text cannot go on; check its weights, or "
        "load it in float32"
    )


def _usable(best: torch.Tensor) -> torch.Tensor:
    return best.isfinite().all()


def _per_row(
    verdict: Verdict, members: Sequence[int], proposal: Proposal, lossless: bool
) -> Judgements:
    accepted, following = verdict.accepted.tolist(), verdict.next_token.tolist()
    probs = verdict.accept_prob.tolist()
    drift = None if lossless or verdict.drift is None else verdict.drift.tolist()
    out: Judgements = {}
    for i, row in enumerate(members):
        n = len(proposal.tokens[row])
        lost = None if drift is None else drift[i][:n]
        out[row] = Judged(accepted[i], following[i], probs[i][:n], lost)
    return out


def _as_tensors(proposal: Proposal, width: int, device: torch.device) -> Draft:
    """The draft as rules see it, padded to `width`."""
    tokens, rows = proposal.tokens, len(proposal.tokens)
    padded = [[*some, *[0] * (width - len(some))] for some in tokens]
    steps = proposal.measured[:width]
    return Draft(
        torch.tensor(padded, dtype=torch.long, device=device).view(rows, width),
        torch.tensor([len(some) for some in tokens], device=device),
        torch.stack(proposal.logits[:width], dim=1) if proposal.logits and width else None,
        {k: torch.stack([step[k] for step in steps], 1) for k in steps[0]} if steps else {},
        torch.stack(proposal.ranked[:width], dim=1) if proposal.ranked and width else None,
    )


def _spent(rows: Sequence[Row]) -> torch.Tensor | None:
    """`(rows, 2)` summed drift and tokens so far; None if no row's rule is lossy."""
    if all(row.request.rule.lossless for row in rows):
        return None
    return torch.tensor([[row.drift or 0.0, row.produced] for row in rows], dtype=torch.float64)


def _coins(
    rows: Sequence[Row], proposal: Proposal, width: int, judged: Sequence[int]
) -> torch.Tensor:
    """`(rows, width + 1)` coins; each row draws as many as it needs, whoever its neighbours are."""
    uniforms = np.zeros((len(rows), width + 1))
    for row in judged:
        if not rows[row].request.sampling.greedy:
            *coins, last = rows[row].random.random(len(proposal.tokens[row]) + 1)
            uniforms[row, : len(coins)], uniforms[row, width] = coins, last
    return torch.from_numpy(uniforms)
