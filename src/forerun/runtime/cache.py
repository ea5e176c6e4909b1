"""Keys and values of many sequences, each row with its own length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


class RowCache(Cache):
    """A preallocated key-value cache whose rows have lengths of their own.

    Row `r` covers the first `lengths[r]` tokens of its sequence; columns beyond hold leftovers that
    the attention mask hides. So rollback is setting a length, and nothing is ever copied but when
    the cache grows or rows leave.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []
        self._rows = 0
        self._columns = 0
        self._store: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._first = 0
        self._count = 0
        self._end = 0
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def columns(self) -> int:
        """Tokens each row has room for."""
        return self._columns

    @torch.inference_mode()
    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` rows of `columns` tokens; never shrinks. Contents are kept."""
        rows, columns = max(rows, self._rows), max(columns, self._columns)
        if (rows, columns) == (self._rows, self._columns):
            return
        self._rows, self._columns = rows, columns
        for layer, pair in self._store.items():
            self._store[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: a masked column still meets a weight of 0, and 0 · NaN is NaN.
        new = old.new_zeros(self._rows, old.shape[1], self._columns, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, as rows 0, 1, ...; the others are dropped."""
        if list(rows) != list(range(len(rows))):
            longest = max((self.lengths[r] for r in rows), default=0)
            index = list(rows)
            for pair in self._store.values():
                for tensor in pair:
                    tensor[: len(index), :, :longest] = tensor[index, :, :longest]
        self.lengths = [self.lengths[r] for r in rows]

    def begin(self, first: int, counts: Sequence[int], width: int, device: torch.device) -> int:
        """Announce a forward of `width` columns over rows `first, first + 1, ...`.

        Returns:
            How many columns the attention will see.
        """
        starts = self.lengths[first : first + len(counts)]
        end = max(starts) + width
        if end > self._columns or first + len(counts) > self._rows:
            self.reserve(first + len(counts), max(end, min(2 * self._columns, end + 4096)))
        self._first, self._count, self._end = first, len(counts), end
        self._where = None
        if len(counts) > 1:
            rows = torch.arange(first, first + len(counts), device=device).unsqueeze(1)
            begin = torch.tensor(starts, device=device).unsqueeze(1)
            self._where = rows, begin + torch.arange(width, device=device)
        return end

    def commit(self, counts: Sequence[int]) -> None:
        """Count the fed tokens as covered: row `first + i` grows by `counts[i]`."""
        for i, count in enumerate(counts):
            self.lengths[self._first + i] += count

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(count, heads, width, dim)` states and return all columns up to the longest."""
        if layer_idx not in self._store:
            self._store[layer_idx] = (
                self._grown(key_states[:0, :, :0]),
                self._grown(value_states[:0, :, :0]),
            )
        rows = slice(self._first, self._first + self._count)
        seen = []
        for store, new in zip(self._store[layer_idx], (key_states, value_states), strict=True):
            if self._where is None:
                store[rows, :, self._end - new.shape[2] : self._end] = new
            else:
                store[self._where[0], :, self._where[1]] = new.transpose(1, 2)
            seen.append(store[rows, :, : self._end])
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward in its longest row."""
        return max(self.lengths[self._first : self._first + self._count], default=0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for pair in self._store.values() for t in pair)
