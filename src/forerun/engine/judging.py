"""The third step of a round: put the draft before each row's rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forerun.engine.drafting import Drafted
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.rules.base import AcceptanceRule
from forerun.types import Draft, Target, Verdict


def judge(rows: Sequence[Row], drafted: Drafted, logits: torch.Tensor, sampler: Sampler) -> Verdict:
    """The verdict on every row, one call per distinct rule.

    Args:
        rows: the batch.
        drafted: what was drafted.
        logits: `(rows, K + 1, V)` the target's raw logits.
        sampler: the rows' sampling.
    """
    device, width = logits.device, logits.shape[1] - 1
    target = Target(
        sampler.process(logits, rows, drafted.tokens),
        sampler.greedy,
        logits,
        _spent(rows),
    )
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in drafted.tokens]
    draft = Draft(
        torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width),
        torch.tensor([len(tokens) for tokens in drafted.tokens], device=device),
        torch.stack(drafted.logits[:width], dim=1) if drafted.logits and width else None,
        _signals(drafted, width),
        torch.stack(drafted.ranked[:width], dim=1) if drafted.ranked and width else None,
    )
    uniforms = _coins(rows, drafted, width).to(device)
    groups: dict[AcceptanceRule, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.rule, []).append(i)
    if len(groups) == 1:
        return rows[0].rule.judge(draft, target, uniforms)
    accepted = torch.empty(len(rows), dtype=torch.long, device=device)
    following, prob = accepted.clone(), torch.zeros(draft.tokens.shape, device=device)
    drift, failed = torch.zeros_like(prob), torch.zeros_like(accepted, dtype=torch.bool)
    for rule, members in groups.items():
        verdict = rule.judge(draft.take(members), target.take(members), uniforms[members])
        accepted[members], following[members] = verdict.accepted, verdict.next_token
        prob[members] = verdict.accept_prob.to(prob)
        if verdict.drift is not None:
            drift[members] = verdict.drift.to(drift)
        if verdict.failed is not None:
            failed[members] = verdict.failed
    return Verdict(accepted, following, prob, drift=drift, failed=failed)


def errors(rows: Sequence[Row], verdict: Verdict, logits: torch.Tensor) -> list[str | None]:
    """Per row why the target has no next token for it; None where it has one.

    Args:
        rows: the batch.
        verdict: of `judge`.
        logits: `(rows, K + 1, V)` the target's raw logits.
    """
    out: list[str | None] = [None] * len(rows)
    if verdict.failed is None or not (failed := verdict.failed.nonzero().flatten().tolist()):
        return out
    for i in failed:
        place = int(verdict.accepted[i])
        done = f"after {rows[i].produced + place} new tokens"
        if bool(logits[i, place].amax().isfinite()):
            out[i] = f"{done} logit_bias and min_new_tokens leave no token to choose; allow one"
        else:
            out[i] = (
                f"{done} the target's logits are no numbers (NaN or infinite); the checkpoint may "
                "be damaged, or its values too large for the dtype: try float32 or bfloat16"
            )
    return out


def _spent(rows: Sequence[Row]) -> torch.Tensor | None:
    """`(rows, 2)` summed drift and tokens so far; None if no row's rule is lossy."""
    if all(row.rule.lossless for row in rows):
        return None
    return torch.tensor([[row.drift or 0.0, row.produced] for row in rows], dtype=torch.float64)


def _signals(drafted: Drafted, width: int) -> dict[str, torch.Tensor]:
    """`(rows, width)` what rules read."""
    steps = drafted.measured[:width]
    return {k: torch.stack([step[k] for step in steps], 1) for k in steps[0]} if steps else {}


def _coins(rows: Sequence[Row], drafted: Drafted, width: int) -> torch.Tensor:
    """`(rows, width + 1)` coins; each row draws as many as it needs, whoever its neighbours are."""
    if all(row.sampling.greedy for row in rows):
        return torch.zeros(len(rows), width + 1, dtype=torch.float64)
    uniforms = np.zeros((len(rows), width + 1))
    for i, row in enumerate(rows):
        if not row.sampling.greedy:
            *coins, last = row.random.random(len(drafted.tokens[i]) + 1)
            uniforms[i, : len(coins)], uniforms[i, width] = coins, last
    return torch.from_numpy(uniforms)
