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
    probs = logits.softmax(-1, dtype=float_type(logits))
    if "top1" in names:
        out["top1"] = _host(probs.amax(-1))
    if "chosen" in names:
        out["chosen"] = _host(probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
    return out


def float_type(logits: torch.Tensor) -> torch.dtype:
    """The type probabilities are computed in: float64 if the logits are, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def stack(columns: list[dict[str, FloatArray]]) -> Signals:
    """`Signals` of `(rows, n)` from one measurement per drafted token."""
    if not columns or not columns[0]:
        return Signals()
    return Signals(**{k: np.stack([c[k] for c in columns], axis=1) for k in columns[0]})


def _host(values: torch.Tensor) -> FloatArray:
    return values.cpu().numpy().astype(np.float64)
