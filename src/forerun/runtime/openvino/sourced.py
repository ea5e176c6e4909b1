"""Decoders of encoder-decoder models on OpenVINO; PyTorch reads the sources."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from forerun.runtime.base import Executor, Facts
from forerun.runtime.encoder_decoder import warn_of_settings
from forerun.runtime.openvino.executor import FIRST_BLOCKS, OpenVINOExecutor
from forerun.runtime.openvino.fixed import SOURCE_BLOCKS, Fixed
from forerun.runtime.openvino.nodes import SOURCE, SOURCE_LAST, SOURCE_ROW, caches
from forerun.runtime.openvino.pool import Pool
from forerun.runtime.openvino.request import Request
from forerun.runtime.sources import CrossAttention, Encoder


class SourcedOpenVINOExecutor(OpenVINOExecutor):
    """Runs the decoder of an encoder-decoder model on the CPU with OpenVINO.

    The encoder and what makes the keys and values of sources stay torch's. These lie in blocks like
    those of the text, and the attention node reads them as it reads a text: every token counts as
    a row of its own that is fed the last token of its source, behind all others of it. What the
    node writes then is what is there already.

    Args:
        graph, facts, threads: as for `OpenVINOExecutor`, of the decoder.
        model: the whole, on the CPU in fp32.
        make: an executor of this kind for a model and the encoder whose states it attends to.
        encoder: that of another executor, whose states this decoder attends to.
    """

    copies = False

    def __init__(
        self,
        graph: ov.Model,
        facts: Facts,
        model: Any,
        make: Callable[[Any, Encoder], Executor],
        encoder: Encoder | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(graph, facts, threads)
        self.model, self.cross, self._make = model, CrossAttention(model, encoder), make
        self._lengths: list[int] = []
        self._last: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._told: dict[int, int] = {}  # of graphs of so many tokens: the row they know of
        if encoder is None:
            warn_of_settings(model)
        self.sources = Pool(caches(self._request.inputs, SOURCE), FIRST_BLOCKS, self._bind_sources)

    def module(self) -> Any:
        """The model."""
        return self.model

    def beside(self, model: Any) -> Executor:
        """The draft reads what this one's encoder read."""
        return self._make(model, self.cross.encoder)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep these rows and their sources, in this order."""
        super().keep(rows, lengths)
        self._lengths = [self._lengths[row] for row in rows]
        self._last = self._last[list(rows)]
        self.sources.keep(rows, self._lengths)
        self._told.clear()

    def attend(self, sources: Sequence[Sequence[int]]) -> None:
        """Read the sources of the rows that join next, and make their keys."""
        read = list(self.cross.read(sources))  # an error of the encoder leaves all as it was
        first = len(self._lengths)
        self._lengths.extend(map(len, sources))
        last = [torch.empty(0)] * len(sources)
        for states, pairs in read:
            for at, (place, length) in enumerate(zip(states.places, states.lengths, strict=True)):
                own = [states[at, :, :length] for pair in pairs for states in pair]
                self.sources.write(first + place, 0, [self._bytes(x) for x in own])
                last[place] = torch.cat([x[:, -1].reshape(-1) for x in own])
        new = torch.stack(last).numpy()
        self._last = np.concatenate((self._last, new)) if first else new
        self._tables_bound = False
        self._told.clear()

    def _bytes(self, states: torch.Tensor) -> torch.Tensor:
        """As they lie in the pool."""
        reduced = self.facts.precision == "bfloat16"
        kind = torch.bfloat16 if reduced else torch.float32
        return states.to(kind).contiguous().view(torch.uint8)

    def _bind_shape(self, counts: list[int], wanted: list[int]) -> None:
        super()._bind_shape(counts, wanted)
        self._tables_bound = False  # there is one of each token's source

    def _bind_tables(self) -> None:
        super()._bind_tables()
        rows = [row for row, first, last in self._fed for _ in range(first, last)]
        self._tell(self._request, rows, self._last)

    def _fits_row(self, fixed: Fixed, row: int) -> bool:
        table = self.sources.tables[row]
        fits = super()._fits_row(fixed, row) and fixed.holds(table)
        return fits and len(table) <= SOURCE_BLOCKS

    def _run_row(
        self, fixed: Fixed, row: int, piece: Sequence[int], start: int, wanted: int
    ) -> NDArray[np.float32]:
        if self._told.get(fixed.tokens) != row:
            rows, room = [row] * fixed.tokens, fixed.tokens * SOURCE_BLOCKS
            self._tell(fixed.request, rows, self._last[row : row + 1], room)
            self._told[fixed.tokens] = row
        return super()._run_row(fixed, row, piece, start, wanted)

    def _tell(
        self, request: Request, rows: Sequence[int], last: NDArray[np.float32], room: int = 0
    ) -> None:
        """Say which source each token sees.

        Args:
            request: what is told.
            rows: per token.
            last: `SOURCE_LAST`, of every row or of the only one.
            room: blocks that the request is compiled for; 0: any number.
        """
        tables = [self.sources.tables[row] for row in rows]
        blocks = [block for table in tables for block in table]
        lengths = [self._lengths[row] for row in rows]
        for name, values in (
            (SOURCE_ROW, rows if len(last) > 1 else [0] * len(rows)),
            (f"{SOURCE}past_lens", [length - 1 for length in lengths]),
            (f"{SOURCE}subsequence_begins", range(len(rows) + 1)),
            (f"{SOURCE}block_indices", blocks + [0] * (room - len(blocks))),
            (f"{SOURCE}block_indices_begins", [0, *accumulate(map(len, tables))]),
            (f"{SOURCE}max_context_len", [max(lengths)]),
        ):
            request.input(name, len(values))[:] = array("i", values)
        request.set(SOURCE_LAST, ov.Tensor(last, shared_memory=True))

    def _bind_sources(self, tensors: list[ov.Tensor]) -> None:
        for port, tensor in zip(caches(self._request.inputs, SOURCE), tensors, strict=True):
            self._request.set(port, tensor)
        for fixed in self._fixed:
            fixed.bind(tensors, SOURCE)
