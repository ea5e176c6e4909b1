"""What a distribution says about its own tokens, in one pass over the logits."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from forerun.lazy import torch


def measure(logits: torch.Tensor, tokens: torch.Tensor, names: Set[str]) -> dict[str, torch.Tensor]:
    """Compute the named signals (`types.SIGNALS`, `types.LIVE_SIGNALS`) of one token per
    distribution.

    Args:
        logits: `(..., V)` logits at temperature 1, before truncation; −inf excludes a token.
        tokens: `(...,)` the tokens that were drafted.
        names: wanted fields.

    Returns:
        `(...,)` float tensors on the logits' device, one per name.
    """
    if not names:
        return {}
    log = logits.log_softmax(-1, dtype=float_type(logits))
    out: dict[str, torch.Tensor] = {}
    if "chosen" in names:
        out["chosen"] = log.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).exp()
    if names & {"entropy", "normalized_entropy"}:
        out["entropy"] = entropy(log)
        # A vocabulary of one token has no uncertainty to normalise by.
        most = math.log(logits.shape[-1]) or 1.0
        out["normalized_entropy"] = (out["entropy"] / most).clamp(max=1)
    if names & {"logit_margin", "softmax_margin", "second"}:
        best, ranked = log.topk(min(2, log.shape[-1]), dim=-1)
        top = best[..., 0]
        second = best[..., 1] if best.shape[-1] == 2 else torch.full_like(top, -math.inf)
        out["logit_margin"] = top - second
        out["second"] = ranked[..., -1].to(log.dtype)
        if "softmax_margin" in names:
            out["softmax_margin"] = -torch.expm1(second - top)
        if "top1" in names:
            out["top1"] = top.exp()
    elif "top1" in names:
        out["top1"] = log.amax(-1).exp()
    if "logit_variance" in names:
        possible = log > -torch.inf  # a constant takes nothing from a variance
        count = possible.sum(-1, keepdim=True)
        mean = torch.where(possible, log, 0).sum(-1, keepdim=True) / count
        out["logit_variance"] = (torch.where(possible, log - mean, 0) ** 2).sum(-1) / count[..., 0]
    return {name: out[name] for name in names}


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """`(...,)` Shannon entropy in nats of `(..., V)` log-probabilities; −inf counts nothing."""
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def float_type(logits: torch.Tensor) -> torch.dtype:
    """The type probabilities are computed in: float64 if the logits are, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def read(
    logits: NDArray[np.float32], names: frozenset[str], drawn: Sequence[int] | None = None
) -> tuple[list[int], list[bool], dict[str, list[float]]]:
    """Most likely tokens of `(n, V)` logits, which are written to and restored, and the `names`
    among `Signals` of these, or of the tokens `drawn`.

    Returns:
        n ids (of equal logits the first); whether each one's logit is a finite number; n values
        per name, NaN where it is not.
    """
    tokens = logits.argmax(1).tolist()
    # NaN is the greatest of all to argmax, so the best logit shows it.
    sound = [math.isfinite(row[token]) for row, token in zip(logits, tokens, strict=True)]
    signals: dict[str, list[float]] = {name: [] for name in names}
    if names:
        chosen = tokens if drawn is None else drawn
        for row, token, own, fine in zip(logits, tokens, chosen, sound, strict=True):
            values = _signals(row, token, own, names) if fine else dict.fromkeys(names, math.nan)
            for name, value in values.items():
                signals[name].append(value)
    return tokens, sound, signals


LOWEST = np.finfo(np.float32).min
_kept = threading.local()


def _scratch(size: int) -> NDArray[np.float32]:
    """`(2, size)`, the same at every call: new memory is cold, and takes longer than the sums."""
    held: NDArray[np.float32] | None = getattr(_kept, "scratch", None)
    if held is None or held.shape[1] != size:
        held = _kept.scratch = np.empty((2, size), np.float32)
    return held


def _signals(
    row: NDArray[np.float32], token: int, chosen: int, names: frozenset[str]
) -> dict[str, float]:
    """Signals of one distribution, whose most likely token and chosen one are known; see
    `forerun.signals`."""
    top = row[token]
    out: dict[str, float] = {}
    if names & {"logit_margin", "softmax_margin", "second"}:
        row[token] = -np.inf
        second = int(row.argmax())
        margin = float(top) - float(row[second])
        row[token] = top
        out["second"] = second
        out["logit_margin"] = margin
        out["softmax_margin"] = -math.expm1(-margin)
    if names & {"top1", "chosen", "entropy", "normalized_entropy"}:
        total, entropy = _moments(row, top)
        out["top1"] = 1 / total
        out["chosen"] = math.exp(float(row[chosen]) - float(top)) / total
        out["entropy"] = entropy
        out["normalized_entropy"] = min(1.0, entropy / (math.log(len(row)) or 1.0))
    if "logit_variance" in names:
        out["logit_variance"] = float(row[row > -np.inf].var(dtype=np.float64))
    return {name: out[name] for name in names}


def entropy_of(row: NDArray[np.float32]) -> float:
    """In nats, of the distribution of `(V,)` logits; NaN if they are none of any."""
    top = row.max()
    return _moments(row, top)[1] if math.isfinite(top) else math.nan


def _moments(row: NDArray[np.float32], top: np.float32) -> tuple[float, float]:
    """The sum of a distribution's weights, of which the highest logit's is 1, and its entropy."""
    below, weights = _scratch(len(row))
    np.subtract(row, top, out=below)  # ≤ 0
    np.exp(below, out=weights)
    # `vdot` takes 0 · inf for NaN without a warning, and saves a clip where nothing is excluded.
    total, mean = float(weights.sum()), float(np.vdot(weights, below))
    if math.isnan(mean):  # -inf counts nothing: its weight is 0
        mean = float(np.vdot(weights, np.maximum(below, LOWEST, out=below)))
    return total, math.log(total) - mean / total
