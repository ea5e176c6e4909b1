"""What a draft distribution says about its own token, in one pass over the logits."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import torch

from forerun.types import FloatArray, Signals


def measure(logits: torch.Tensor, tokens: torch.Tensor, names: Set[str]) -> dict[str, FloatArray]:
    """Compute the named fields of `Signals` for one drafted token per row.

    Args:
        logits: `(rows, V)` raw draft logits (temperature 1, before any sampling transform).
        tokens: `(rows,)` drafted token ids.
        names: wanted fields.

    Returns:
        `(rows,)` float64 per name, on the host.
    """
    out: dict[str, FloatArray] = {}
    if not names:
        return out
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    best = logits.amax(-1)
    total = (logits - best.unsqueeze(-1)).exp_().sum(-1)
    if "top1" in names:
        out["top1"] = _host(total.reciprocal())
    if "chosen" in names:
        picked = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        out["chosen"] = _host((picked - best).exp() / total)
    return out


def stack(columns: list[dict[str, FloatArray]]) -> Signals:
    """`Signals` of `(rows, n)` from one measurement per drafted token."""
    if not columns or not columns[0]:
        return Signals()
    return Signals(**{k: np.stack([c[k] for c in columns], axis=1) for k in columns[0]})


def _host(values: torch.Tensor) -> FloatArray:
    return values.double().cpu().numpy()
