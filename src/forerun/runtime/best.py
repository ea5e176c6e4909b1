"""Most likely tokens and their signals, without a copy of the logits.

Read with numpy from the pass's own output: an arg-max over 6,144 (152,000) logits takes 1 (10) µs
there and 40 (205) as a `TopK` node of the graph.
"""

import math
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


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
