"""A row cache for running single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forerun.runtime.cache import RowCache


class LayerCache(RowCache):
    """A row cache of which single layers may run ahead, in any rows, at any columns."""

    _pick: list[int] | None = None

    def begin(self, first: int, counts: Sequence[int], width: int, device: torch.device) -> int:
        """Announce a forward of the whole model over rows that follow each other."""
        self._pick = None
        return super().begin(first, counts, width, device)

    def open(self, rows: list[int], starts: list[int], width: int, device: torch.device) -> int:
        """Announce layers over `width` columns from `starts[i]` on in row `rows[i]`.

        Lengths stay as they are. Returns how many columns the attention will see.
        """
        end = max(starts) + width
        if end > self.columns:
            self.reserve(len(self.lengths), max(end, min(2 * self.columns, end + 4096)))
        low, high = min(rows), max(rows)
        self._first, self._count, self._end = low, high - low + 1, end
        self._where = None
        if len(rows) > 1:
            begin = torch.tensor(starts, device=device).unsqueeze(1)
            index = torch.tensor(rows, device=device).unsqueeze(1)
            self._where = index, begin + torch.arange(width, device=device)
        adjacent = rows == list(range(low, high + 1))
        self._pick = None if adjacent else [row - low for row in rows]
        return end

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(n, heads, width, dim)` states and return these rows' columns."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # Rows that do not follow each other are copied together: attention wants one tensor.
        return (keys, values) if self._pick is None else (keys[self._pick], values[self._pick])
