"""Linear layers in oneDNN's own layout of weights: what few tokens cost torch on a CPU.

A pass over one token or a few reads every weight once, and most have left the caches since the last
one. Torch hands its row-major matrices to MKL, which reads many rows at once and waits for each;
oneDNN reads a packed matrix from front to end. A matrix of 832 × 320 out of the caches takes (µs,
two cores of a Zen 4) 73 with one token, 102 with four and 94 with eight, packed 29, 34 and 39.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.runtime.support import PROBE_TOLERANCE

SAME_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Layers of a module that decoder-only models give the same states, one after the other: a product
takes 10 µs before it begins."""

_OPS = torch.ops.mkldnn


class PackedLinear(nn.Module):
    """An `nn.Linear`, or a `Conv1D` of transformers, which is one whose weights lie as columns, for
    inference. Copied, saved or differentiated, it is one of plain weights."""

    def __init__(self, product: _Product, begin: int, end: int, replaced: type[nn.Module]) -> None:
        super().__init__()
        self.in_features, self.out_features = product.weight.shape[1], end - begin
        self._product, self._rows, self._replaced = product, slice(begin, end), replaced
        self.packed, self.packed_bias = product.weight, product.bias  # a model counts its weights

    @property
    def weight(self) -> torch.Tensor:
        """`(out, in)`, packed if the matrix is its alone; of a `Conv1D` `(in, out)`."""
        whole = self.packed
        own = whole if len(whole) == self.out_features else dense(whole)[self._rows]
        return own if self._replaced is nn.Linear else dense(own).T

    @property
    def bias(self) -> torch.Tensor | None:
        """`(out,)`, if any."""
        return None if self.packed_bias is None else self.packed_bias[self._rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return F.linear(x, dense(self.packed)[self._rows], self.bias)
        return self._product.of(x, self._rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made: Any = self._replaced(1, 1)
        sizes = ("in_features", "out_features") if self._replaced is nn.Linear else ("nx", "nf")
        for name, size in zip(sizes, (self.in_features, self.out_features), strict=True):
            setattr(made, name, size)
        made.weight = nn.Parameter(dense(self.weight).clone(memory_format=torch.contiguous_format))
        made.bias = None if self.bias is None else nn.Parameter(self.bias.detach().clone())
        return made.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = dense(self.weight).contiguous()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


class _Product:
    """The packed matrix of one layer, or of several that are asked about the same states in turn.
    The first of them to be asked has the outputs of all computed, the last lets go of them."""

    def __init__(self, layers: Iterable[Any]) -> None:
        weights, biases = zip(*((_matrix(layer), layer.bias) for layer in layers), strict=True)
        self.weight = nn.Parameter(packed(torch.cat(weights)), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if biases[0] is not None:
            self.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False)
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """The outputs `rows` of `x`."""
        held = self._held
        if held is None or held[0] is not x or rows.start == 0:
            held = x, linear(x, self.weight, self.bias)
        self._held = held if rows.stop < held[1].shape[-1] else None
        return held[1][..., rows]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `F.linear`, with weights that may be packed."""
    if not weight.is_mkldnn or (x.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, dense(weight), bias)
    return _OPS._linear_pointwise(x, weight, bias, "none", [], "")


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A matrix `(out, in)` as `linear` is fastest with it: packed where a layer of it would be."""
    able = weight.device.type == "cpu" and _computes(weight.dtype) and _able()
    return _OPS._reorder_linear_weight(weight.detach(), None) if able else weight


def dense(weight: torch.Tensor) -> torch.Tensor:
    """Weights as rows: unpacked into new memory if they are packed, else as they are."""
    return weight.detach().to_dense() if weight.is_mkldnn else weight


def unpacked(model: Any) -> Any:
    """The model as it was loaded: a copy if any of its layers is packed."""
    packed = any(isinstance(module, PackedLinear) for module in model.modules())
    return copy.deepcopy(model) if packed else model


@torch.inference_mode()
def pack(model: Any) -> Any:
    """Pack every linear layer of a model, which is returned, if it is on a CPU where that is
    faster. Weights tied to a table of embeddings are packed into memory of their own."""
    if not (_able() and all(p.device.type == "cpu" for p in model.parameters())):
        return model
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    together = () if encodes else SAME_INPUT
    for parent in list(model.modules()):
        layers = {name: child for name, child in parent.named_children() if _is_plain(child)}
        groups: list[dict[str, Any]] = []  # of layers that become one product
        for names in together:
            if layers.keys() >= set(names) and len({_kind(layers[name]) for name in names}) == 1:
                groups.append({name: layers.pop(name) for name in names})
        for group in [*groups, *({name: layer} for name, layer in layers.items())]:
            product, end = _Product(group.values()), 0
            for name, layer in group.items():
                begin, end = end, end + len(_matrix(layer))
                setattr(parent, name, PackedLinear(product, begin, end, type(layer)))
    return model


def _matrix(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.weight
    return weight if type(layer) is nn.Linear else weight.T


@cache
def _able() -> bool:
    """Whether this processor and this build of torch are such as it was measured on."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.enabled:
        return False
    x, weight = torch.randn(3, 24), torch.randn(40, 24)
    try:
        there = _OPS._reorder_linear_weight(weight, None)
        worst = (linear(x, there) - linear(x, weight)).abs().max()
    except (AttributeError, RuntimeError, TypeError):  # operators that promise nothing
        return False
    return bool(there.is_mkldnn and worst <= PROBE_TOLERANCE)


def _computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a type on this processor."""
    reduced = dtype == torch.bfloat16 and bool(_OPS._is_mkldnn_bf16_supported())
    return reduced or dtype == torch.float32


def _is_plain(module: Any) -> bool:
    """Whether it is a linear layer to pack; a subclass computes something else: of few bits, of low
    rank."""
    kind = type(module)
    columns = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return (kind is nn.Linear or columns) and _computes(module.weight.dtype)


def _kind(layer: Any) -> tuple[type, int, torch.dtype, bool]:
    """What must be the same for matrices to become one."""
    weight = _matrix(layer)
    return type(layer), weight.shape[1], weight.dtype, layer.bias is None
