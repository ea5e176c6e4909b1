"""Distributions in arrays of either library: numpy's on the host, torch's on a GPU.

A few numbers take numpy a third of the time that they take torch; exponentials over a vocabulary
are torch's on the host, too. What both libraries call the same is called as it is (`library`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from forerun.lazy import torch
from forerun.signals import float_type
from forerun.types import Array

BLOCK = 128  # tokens whose weights are summed before it is known among which the drawn one is


def on_host(values: Array) -> Array:
    """Logits on the CPU as an array, of at least 32 bits; on a GPU as they are."""
    try:
        array = values if isinstance(values, np.ndarray) else values.numpy()
    except TypeError:  # of a GPU, or of a type that numpy lacks
        return values if values.device.type != "cpu" else values.float().numpy()
    return array if array.dtype != np.float16 else array.astype(np.float32)


def beside(values: Any, array: Array) -> Array:
    """Values of the host as `array` is one: of numpy, or of torch on its device."""
    return values if isinstance(array, np.ndarray) else torch.as_tensor(values).to(array.device)


_numbers = cache(np.arange)  # which takes longer than all that is done with it


def numbers(count: int, array: Array) -> Array:
    """0, 1, … beside another array; only to be read."""
    return beside(_numbers(count), array)


def library(array: Array) -> Any:
    """numpy or torch."""
    return np if isinstance(array, np.ndarray) else torch


def probability_type(logits: Array) -> Any:
    """The type that probabilities of logits are computed in."""
    return logits.dtype if isinstance(logits, np.ndarray) else float_type(logits)


def at_most(array: Array, most: float) -> Array:
    """`array.clip(None, most)` in a third of the time."""
    return np.minimum(array, most) if isinstance(array, np.ndarray) else array.clamp(max=most)


def at_least(array: Array, least: float) -> Array:
    """`array.clip(least)`, likewise."""
    return np.maximum(array, least) if isinstance(array, np.ndarray) else array.clamp(min=least)


def copied(array: Array) -> Array:
    """A copy of an array."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def padded(array: Array, above: int, behind: int) -> Array:
    """`(n, k)` numbers with so many rows of zeros above them and columns of zeros behind."""
    if isinstance(array, np.ndarray):
        return np.pad(array, ((above, 0), (0, behind)))
    return torch.nn.functional.pad(array, (0, behind, above, 0))


def cast(array: Array, dtype: Any) -> Array:
    """An array of another type."""
    return array.astype(dtype) if isinstance(array, np.ndarray) else array.to(dtype)


def by_torch(function: Callable[..., torch.Tensor], *arrays: Array) -> Array:
    """What a function of tensors makes of arrays."""
    if isinstance(arrays[0], np.ndarray):
        return function(*map(torch.from_numpy, arrays)).numpy()
    return function(*arrays)


def softmax(logits: Array) -> Array:
    """Probabilities, of at least 32 bits, of `(..., V)` logits; all are NaN where one logit is a
    NaN or +inf, or all are −inf."""
    return by_torch(lambda x: x.softmax(-1, dtype=float_type(x)), logits)


def entropy(probs: Array) -> Array:
    """`(...,)` Shannon entropy in nats of `(..., V)` probabilities."""
    return by_torch(lambda x: torch.special.entr(x).sum(-1), probs)


def finite(array: Array) -> Array:
    """`array.isfinite()` in half the time, which counts for a few numbers."""
    return abs(array) < np.inf


def put(array: Array, index: Array, new: float) -> Array:
    """A copy of a `(..., V)` array with a number at `(..., 1)` places."""
    if not isinstance(array, np.ndarray):
        return array.scatter(-1, index, new)
    out = array.copy()
    np.put_along_axis(out, index, new, -1)
    return out


def one_hot(logits: Array) -> Array:
    """All mass on the arg-max."""
    nothing = library(logits).zeros_like(logits, dtype=probability_type(logits))
    return put(nothing, logits.argmax(-1)[..., None], 1)


def sample(probs: Array, uniform: Array) -> Array:
    """Draw from each distribution by inverting its cumulative sum.

    Args:
        probs: `(..., V)` non-negative weights, not all zero; they need not sum to one.
        uniform: `(...,)` float64 in [0, 1).

    Returns:
        `(...,)` int64 token ids. A token of weight zero is never drawn.
    """
    if isinstance(probs, np.ndarray):
        pairs = zip(probs.reshape(-1, probs.shape[-1]), np.ravel(uniform).tolist(), strict=True)
        tokens = [_picked(weights, coin)[0] for weights, coin in pairs]
        return np.array(tokens).reshape(probs.shape[:-1])
    uniform = torch.as_tensor(uniform, dtype=torch.float64, device=probs.device)
    cumulative = probs.to(torch.float64).cumsum(-1) * (probs > 0)
    total = cumulative.amax(-1, keepdim=True)
    # Rounding must not put the point on the total, where no token is left above it.
    point = torch.minimum(uniform.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    # The first token strictly above the point, and one of positive weight: not `searchsorted`,
    # since a parallel sum may differ by rounding across tokens of weight zero.
    return (cumulative > point).view(torch.uint8).argmax(-1)


def draw(logits: Array, coins: Sequence[float], probs: Array) -> tuple[list[int], list[float]]:
    """A token of every distribution of `(rows, V)` logits by a coin of its own, and its
    probability; that of all is written into `probs`, NaN where the logits are those of none."""
    if not isinstance(logits, np.ndarray):
        probs[:] = softmax(logits)
        tokens = sample(probs, coins)[:, None]
        return tokens[:, 0].tolist(), probs.gather(-1, tokens)[:, 0].tolist()
    out, chances = [], []
    for row, own, coin in zip(logits, probs, coins, strict=True):
        top, token = float(row.max()), 0
        if math.isfinite(top):
            np.exp(np.subtract(row, top, out=own), out=own)
            token, total = _picked(own, coin)
            own /= total
        else:
            own[:] = math.nan
        out.append(token)
        chances.append(float(own[token]))
    return out, chances


def _picked(weights: Array, coin: float) -> tuple[int, float]:
    """`sample` of `(V,)` weights of the host, and their sum: a block is drawn, then its token."""
    sums = np.add.reduceat(weights, _numbers(0, len(weights), BLOCK), dtype=np.float64).cumsum()
    total = float(sums[-1])
    point = min(coin * total, math.nextafter(total, 0))
    block = int(sums.searchsorted(point, "right"))
    if block == len(sums):  # of no distribution
        return 0, total
    inside = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    point = point - float(sums[block - 1]) if block else point
    point = min(point, math.nextafter(float(inside[-1]), 0))
    return block * BLOCK + int(inside.searchsorted(point, "right")), total
