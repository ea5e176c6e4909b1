"""Exit heads with weights: predictions of the last layer's token after an earlier one.

The heads without weights are `forerun.runtime.layers.LogitLens`.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from forerun.errors import ModelError, SettingError
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import linear, packed

WEIGHTS, CONFIG = "exits.safetensors", "exits.json"
SCHEMA = 1
TOKENS = "tokens"  # name of the tensor of token ids

Weights = dict[int, dict[str, torch.Tensor]]
"""Per exit layer, its tensors by name."""


class TrainedHeads(ABC):
    """Exit heads with tensors of their own; as `forerun.runtime.layers.ExitHeads` wants them.

    Args:
        access: the model.
        weights: per exit layer (counted from 1) its tensors by name, on the model's device. Tensors
            that require a gradient are used as they are, others in the model's dtype.
        about: where the heads come from (target, training); kept by `save_heads`.
        tokens: `(n,)` ids of the heads' vocabulary, on the model's device; None: the
            whole vocabulary. A shallow exit costs a projection onto them, and most of what it is
            sure of is frequent (Zhao et al. 2025, FR-Spec); what is verified is not affected.

    Raises:
        SettingError: no layers, or layers the model does not have.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        access: LayerAccess,
        weights: Weights,
        about: Mapping[str, Any] | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        self.layers = check_layers(list(weights), access.layers)
        """The exit layers, rising."""
        self.access, self.weights, self.about = access, weights, dict(about or {})
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

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the corrected hidden state."""
        own = self._of(layer)
        x = hidden.to(own["bias"].dtype)
        if "weight" in own:
            x = x + linear(x, own["weight"], own["bias"])
        else:
            x = x + linear(linear(x, own["down"]), own["up"], own["bias"])
        x, rows = x.to(self._dtype), self._rows
        logits = self.access.logits(x) if rows is None else self.access.logits_of(x, rows)
        return logits * own["scale"].to(self._dtype)


class FullHeads(TrainedHeads):
    """An LM head per exit layer: `weight (n, H)`, `bias (n,)`, on hidden states of unit RMS."""

    kind = "full"

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


def save_heads(heads: TrainedHeads, folder: str | Path) -> Path:
    """Write `exits.safetensors` and `exits.json` to `folder` (made if missing); returns it.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab, hidden = heads.access.unembedding.shape
    config = {
        "schema": SCHEMA,
        "kind": heads.kind,
        "layers": list(heads.layers),
        "hidden_size": hidden,
        "vocab_size": vocab,
        "model_layers": heads.access.layers,
        "tokens": None if heads.tokens is None else len(heads.tokens),
        **heads.about,
    }
    tensors = {
        f"{layer}.{name}": tensor.detach().cpu().contiguous()
        for layer, own in heads.weights.items()
        for name, tensor in own.items()
    }
    if heads.tokens is not None:
        tensors[TOKENS] = heads.tokens.to("cpu", torch.int32)
    # Written beside, then renamed: an interrupted save leaves the old heads or the new ones.
    beside = folder / f"{WEIGHTS}.tmp"
    save_file(tensors, beside, metadata={"format": "pt"})
    os.chmod(beside, 0o644)
    os.replace(beside, folder / WEIGHTS)
    text = json.dumps(config, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    return folder


def keep_settings(folder: str | Path, settings: Mapping[str, Any]) -> None:
    """Save the settings found for exit heads beside them: `specbound` takes it as its defaults.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(folder) / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) | {"settings": dict(settings)}
    text = json.dumps(config, indent=1, ensure_ascii=False, allow_nan=False)
    beside = path.with_suffix(".tmp")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)


def load_heads(path: str | Path, access: LayerAccess) -> TrainedHeads:
    """Read heads that `save_heads` wrote, onto the model's device and in its dtype.

    Args:
        path: the folder (or one of its two files).
        access: the model they are for.

    Raises:
        ModelError: files missing or damaged, or heads of another model; the message names them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path).expanduser()
    if folder.name in (WEIGHTS, CONFIG):
        folder = folder.parent
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"no exit heads at {str(path)!r}: {name} is missing; train some with "
                "forerun train-exits -o FOLDER"
            )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"the exit heads in {str(folder)!r} are damaged: {reason}") from error
    if not isinstance(config, dict) or config.get("kind") not in KINDS:
        kind = config.get("kind") if isinstance(config, dict) else None
        raise ModelError(f"{folder / CONFIG}: kind must be 'light' or 'full', got {kind!r}")
    _check_fit(config, access, folder)
    weights: Weights = {}
    device = access.unembedding.device
    tokens = _tokens(tensors.pop(TOKENS, None), config, folder)
    for key, tensor in tensors.items():
        layer, _, name = key.partition(".")
        if not layer.isdigit():
            raise ModelError(f"{folder / WEIGHTS}: unknown tensor {key!r}; train the heads again")
        weights.setdefault(int(layer), {})[name] = tensor.to(device)
    _check_shapes(config, weights, folder)
    fixed = {"schema", "kind", "layers", "hidden_size", "vocab_size", "model_layers", "tokens"}
    about = {key: value for key, value in config.items() if key not in fixed}
    chosen = None if tokens is None else tokens.to(device)
    return KINDS[config["kind"]](access, weights, about, chosen)


def _tokens(
    stored: torch.Tensor | None, config: Mapping[str, Any], folder: Path
) -> torch.Tensor | None:
    """The ids of the heads' vocabulary, if they fit the configuration."""
    count = config.get("tokens")
    if stored is None and count is None:
        return None
    if stored is not None and stored.shape == (count,):
        ids = stored.long()
        if len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < config["vocab_size"]:
            return ids
    raise ModelError(f"{folder / WEIGHTS}: {TOKENS!r} should be {count} token ids below "
                     f"{config['vocab_size']}; train the heads again")  # fmt: skip


def _check_fit(config: Mapping[str, Any], access: LayerAccess, folder: Path) -> None:
    """Refuse heads made for a model of other sizes."""
    vocab, hidden = access.unembedding.shape
    for name, label, have in (
        ("hidden_size", "hidden size", hidden),
        ("vocab_size", "vocabulary", vocab),
        ("model_layers", "number of layers", access.layers),
    ):
        if config.get(name) != have:
            raise ModelError(
                f"the exit heads in {str(folder)!r} are for another model"
                f"{' (' + str(config['target']) + ')' if config.get('target') else ''}: their "
                f"{label} is {config.get(name)}, this model's is {have}; train heads for it with "
                "forerun train-exits"
            )


def _check_shapes(config: Mapping[str, Any], weights: Weights, folder: Path) -> None:
    """Refuse tensors that do not fit the configuration."""
    vocab, hidden = config.get("tokens") or config["vocab_size"], config["hidden_size"]
    file = folder / WEIGHTS
    if sorted(weights) != config.get("layers"):
        raise ModelError(f"{file}: heads after {sorted(weights)}, {CONFIG} says "
                         f"{config.get('layers')}; train the heads again")  # fmt: skip
    for layer, own in weights.items():
        if config["kind"] == "full":
            expected = {"weight": (vocab, hidden), "bias": (vocab,)}
        elif "weight" in own:
            expected = {"weight": (hidden, hidden), "bias": (hidden,)}
        else:
            rank = own["down"].shape[0] if "down" in own else 0
            expected = {"down": (rank, hidden), "up": (hidden, rank), "bias": (hidden,)}
        if config["kind"] == "light":
            expected["scale"] = (1,)
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        if shapes != expected:
            raise ModelError(
                f"{file}: the head after layer {layer} has tensors {shapes}, expected {expected}; "
                "train the heads again"
            )
