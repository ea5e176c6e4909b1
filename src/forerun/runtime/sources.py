"""What decoders attend to: sources read once by the encoder, and their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from forerun.errors import UnsupportedModelError
from forerun.runtime.cache import Store

TOGETHER = 32  # padded tokens per source that a pass of the encoder may waste
ENCODED = 1 << 14  # most padded tokens of one pass of the encoder


@dataclass(frozen=True)
class SourceStates:
    """What the encoder says of some sources."""

    places: list[int]  # which of the sources they are
    lengths: list[int]
    values: torch.Tensor  # `(sources, longest, d)`, padded on the right


class Encoder:
    """Reads sources; remembers the last ones for a draft that shares them."""

    def __init__(self, model: Any) -> None:
        self._module, self._device = model.get_encoder(), model.device
        # M2M100 takes an encoder token's position from "not the padding id": pad with that id.
        self._pad = model.config.pad_token_id or 0
        self.shared = False  # whether somebody else asks for the states of the same sources
        self._last: tuple[list[list[int]], list[SourceStates]] | None = None

    @torch.inference_mode()
    def read(self, sources: Sequence[Sequence[int]], again: bool) -> list[SourceStates]:
        """States of all sources, those of alike lengths together; of the last ones, if they are
        read `again`, what is known."""
        wanted = [list(source) for source in sources]
        if again and self._last is not None and self._last[0] == wanted:
            return self._last[1]
        out = []
        for places in _groups([len(source) for source in wanted]):
            group = [wanted[place] for place in places]
            lengths = list(map(len, group))
            width = max(lengths)
            ids = [[*source, *[self._pad] * (width - len(source))] for source in group]
            seen = [[1] * n + [0] * (width - n) for n in lengths]
            states = self._module(
                input_ids=torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(seen, device=self._device),
            ).last_hidden_state
            out.append(SourceStates(places, lengths, states))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._last = (wanted, out) if self.shared else None
        return out


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Sources sorted by length, in passes that waste little."""
    out: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        wide = not out or lengths[place] > lengths[out[-1][0]] + TOGETHER
        if wide or lengths[place] * (len(out[-1]) + 1) > ENCODED:
            out.append([])
        out[-1].append(place)
    return out


class CrossAttention:
    """Makes the keys and values that a model's decoder attends to."""

    def __init__(self, model: Any, encoder: Encoder | None = None) -> None:
        self.encoder, self._shares = encoder or Encoder(model), encoder is not None
        self.encoder.shared |= self._shares
        self.layers = list(map(projections, layers_of(model.get_decoder())))

    @torch.inference_mode()
    def read(
        self, sources: Sequence[Sequence[int]]
    ) -> Iterator[tuple[SourceStates, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Sources of alike lengths together, with their keys and values in every layer. Both are
        `(sources, heads, columns, width)`; columns beyond a source mean nothing."""
        for states in self.encoder.read(sources, again=self._shares):
            x = states.values
            made = [(_by_head(k(x), width), _by_head(v(x), width)) for k, v, width in self.layers]
            yield states, made


def _by_head(states: torch.Tensor, width: int) -> torch.Tensor:
    """`(rows, heads, columns, width)` of `(rows, columns, heads · width)`."""
    return states.view(*states.shape[:2], -1, width).transpose(1, 2)


def layers_of(decoder: Any) -> Any:
    """Its layers."""
    return decoder.block if hasattr(decoder, "block") else decoder.layers


def projections(layer: Any) -> tuple[Any, Any, int]:
    """Key and value projections of a layer's cross-attention, and the size of a head."""
    attention = getattr(layer, "encoder_attn", None)
    if attention is not None:
        return attention.k_proj, attention.v_proj, attention.head_dim
    try:
        attention = layer.layer[1].EncDecAttention
        return attention.k, attention.v, attention.key_value_proj_dim
    except (AttributeError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"nobody knows where a {type(layer).__name__} attends to the source"
        ) from error


class SourceCache(Store):
    """Cross-attention keys and values: one source per row, written once, never rolled back."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = [SimpleNamespace(keys=None, values=None) for _ in range(layers)]
        self.lengths: list[int] = []  # tokens of each row's source

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest source."""
        return max(self.lengths, default=0)

    @torch.inference_mode()
    def write(
        self, rows: Sequence[int], layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Keep `(n, heads, columns, width)` states of these rows in a layer."""
        self.reserve(len(self.lengths), max(self.lengths))
        for store, new in zip(self._layer(layer, keys, values), (keys, values), strict=True):
            store[list(rows), :, : new.shape[2]] = new

    def retain(self, rows: Sequence[int]) -> None:
        """Keep the sources of these rows, in this order; a row may be kept twice."""
        self.lengths = [self.lengths[row] for row in rows]
        self.keep(rows, max(self.lengths, default=0))

    def show(self, rows: Sequence[int]) -> int:
        """Let the layers see these rows; how many columns they see."""
        index = list(rows)
        columns = max(self.lengths[row] for row in index)
        low, high = index[0], index[-1] + 1
        adjacent = high - low == len(index)
        for layer, pair in zip(self.layers, self._store.values(), strict=True):
            seen = [store[low:high] if adjacent else store[index] for store in pair]
            layer.keys, layer.values = (store[:, :, :columns] for store in seen)
        return columns
