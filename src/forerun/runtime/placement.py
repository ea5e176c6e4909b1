"""Where a decoder's tokens stand: rows of their own places, in models that take none.

No encoder-decoder family takes positions from outside. What places the tokens is one module, and
for one pass at a time its answer is replaced: by a forward hook on the table of positions, or in
T5 by an attribute that hides the method which makes the relative bias. The model is left as it
was given, also when the pass fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forerun.errors import UnsupportedModelError
from forerun.runtime.attention import additive


class Table:
    """A table of positions, learned or not: all families but T5's. It knows `limit` places."""

    def __init__(self, decoder: Any, limit: int) -> None:
        self._module = decoder.embed_positions
        self._device, self._dtype = decoder.device, decoder.dtype
        self.limit = min(limit, len(self._table()))

    def _table(self) -> torch.Tensor:
        positions = self._module
        if hasattr(positions, "weights"):  # M2M100: a buffer
            return positions.weights[positions.padding_idx + 1 :]
        return positions.weight[getattr(positions, "offset", 0) :]  # BART skips two rows

    @contextmanager
    def placed(
        self, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Place the tokens of the passes within, `(rows, width)`, and what they attend to, `(rows
        or 1, columns)`, of which each must not see what is hidden, `(rows, width, columns)`. Yields
        the additive mask to hand to the decoder, 4-D."""
        # Padding may point past the end.
        with self.looked_up(queries.clamp(max=self.limit - 1)):
            yield additive(hidden, self._dtype)[:, None]

    @contextmanager
    def looked_up(self, places: torch.Tensor) -> Iterator[None]:
        """Let the module look up these places, `(rows, width)`."""
        looked = self._table()[places]
        handle = self._module.register_forward_hook(lambda module, args, out: looked.to(out.dtype))
        try:
            yield
        finally:
            handle.remove()


class RelativeBias:
    """T5's biases by distance: one table for all layers, or in umT5 one per layer."""

    def __init__(self, decoder: Any, limit: int) -> None:
        attentions = [block.layer[0].SelfAttention for block in decoder.block]
        self._attentions = [a for a in attentions if a.has_relative_attention_bias]
        self._dtype, self._device = decoder.dtype, decoder.device
        self._tables: list[torch.Tensor] = []
        self._open = torch.zeros(1, 1, 1, 1, device=self._device, dtype=self._dtype)
        self.limit = limit

    @contextmanager
    def placed(
        self, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """As a table does; hides the method that makes the bias, which also adds the mask."""
        distance = (queries[:, :, None] - keys[:, None, :]).clamp(min=0)
        mask = additive(hidden, self._dtype)[:, None]
        need = int(distance.shape[-1]) + int(distance.shape[-2])
        if not self._tables or len(self._tables[0]) < need:
            self._tables = self._made(2 * need + 64)
        try:
            for attention, table in zip(self._attentions, self._tables, strict=True):
                bias = table[distance].permute(0, 3, 1, 2) + mask
                attention.compute_bias = lambda *_, bias=bias, **__: bias
            yield self._open
        finally:
            for attention in self._attentions:
                attention.__dict__.pop("compute_bias", None)

    def _made(self, room: int) -> list[torch.Tensor]:
        """Tables `(distance, heads)` out of the model's own bias of its newest token."""
        rows = [
            attention.compute_bias(1, room, device=self._device, past_seen_tokens=room - 1)
            for attention in self._attentions
        ]
        return [row[0, :, 0].flip(-1).t().contiguous() for row in rows]


def placement_of(decoder: Any, limit: int) -> Table | RelativeBias:
    """What places the tokens of a decoder that knows `limit` places at most;
    `UnsupportedModelError` if it is none of the known ways."""
    if hasattr(decoder, "embed_positions"):
        return Table(decoder, limit)
    blocks = getattr(decoder, "block", None)
    if blocks and hasattr(blocks[0].layer[0], "SelfAttention"):
        return RelativeBias(decoder, limit)
    raise UnsupportedModelError(
        "nobody knows how this decoder places its tokens: it has neither a table of positions nor "
        "a relative bias"
    )
