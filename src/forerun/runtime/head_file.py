"""What files of heads hold, read without torch: the drafter `eagle`'s in numpy's arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forerun.runtime.drafts import TOKENS, About, Tensors, load_draft

KIND = "eagle"
HEAD = 64  # width of an attention head
EPS = 1e-5
ROTARY = tuple(10_000.0 ** (-2 * i / HEAD) for i in range(HEAD // 2))
"""Radians per place by which pairs turn."""

WHOLE = 1 << 30  # a head's `span` that leaves nothing of a prompt out
CONFIG = "config.json"  # of EAGLE-3 heads in their makers' layouts, and
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""variants of their layer, as both layouts name them; false where a file does not say."""


@dataclass(frozen=True)
class HeadWeights:
    """What `eagle.EagleHead` computes with; members mean the same there."""

    tensors: dict[str, NDArray[np.float32]]  # by the names of its parameters
    tokens: NDArray[np.int64]  # `(V,)` ids of the tokens that it says
    width: int
    inner: int
    states: int  # numbers that all depths' states of a token have
    reads: int
    token_bytes: int
    span: ClassVar[int] = 256
    """It learns from short texts: SmolLM2's keeps less where it reads more (`dev/LOG.md`)."""

    @property
    def weights(self) -> int:
        return sum(own.size for name, own in self.tensors.items() if not name.startswith("fuse"))


def read_head(folder: str | Path, width: int, model: Any, vocab_size: int) -> HeadWeights:
    """The head in a folder; as `load_draft`. H, `width`, is that of the target's states."""

    def shapes(about: About, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        (d,), (_, inner) = tensors["norm.weight"].shape, tensors["down.weight"].shape
        if d % HEAD:
            raise ValueError(f"its width, {d}, is no multiple of {HEAD}")
        return {
            **dict.fromkeys(("attention_norm.weight", "mlp_norm.weight", "norm.weight"), (d,)),
            "qkv.weight": (3 * d, d),
            "out.weight": (d, d),
            "gate_up.weight": (2 * inner, d),
            "down.weight": (d, inner),
            "embedding.weight": (len(tensors[TOKENS]) + 1, d),
            "fuse.weight": (d, len(about.settings["depths"]) * width),
            "input.weight": (d, 2 * d),
        }

    _, tensors, tokens = load_draft(folder, KIND, shapes, model, vocab_size, host=True)
    assert tokens is not None
    own = {name: tensor.astype(np.float32, copy=False) for name, tensor in tensors.items()}
    (width, inner), states = own["down.weight"].shape, own["fuse.weight"].shape[1]
    return HeadWeights(own, tokens, width, inner, states, len(tokens), 8 * width)
