"""Exit heads with weights: predictions of the last layer's token after an earlier one.

The heads without weights are `forerun.runtime.layers.LogitLens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.errors import SettingError
from forerun.runtime.drafts import TOKENS, About, Tensors, load_draft, read_about, save_about
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import linear, packed
from forerun.runtime.states import check_depths

KIND = "exits"
FORM = "light"
"""What `draft.json` calls heads of this form."""


class LightHeads:
    """An affine correction of the hidden state, then the model's own norm and unembedding.

    `s · logits(h + A·h + b)`, with `weight` A `(H, H)`, `bias` b `(H,)` and `scale` s `(1,)`. With
    `A = b = 0` and `s = 1` it is the logit lens, which is where training begins: what a layer
    already says right has not to be learnt again, and weight decay pulls towards it. The norm fixes
    the size of what is unembedded, so how sure a head is needs a number of its own, the scale.

    Args:
        access: the model.
        weights: per exit layer (counted from 1) its tensors by name, on the model's device. Tensors
            that require a gradient are used as they are, others in the model's dtype.
        tokens: `(n,)` ids of the heads' vocabulary, on the model's device; None: the
            whole vocabulary. A shallow exit costs a projection onto them, and most of what it is
            sure of is frequent (Zhao et al. 2025, FR-Spec); what is verified is not affected.
        tuned: settings of `specbound` that were found for these heads.

    Raises:
        SettingError: no layers, or layers the model does not have.
    """

    def __init__(
        self,
        access: LayerAccess,
        weights: Mapping[int, Mapping[str, torch.Tensor]],
        tokens: torch.Tensor | None = None,
        tuned: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = check_depths(sorted(weights), access.layers)  # the exit layers
        self.access, self.weights, self.tuned = access, weights, dict(tuned or {})
        self.tokens = tokens
        self._rows = None if tokens is None else access.unembedding_of(tokens)
        self._dtype = access.unembedding.dtype
        self._used = {
            layer: {name: self._for_use(tensor) for name, tensor in own.items()}
            for layer, own in weights.items()
        }

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the head after `layer` layers.

        Args:
            layer: one of `layers`.
            hidden: `(..., H)`, the output of that many layers, before the final norm.

        Returns:
            `(..., n)` for the n `tokens`, or all, in the model's dtype.

        Raises:
            SettingError: there is no head after that layer.
        """
        if layer not in self._used:
            have = ", ".join(map(str, self.layers))
            raise SettingError(f"no exit head after layer {layer}; there are heads after {have}")
        own = self._used[layer]
        x = hidden.to(own["bias"].dtype)
        x = x + linear(x, own["weight"], own["bias"])
        return self.access.logits(x.to(self._dtype), self._rows) * own["scale"].to(self._dtype)

    @property
    def form(self) -> dict[str, Any]:
        """What `draft.json` says of heads."""
        tuned = {"tuned": self.tuned} if self.tuned else {}
        return {"head": FORM, "layers": list(self.layers), **tuned}

    def _for_use(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            return tensor
        tensor = tensor.to(self._dtype)
        return packed(tensor) if tensor.dim() == 2 else tensor


def shapes_of_head(width: int) -> dict[str, tuple[int, ...]]:
    """Of one layer's tensors by name, for hidden states of H."""
    return {"weight": (width, width), "bias": (width,), "scale": (1,)}


def default_layers(count: int) -> tuple[int, ...]:
    """About six exit layers, evenly spaced, of a model of `count` layers; never the last.

    >>> default_layers(12), default_layers(32), default_layers(2)
    ((2, 4, 6, 8, 10), (5, 10, 15, 20, 25, 30), (1,))
    """
    step = max(1, count // 6)
    return tuple(range(step, count, step))


def load_heads(folder: str | Path, access: LayerAccess) -> LightHeads:
    """The exit heads in a folder, on the model's device; raises and warns as `load_draft`."""
    vocab, width = access.unembedding.shape

    def shapes(about: About, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        if about.settings["head"] != FORM:
            raise ValueError(
                f"heads of the form {about.settings['head']!r}; {FORM!r} ones are read"
            )
        layers = check_depths(about.settings["layers"], access.layers)
        own = shapes_of_head(width)
        return {f"{layer}.{name}": shape for layer in layers for name, shape in own.items()}

    about, tensors = load_draft(folder, KIND, shapes, access.model, vocab)
    device = access.unembedding.device
    tokens = tensors.pop(TOKENS, None)
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        layer, _, name = key.partition(".")
        weights.setdefault(int(layer), {})[name] = tensor.to(device)
    chosen = None if tokens is None else tokens.long().to(device)
    return LightHeads(access, weights, chosen, about.settings.get("tuned", {}))


def keep_settings(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Save the settings found for exit heads beside them: `specbound` takes it as its defaults."""
    about = read_about(folder, KIND)
    save_about(folder, replace(about, settings={**about.settings, "tuned": dict(settings)}))
