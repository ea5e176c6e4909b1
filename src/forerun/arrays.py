"""Distributions in arrays of either library: numpy's on the host, torch's on a GPU.

A few numbers take numpy a third of the time that they take torch; exponentials over a vocabulary
are torch's on the host, too. What both libraries call the same is called as it is (`library`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from forerun.signals import float_type
from forerun.types import Array

BLOCK = 128
"""Tokens whose weights are summed before it is known among which the drawn one is."""


def on_host(values: torch.Tensor) -> Array:
    """Logits on the CPU as an array, of at least 32 bits; on a GPU as they are."""
    host = values.device.type == "cpu"
    return values.to(float_type(values)).numpy() if host else values


def beside(values: Any, array: Array) -> Array:
    """Values of the host as `array` is one: of numpy, or of torch on its device."""
    return values if isinstance(array, np.ndarray) else torch.as_tensor(values).to(array.device)


def library(array: Array) -> Any:
    """numpy or torch."""
    return np if isinstance(array, np.ndarray) else torch


def probability_type(logits: Array) -> Any:
    """The type that probabilities of logits are computed in."""
    return logits.dtype if isinstance(logits, np.ndarray) else float_type(logits)


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
        return _sample_on_host(probs, np.asarray(uniform))
    uniform = torch.as_tensor(uniform, dtype=torch.float64, device=probs.device)
    cumulative = probs.to(torch.float64).cumsum(-1) * (probs > 0)
    total = cumulative.amax(-1, keepdim=True)
    # Rounding must not put the point on the total, where no token is left above it.
    point = torch.minimum(uniform.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    # The first token strictly above the point, and one of positive weight: not `searchsorted`,
    # since a parallel sum may differ by rounding across tokens of weight zero.
    return (cumulative > point).view(torch.uint8).argmax(-1)


def _sample_on_host(probs: Array, uniform: Array) -> Array:
    """The same in two steps: a block of the vocabulary, then a token of it."""
    weights = probs.reshape(-1, size := probs.shape[-1])
    blocks = np.add.reduceat(weights, np.arange(0, size, BLOCK), -1, np.float64)
    until = blocks.cumsum(-1)
    point = _below(until[:, -1:], uniform.reshape(-1, 1) * until[:, -1:])
    row, block = np.arange(len(weights)), (until > point).argmax(-1)
    before = np.where(block > 0, until[row, block - 1], 0.0)
    tokens = block[:, None] * BLOCK + np.arange(BLOCK)
    own = weights[row[:, None], np.minimum(tokens, size - 1)] * (tokens < size)
    inside = own.cumsum(-1, np.float64)
    point = _below(inside[:, -1:], point - before[:, None])
    return tokens[row, (inside > point).argmax(-1)].reshape(probs.shape[:-1])


def _below(total: Array, point: Array) -> Array:
    """Points that are less than a total: rounding must leave a token above them."""
    return np.minimum(point, np.nextafter(total, 0))
