"""Heads with weights on hidden states: exits, which say the last layer's token after an earlier
one, and Medusa's, which say later tokens after the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.errors import SettingError
from forerun.runtime.drafts import TOKENS, About, Tensors, load_draft, read_about, save_about
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import dense, linear, packed
from forerun.runtime.states import check_depths

EXITS, MEDUSA = "exits", "medusa"
FORM = "light"  # what `draft.json` calls exit heads of this form
UNEMBEDDING = "unembedding"


class ExitHeads:
    """An affine correction of the hidden state, then the model's own norm and unembedding.

    `s · logits(h + A·h + b)`, with `weight` A `(H, H)`, `bias` b `(H,)` and `scale` s `(1,)`. With
    `A = b = 0` and `s = 1` it is the logit lens, which is where training begins: what a layer
    already says right has not to be learnt again, and weight decay pulls towards it. The norm fixes
    the size of what is unembedded, so how sure a head is needs a number of its own, the scale.

    Args:
        access: the model.
        weights: per exit layer (counted from 1) its tensors by name, on the model's device. Tensors
            that require a gradient are used as they are, others in the model's dtype. None: all
            layers but the last have the logit lens (nostalgebraist 2020), with nothing to train.
        tokens: `(n,)` ids of the heads' vocabulary, on the model's device; None: all. A shallow
            exit costs a projection onto them, and most of what it is sure of is frequent (Zhao et
            al. 2025, FR-Spec); what is verified is not affected.
        tuned: settings of `specbound` that were found for these heads.

    Raises:
        SettingError: no layers, or layers the model does not have.
    """

    def __init__(
        self,
        access: LayerAccess,
        weights: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        tokens: torch.Tensor | None = None,
        tuned: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = tuple(range(1, access.layers))  # the exit layers
        if weights is not None:
            self.layers = check_depths(sorted(weights), access.layers)
        self.access, self.weights, self.tuned = access, weights or {}, dict(tuned or {})
        self.tokens = tokens
        self._rows = None if tokens is None else access.unembedding_of(tokens)
        self._dtype = dtype = access.unembedding.dtype

        def for_use(own: torch.Tensor) -> torch.Tensor:
            own = own if own.requires_grad else own.to(dtype)
            return own if own.requires_grad or own.dim() < 2 else packed(own)

        self._used = {n: {k: for_use(t) for k, t in own.items()} for n, own in self.weights.items()}

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the head after `layer` layers, `(..., n)` for the n `tokens`, or all, from
        `(..., H)` before the final norm; `SettingError` if there is no head."""
        if not self._used:
            return self.access.logits(hidden, self._rows)
        if layer not in self._used:
            have = ", ".join(map(str, self.layers))
            raise SettingError(f"no exit head after layer {layer}; there are heads after {have}")
        own = self._used[layer]
        x = hidden.to(own["bias"].dtype)
        x = x + linear(x, own["weight"], own["bias"])
        return self.access.logits(x.to(self._dtype), self._rows) * own["scale"].to(self._dtype)


def shapes_of_head(width: int) -> dict[str, tuple[int, ...]]:
    """Of one exit's tensors by name, for hidden states of H."""
    return {"weight": (width, width), "bias": (width,), "scale": (1,)}


def default_layers(count: int) -> tuple[int, ...]:
    """About six exit layers, evenly spaced, of a model of `count` layers; never the last.

    >>> default_layers(12), default_layers(32), default_layers(2)
    ((2, 4, 6, 8, 10), (5, 10, 15, 20, 25, 30), (1,))
    """
    step = max(1, count // 6)
    return tuple(range(step, count, step))


def load_heads(folder: str | Path, access: LayerAccess) -> ExitHeads:
    """The exit heads in a folder, on the model's device; raises and warns as `load_draft`."""
    vocab, width = access.unembedding.shape

    def shapes(about: About, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        if (head := about.settings["head"]) != FORM:
            raise ValueError(f"heads of the form {head!r}; {FORM!r} ones are read")
        layers = check_depths(about.settings["layers"], access.layers)
        own = shapes_of_head(width)
        return {f"{layer}.{name}": shape for layer in layers for name, shape in own.items()}

    about, tensors, tokens = load_draft(folder, EXITS, shapes, access.model, vocab)
    weights: dict[int, Tensors] = {}
    for key, tensor in tensors.items():
        layer, _, name = key.partition(".")
        weights.setdefault(int(layer), {})[name] = tensor
    return ExitHeads(access, weights, tokens, about.settings.get("tuned", {}))


def keep_settings(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Save the settings found for exit heads beside them: `specbound` takes it as its defaults."""
    about = read_about(folder, EXITS)
    save_about(folder, replace(about, settings={**about.settings, "tuned": dict(settings)}))


@dataclass
class MedusaHeads:
    """Heads on one hidden state `h`: `W₂ · (x + SiLU(W₁ x))`, from x = h, one block or several.

    Head `k`, counted from 0, says the token `k + 2` places behind the one that `h` is the state of;
    the model's own head says the one between.
    """

    weights: Tensors  # "k.i.weight" `(H, H)` of block i of head k, "k.unembedding" `(n, H)`
    tokens: torch.Tensor | None = None  # `(n,)` ids that the heads can say; None: all

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
    """Medusa's heads as they begin: `W₁` zero and `W₂` the model's own head, copies in float32."""
    own = dense(model.get_output_embeddings().weight.detach())
    own = own if tokens is None else own[tokens]
    weights: Tensors = {}
    for head in range(count):
        for layer in range(layers):
            weights[f"{head}.{layer}.weight"] = own.new_zeros(2 * own.shape[1:]).float()
        weights[f"{head}.{UNEMBEDDING}"] = own.to(torch.float32, copy=True)
    return MedusaHeads(weights, tokens)


def load_medusa(model: Any, folder: str | Path) -> MedusaHeads:
    """Medusa's heads in a folder, on the target's device; raises and warns as `load_draft`."""
    own = model.get_output_embeddings().weight
    vocab, width = own.shape

    def shapes(about: About, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        out: dict[str, tuple[int, ...]] = {}
        for head in range(about.settings["width"]):
            blocks = range(about.settings["layers"])
            out |= {f"{head}.{i}.weight": (width, width) for i in blocks}
            out[f"{head}.{UNEMBEDDING}"] = (len(tensors.get(TOKENS, range(vocab))), width)
        return out

    _, tensors, tokens = load_draft(folder, MEDUSA, shapes, model, vocab)
    return MedusaHeads({n: packed(t.to(own.dtype)) for n, t in tensors.items()}, tokens)
