"""The target's hidden states at named depths, as its passes leave them, for drafters to read.

A depth counts layers: depth d is the residual stream after d of L layers; also at d = L it is what
stands before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from forerun.arrays import library
from forerun.errors import SettingError, UnsupportedModelError
from forerun.lazy import torch
from forerun.types import Array


class States:
    """States of each row's tokens, of H numbers each, from the passes since they were last read;
    depths rise, each in 1…L."""

    def __init__(self, depths: Sequence[int], width: int) -> None:
        self.depths, self.width = tuple(depths), width
        self._nothing: Array = np.empty((0, len(depths) * width), np.float32)
        self._held: dict[int, list[tuple[int, Array]]] = {}
        """Per row `(place of the first token, (n, depths × H) states)`, places rising."""

    def note(self, row: int, start: int, states: Array) -> None:
        """Take `(n, depths × H)` states of a row's tokens from place `start` on; what was held of
        later places was rejected."""
        held = self._held.setdefault(row, [])
        while held and held[-1][0] >= start:
            held.pop()
        if held and (over := held[-1][0] + len(held[-1][1]) - start) > 0:
            held[-1] = held[-1][0], held[-1][1][:-over]
        held.append((start, states))
        if type(states) is not type(self._nothing):
            self._nothing = states[:0]

    def read(self, row: int, first: int, last: int) -> Array:
        """`(n, depths × H)` states of the last n ≤ last − first of a row's tokens `first` to
        `last`; earlier ones go. A place whose token came by a copy of its keys and values has none,
        nor have those before it. The caller knows that the text up to `last` is as it was fed."""
        held = self._held.get(row, [])
        while held and held[0][0] + len(held[0][1]) <= first:
            held.pop(0)
        parts: list[Array] = []
        end = last
        for start, states in reversed(held):
            if start >= end:
                continue
            if start + len(states) < end:
                break
            begin = max(first, start)
            parts.insert(0, states[begin - start : end - start])
            end = begin
        if len(parts) == 1:
            return parts[0]
        return library(parts[0]).concatenate(parts) if parts else self._nothing

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be kept twice."""
        held = self._held
        self._held = {new: list(held[old]) for new, old in enumerate(rows) if old in held}

    def move(self, row: int, source: int, place: int) -> None:
        """Let a row have at `place` what it has at `source`, both of its newest pass."""
        start, states = self._held[row][-1]
        states[place - start] = states[source - start]

    def drop(self, row: int) -> None:
        self._held.pop(row, None)


def check_depths(depths: Sequence[int], layers: int) -> tuple[int, ...]:
    """The depths, if they rise and each is in 1…`layers`; else raises `SettingError`."""
    if not depths or list(depths) != sorted({*depths} & {*range(1, layers + 1)}):
        raise SettingError(
            f"depths must rise from 1 to at most the target's {layers} layers, got "
            f"{', '.join(map(str, depths)) or 'none'}"
        )
    return tuple(depths)


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers of a Hugging Face model, in order; `UnsupportedModelError` if not in a
    list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(
        f"this {model.config.model_type} model has no list of its {count} layers, whose hidden "
        "states could be read"
    )


class Taps:
    """Reads the outputs of a Hugging Face model's layers while it runs."""

    def __init__(self, model: Any, depths: Sequence[int]) -> None:
        layers = decoder_layers(model)
        self._layers = [layers[depth - 1] for depth in check_depths(depths, len(layers))]
        self._seen: list[torch.Tensor] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """For one pass alone: the model may also be used by others."""
        self._seen = []

        def note(_module: Any, _inputs: Any, output: Any) -> None:
            self._seen.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_hook(note) for layer in self._layers]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def read(self) -> torch.Tensor:
        """`(rows, width, depths × H)` states of the pass that was open last, a copy."""
        seen, self._seen = self._seen, []
        return torch.cat(seen, -1)
