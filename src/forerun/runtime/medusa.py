"""Medusa heads: each says one of the next tokens from the same last hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.runtime.drafts import TOKENS, About, Tensors, load_draft
from forerun.runtime.packing import dense, linear, packed

KIND = "medusa"
UNEMBEDDING = "unembedding"


@dataclass
class MedusaHeads:
    """Heads on one hidden state `h`: `W₂ · (x + SiLU(W₁ x))`, from x = h, one block or several.

    Head `k`, counted from 0, says the token `k + 2` places behind the one that `h` is the state of;
    the model's own head says the one between.

    Args:
        weights: `"k.i.weight"` `(H, H)` of block i of head k, `"k.unembedding"` `(n, H)`.
        tokens: `(n,)` ids that the heads can say; None: the whole vocabulary.
    """

    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return sum(name.endswith(UNEMBEDDING) for name in self.weights)

    @property
    def layers(self) -> int:
        return sum(name.startswith("0.") for name in self.weights) - 1

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., n)` logits of a head from states `(..., H)`."""
        x = hidden
        for layer in range(self.layers):
            x = x + F.silu(linear(x, self.weights[f"{head}.{layer}.weight"]))
        return linear(x, self.weights[f"{head}.{UNEMBEDDING}"])


def new_heads(
    model: Any, count: int, layers: int = 1, tokens: torch.Tensor | None = None
) -> MedusaHeads:
    """Heads as they begin: `W₁` zero and `W₂` the model's own head, each a copy in float32."""
    own = dense(model.get_output_embeddings().weight.detach())
    own = own if tokens is None else own[tokens]
    weights: dict[str, torch.Tensor] = {}
    for head in range(count):
        for layer in range(layers):
            weights[f"{head}.{layer}.weight"] = torch.zeros(
                own.shape[1], own.shape[1], device=own.device
            )
        weights[f"{head}.{UNEMBEDDING}"] = own.to(torch.float32, copy=True)
    return MedusaHeads(weights, tokens)


def load_medusa(model: Any, folder: str | Path) -> MedusaHeads:
    """The heads in a folder, on the target's device; raises and warns as `load_draft`."""
    own = model.get_output_embeddings().weight
    vocab, width = own.shape

    def shapes(about: About, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        out: dict[str, tuple[int, ...]] = {}
        for head in range(about.settings["width"]):
            blocks = range(about.settings["layers"])
            out |= {f"{head}.{i}.weight": (width, width) for i in blocks}
            out[f"{head}.{UNEMBEDDING}"] = (len(tensors.get(TOKENS, range(vocab))), width)
        return out

    _, tensors = load_draft(folder, KIND, shapes, model, vocab)
    tokens = tensors.pop(TOKENS, None)
    there = {name: packed(tensor.to(own.device, own.dtype)) for name, tensor in tensors.items()}
    return MedusaHeads(there, None if tokens is None else tokens.long().to(own.device))
