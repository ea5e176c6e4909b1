"""A row cache of fixed size, whose passes are the same kernels at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


class FixedCache(Cache):
    """Keys and values `(rows, heads, columns, width)` per layer, written at given places.

    The last column belongs to padding: what it writes there no token sees.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = self.columns = 0
        self.store: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.places: torch.Tensor | None = None
        """`(n, width)` columns that the pass writes."""
        self.shown = 0
        """Columns that the pass sees, the first ones."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(n, heads, width, dim)` states of the first n rows; return the columns shown."""
        if self.places is None:  # the first pass ever, which shows the sizes
            empty = key_states[:0, :, :0].detach(), value_states[:0, :, :0].detach()
            self.store.append(empty)
            return key_states, value_states
        count = len(self.places)
        index = torch.arange(count, device=self.places.device).unsqueeze(1)
        keys, values = (tensor[:count] for tensor in self.store[layer_idx])
        keys[index, :, self.places] = key_states.transpose(1, 2)
        values[index, :, self.places] = value_states.transpose(1, 2)
        return keys[:, :, : self.shown], values[:, :, : self.shown]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not known here: masks and positions are given."""
        return 0

    def grow(self, rows: int, columns: int) -> bool:
        """Have at least so many rows and columns; contents are kept. Whether it had fewer."""
        rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return False
        self.rows, self.columns = rows, columns
        for layer, pair in enumerate(self.store):
            grown = []
            for old in pair:
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                grown.append(new)
            self.store[layer] = grown[0], grown[1]
        return True

    def keep(self, rows: Sequence[int], longest: int) -> None:
        """Keep these rows, as rows 0, 1, ...; a row may be kept twice."""
        index = list(rows)
        for pair in self.store if index != list(range(len(index))) else ():
            for tensor in pair:
                tensor[: len(index), :, :longest] = tensor[index, :, :longest]

    def copy_out(self, row: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of a row's columns, layer by layer, `(heads, n, dim)` each."""
        return tuple(t[row, :, first:last].clone() for pair in self.store for t in pair)

    def copy_in(self, row: int, first: int, states: Sequence[torch.Tensor]) -> None:
        """Write copied keys and values into a row's columns."""
        own = (t for pair in self.store for t in pair)
        for tensor, new in zip(own, states, strict=True):
            tensor[row, :, first : first + new.shape[1]] = new
