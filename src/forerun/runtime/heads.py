"""Exit heads with weights: predictions of the last layer's token after an earlier one.

The heads without weights are `forerun.runtime.layers.LogitLens`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from forerun.errors import SettingError
from forerun.runtime.drafts import TOKENS, About, Tensors, load_draft, read_about, save_about
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import linear, packed

KIND = "exits"

Weights = Mapping[int, Mapping[str, torch.Tensor]]  # per exit layer, its tensors by name


class TrainedHeads(ABC):
    """Exit heads with tensors of their own; as `forerun.runtime.layers.ExitHeads` wants them.

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

    kind: ClassVar[str]

    def __init__(
        self,
        access: LayerAccess,
        weights: Weights,
        tokens: torch.Tensor | None = None,
        tuned: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = check_layers(list(weights), access.layers)  # the exit layers, rising
        self.access, self.weights, self.tuned = access, weights, dict(tuned or {})
        self.tokens = tokens
        self._rows = None if tokens is None else access.unembedding_of(tokens)
        self._dtype = access.unembedding.dtype
        self._used = {
            layer: {name: self._for_use(tensor) for name, tensor in own.items()}
            for layer, own in weights.items()
        }

    @abstractmethod
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

    @property
    def form(self) -> dict[str, Any]:
        """What `draft.json` says of heads."""
        tuned = {"tuned": self.tuned} if self.tuned else {}
        return {"head": self.kind, "layers": list(self.layers), **tuned}

    @classmethod
    @abstractmethod
    def shapes(cls, vocab: int, width: int, rank: int) -> dict[str, tuple[int, ...]]:
        """Of one layer's tensors, for n tokens and hidden states of H."""

    def _for_use(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            return tensor
        tensor = tensor.to(self._dtype)
        return packed(tensor) if tensor.dim() == 2 else tensor

    def _of(self, layer: int) -> dict[str, torch.Tensor]:
        if layer not in self._used:
            have = ", ".join(map(str, self.layers))
            raise SettingError(f"no exit head after layer {layer}; there are heads after {have}")
        return self._used[layer]


class LightHeads(TrainedHeads):
    """An affine correction of the hidden state, then the model's own norm and unembedding.

    `s · logits(h + A·h + b)`, with `A` a matrix `weight (H, H)` or the product
    `up (H, R) · down (R, H)`, `bias (H,)` and `scale (1,)`. With `A = b = 0` and `s = 1` it is the
    logit lens, which is where training begins: what a layer already says right has not to be learnt
    again, and weight decay pulls towards it. The norm fixes the size of what is unembedded, so how
    sure a head is needs a number of its own, the scale.
    """

    kind = "light"

    @classmethod
    def shapes(cls, vocab: int, width: int, rank: int) -> dict[str, tuple[int, ...]]:
        """The map's, whole or of a rank."""
        maps = {"down": (rank, width), "up": (width, rank)} if rank else {"weight": (width, width)}
        return {**maps, "bias": (width,), "scale": (1,)}

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the corrected hidden state."""
        own = self._of(layer)
        x = hidden.to(own["bias"].dtype)
        if "weight" in own:
            x = x + linear(x, own["weight"], own["bias"])
        else:
            x = x + linear(linear(x, own["down"]), own["up"], own["bias"])
        return self.access.logits(x.to(self._dtype), self._rows) * own["scale"].to(self._dtype)


class FullHeads(TrainedHeads):
    """An LM head per exit layer: `weight (n, H)`, `bias (n,)`, on hidden states of unit RMS."""

    kind = "full"

    @classmethod
    def shapes(cls, vocab: int, width: int, rank: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (vocab, width), "bias": (vocab,)}

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of this layer's own head."""
        own = self._of(layer)
        unit = F.rms_norm(hidden.float(), hidden.shape[-1:], eps=1e-6)
        return linear(unit.to(own["bias"].dtype), own["weight"], own["bias"]).to(self._dtype)


KINDS: dict[str, type[TrainedHeads]] = {"light": LightHeads, "full": FullHeads}
"""Heads that are trained, by the name of their kind."""


def check_layers(layers: Sequence[int], most: int) -> tuple[int, ...]:
    """The exit layers, rising; raises `SettingError` unless each is in 1…`most` and there once."""
    chosen = tuple(sorted(layers))
    if not chosen:
        raise SettingError(f"no exit layers; name some of 1 to {most}")
    wrong = [n for n in chosen if not 1 <= n <= most]
    if wrong:
        raise SettingError(f"exit layer {wrong[0]} does not exist; the model's are 1 to {most}")
    if len(set(chosen)) < len(chosen):
        raise SettingError(f"exit layers must differ, got {', '.join(map(str, layers))}")
    return chosen


def default_layers(count: int) -> tuple[int, ...]:
    """About six exit layers, evenly spaced, of a model of `count` layers; never the last.

    >>> default_layers(12), default_layers(32), default_layers(2)
    ((2, 4, 6, 8, 10), (5, 10, 15, 20, 25, 30), (1,))
    """
    step = max(1, count // 6)
    return tuple(range(step, count, step))


def load_heads(folder: str | Path, access: LayerAccess) -> TrainedHeads:
    """The exit heads in a folder, on the model's device; raises and warns as `load_draft`."""
    vocab, width = access.unembedding.shape

    def shapes(about: About, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        check_layers(about.settings["layers"], access.layers)
        kind = KINDS[about.settings["head"]]
        out: dict[str, tuple[int, ...]] = {}
        count = len(tensors.get(TOKENS, range(vocab)))
        for layer in about.settings["layers"]:
            down = tensors.get(f"{layer}.down")
            own = kind.shapes(count, width, 0 if down is None else len(down))
            out |= {f"{layer}.{name}": shape for name, shape in own.items()}
        return out

    about, tensors = load_draft(folder, KIND, shapes, access.model, vocab)
    device = access.unembedding.device
    tokens = tensors.pop(TOKENS, None)
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        layer, _, name = key.partition(".")
        weights.setdefault(int(layer), {})[name] = tensor.to(device)
    chosen = None if tokens is None else tokens.long().to(device)
    tuned = about.settings.get("tuned", {})
    return KINDS[about.settings["head"]](access, weights, chosen, tuned)


def keep_settings(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Save the settings found for exit heads beside them: `specbound` takes it as its defaults."""
    about = read_about(folder, KIND)
    save_about(folder, replace(about, settings={**about.settings, "tuned": dict(settings)}))
