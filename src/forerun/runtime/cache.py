"""Keys and values of many sequences, each row with its own length."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from forerun.runtime.base import Columns, Executor

CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")


def cache_argument(module: Any) -> str:
    """What the forward of a transformers module calls its cache: "cache" from 5.24 on."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), "past_key_values")


class Store(Cache):
    """Preallocated keys and values, `(rows, heads, columns, width)` per layer.

    Columns beyond a row's tokens hold leftovers that the attention mask hides. So rollback is a
    number kept by the caller, and nothing is ever copied but when the store grows, when rows leave,
    or when a pass is for rows that do not follow each other.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = self.columns = 0  # what there is room for: rows, and tokens of each
        self._store: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.inference_mode()
    def reserve(self, rows: int, columns: int) -> bool:
        """Have at least so many rows and columns; contents are kept. Whether it had fewer."""
        rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return False
        self.rows, self.columns = rows, columns
        for layer, (keys, values) in self._store.items():
            self._store[layer] = self._grown(keys), self._grown(values)
        return True

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: a masked column still meets a weight of 0, and 0 · NaN is NaN.
        new = old.new_zeros(self.rows, old.shape[1], self.columns, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _layer(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What there is of a layer; at first room for states like these, `(n, heads, ., width)`."""
        if layer not in self._store:
            self._store[layer] = self._grown(keys[:0, :, :0]), self._grown(values[:0, :, :0])
        return self._store[layer]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int], longest: int) -> None:
        """Keep these rows with their first `longest` tokens, as rows 0, 1, ...; a row may be kept
        twice."""
        index = list(rows)
        if index == list(range(len(index))):
            return
        self.reserve(len(index), longest)
        for pair in self._store.values():
            for tensor in pair:
                tensor[: len(index), :, :longest] = tensor[index, :, :longest]

    def copy_out(self, row: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of a row's columns, layer by layer, `(heads, n, dim)` each."""
        pairs = [self._store[layer] for layer in sorted(self._store)]
        return tuple(t[row, :, first:last].clone() for pair in pairs for t in pair)

    @torch.inference_mode()
    def copy_in(self, row: int, first: int, states: Sequence[torch.Tensor]) -> None:
        """Write copied keys and values into a row's columns."""
        self.reserve(row + 1, first + (states[0].shape[1] if states else 0))
        layers = sorted(self._store) or range(len(states) // 2)  # None: no pass yet
        assert len(states) == 2 * len(layers), "columns of another model"
        for layer, keys, values in zip(layers, states[::2], states[1::2], strict=True):
            pair = self._layer(layer, keys[None], values[None])
            for own, new in zip(pair, (keys, values), strict=True):
                own[row, :, first : first + new.shape[1]] = new


class RowCache(Store):
    """A key-value cache whose rows have lengths of their own. A pass announces the rows it is for
    and where in each it begins (`open`)."""

    def __init__(self) -> None:
        super().__init__()
        self._span = slice(0, 0)
        self._pick: list[int] | None = None
        self.start = self._end = 0
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None

    def open(self, rows: list[int], starts: Sequence[int], width: int, device: torch.device) -> int:
        """Announce a pass of `width` columns from `starts[i]` on in row `rows[i]`, rows rising; how
        many columns the attention will see."""
        self.start = max(starts)
        end = self.start + width
        low, high = rows[0], rows[-1]
        if end > self.columns or high >= self.rows:
            self.reserve(high + 1, max(end, min(2 * self.columns, end + 4096)))
        self._span, self._end = slice(low, high + 1), end
        self._slots = None
        if len(rows) > 1:
            begin = torch.tensor(starts, device=device).unsqueeze(1)
            index = torch.tensor(rows, device=device).unsqueeze(1)
            self._slots = index, begin + torch.arange(width, device=device)
        adjacent = high - low + 1 == len(rows)
        self._pick = None if adjacent else [row - low for row in rows]
        return end

    def place(self, places: torch.Tensor, columns: int) -> None:
        """Announce a pass that writes the first rows at places `(n, width)` and sees the first
        `columns`: the same kernels at the same addresses, while nothing is reserved."""
        self._span, self._pick, self.start, self._end = slice(0, len(places)), None, 0, columns
        self._slots = torch.arange(len(places), device=places.device).unsqueeze(1), places

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(n, heads, width, dim)` states and return these rows' columns."""
        rows, end = self._span, self._end
        keys, values = self._layer(layer_idx, key_states, value_states)
        if self._slots is None:
            keys[rows, :, end - key_states.shape[2] : end] = key_states
            values[rows, :, end - value_states.shape[2] : end] = value_states
        else:
            rows_at, columns_at = (index.to(keys.device) for index in self._slots)
            keys[rows_at, :, columns_at] = key_states.transpose(1, 2)
            values[rows_at, :, columns_at] = value_states.transpose(1, 2)
        keys, values = keys[rows, :, :end], values[rows, :, :end]
        # Rows that do not follow each other are copied together: attention wants one tensor.
        return (keys, values) if self._pick is None else (keys[self._pick], values[self._pick])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this pass in its longest row."""
        return self.start


class CachedExecutor(Executor):
    """An executor whose keys and values are in a `Store`."""

    copies = True
    cache: Store

    def reserve(self, rows: int, columns: int) -> None:
        self.cache.reserve(rows, columns)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.cache.keep(rows, max(lengths, default=0))

    def copy_out(self, row: int, first: int, last: int) -> Columns:
        return Columns(self.cache.copy_out(row, first, last), last - first)

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        self.cache.copy_in(row, first, columns.states)
