"""Gumbel noise of sampled requests: the same at a place of the text, whoever draws there."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from forerun.requests import Sampling
from forerun.types import Array

_SPREAD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds of close places are far apart
MOST_KEPT = 64  # most places whose noise is kept at a time
_BELOW_1 = np.float32(1 - 2**-24)  # the greatest single below 1


def stream(seed: int, prompt: Sequence[int], source: Sequence[int] | None = None) -> int:
    """The seed of a request's own random numbers, in [0, 2^63). It is made of the seed that was
    asked for and of the prompt (and source), so that prompts which share a seed do not all draw the
    same."""
    read = np.array([seed % (1 << 63), *prompt, -1, *(source or ())], "<i8")
    return int.from_bytes(blake2b(read.tobytes(), digest_size=8).digest(), "little") >> 1


class Noise:
    """One request's noise: i.i.d. Gumbel(0, 1) for every token at every place of its text.

    `argmax(log p + noise)` is a draw from `p` (Maddison et al. 2014), to 2e-7 of probability. What
    is at a place depends on the seed (`stream`), the place and the kind of device, and on nothing
    else.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed % (1 << 63)
        self._random = np.random.Philox(key=[self._seed, 0])  # a stream of its own for every key
        self._start: Any = self._random.state
        self._known: dict[int, Array] = {}
        """By place, as long as it may be asked for again: draft and target both do."""

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        prompt: Sequence[int],
        source: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Noise | None:
        """What a request draws by, with this seed or its own; None if it is greedy."""
        if sampling.greedy:
            return None
        seed = sampling.seed if seed is None else seed
        assert seed is not None, "what is drawn again needs its seed"
        return cls(stream(seed, prompt, source))

    def add(self, logits: torch.Tensor, first: int, settled: int) -> None:
        """Add noise to `(n, V)` logits, in place: of places in a row, the `first` behind so many
        tokens of text, of which nobody draws the `settled` ones again."""
        known = self._known = {p: noise for p, noise in self._known.items() if p >= settled}
        on_gpu = logits.device.type != "cpu"
        rows = logits if on_gpu else logits.numpy()
        for place, row in enumerate(rows, start=first):
            noise = known.get(place)
            if noise is None or noise.shape != row.shape:
                noise = self._on_gpu(place, row) if on_gpu else self._made(place, len(row))
                if len(known) < MOST_KEPT:
                    known[place] = noise
            row += noise

    def _made(self, place: int, count: int) -> Array:
        self._start["state"]["key"][:] = self._seed, place
        self._random.state = self._start
        bits = self._random.random_raw((count + 1) // 2).view(np.uint32)[:count]
        # log1p keeps what is close to 0 as fine as 32 bits are: there unlikely tokens are drawn.
        x = bits.astype(np.float32)
        x += 0.5
        x *= -(2.0**-32)
        np.maximum(x, -_BELOW_1, out=x)
        torch.from_numpy(x).log1p_().neg_().log_().neg_()  # four times as fast as numpy
        return x

    def _on_gpu(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """Made there: to bring what a large vocabulary needs would take longer."""
        source = torch.Generator(like.device)
        source.manual_seed((self._seed + place * _SPREAD) % (1 << 63))
        x = torch.empty_like(like, dtype=torch.float64)
        return x.exponential_(generator=source).log_().neg_().to(like.dtype)
