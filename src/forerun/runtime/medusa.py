"""Medusa heads: each says one of the next tokens from the same last hidden state."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.errors import ForerunWarning, ModelError
from forerun.runtime.fingerprints import fingerprint
from forerun.runtime.grafts import ABOUT, FORMAT, WEIGHTS, About, read_about
from forerun.runtime.packing import dense, linear, packed

KIND = "medusa"
TOKENS = "tokens"  # name of the tensor of token ids
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
        """Heads K."""
        return sum(name.endswith(UNEMBEDDING) for name in self.weights)

    @property
    def layers(self) -> int:
        """Blocks of each head."""
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


def save_medusa(heads: MedusaHeads, about: About, folder: Path) -> None:
    """Write heads, in bfloat16: half the size. `OSError` if that cannot be."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().to("cpu", torch.bfloat16) for n, t in heads.weights.items()}
    if heads.tokens is not None:
        tensors[TOKENS] = heads.tokens.to("cpu", torch.int32)
    # Written beside, then renamed: an interrupted save leaves the old heads or the new ones.
    beside = folder / f"{WEIGHTS}.tmp"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(beside))
    os.chmod(beside, 0o644)
    os.replace(beside, folder / WEIGHTS)
    text = json.dumps({"format": FORMAT, **asdict(about)}, indent=2, ensure_ascii=False)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")


def load_medusa(model: Any, folder: str | Path) -> tuple[MedusaHeads, About]:
    """The heads of a folder that `save_medusa` wrote, on the target's device and in its dtype.

    Raises:
        ModelError: missing, damaged, of another kind, or not of this target's sizes.

    Warns:
        ForerunWarning: they were trained for another target of the same sizes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    about = read_about(folder)
    if about.kind != KIND:
        raise ModelError(
            f"{str(folder)!r} holds a draft for the drafter {about.kind!r}, not {KIND!r}"
        )
    try:
        tensors = load_file(str(Path(folder) / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {str(folder)!r}: {error}") from error
    own = model.get_output_embeddings().weight
    tokens = tensors.pop(TOKENS, None)
    _check(tensors, tokens, about, tuple(own.shape), folder)
    if fingerprint(model) != about.target:
        warnings.warn(
            f"the Medusa heads in {str(folder)!r} were trained for another target (or for this one "
            "in another precision); where they agree less, drafts are shorter",
            ForerunWarning,
            stacklevel=4,
        )
    there = {name: packed(tensor.to(own.device, own.dtype)) for name, tensor in tensors.items()}
    return MedusaHeads(there, None if tokens is None else tokens.long().to(own.device)), about


def _check(
    tensors: Mapping[str, torch.Tensor],
    tokens: torch.Tensor | None,
    about: About,
    sizes: tuple[int, ...],
    folder: str | Path,
) -> None:
    """Refuse tensors that are not those of these heads on this target."""
    vocab, width = sizes
    count = vocab if tokens is None else len(tokens)
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(about.width):
        expected |= {f"{head}.{i}.weight": (width, width) for i in range(about.layers)}
        expected[f"{head}.{UNEMBEDDING}"] = (count, width)
    good = tokens is None or (len(tokens) and 0 <= int(tokens.min()) <= int(tokens.max()) < vocab)
    if not good or {name: tuple(t.shape) for name, t in tensors.items()} != expected:
        raise ModelError(
            f"the Medusa heads in {str(folder)!r} do not fit this target; they were trained for "
            f"another one (fingerprint {about.target})"
        )
