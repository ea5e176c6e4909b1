"""Decoders of encoder-decoder models on OpenVINO; PyTorch reads the sources."""

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from forerun.runtime.base import Executor, Facts
from forerun.runtime.encoder_decoder import CrossAttention, warn_of_settings
from forerun.runtime.openvino.executor import FIRST_BLOCKS, OpenVINOExecutor
from forerun.runtime.openvino.nodes import SOURCE, SOURCE_LAST, SOURCE_ROW
from forerun.runtime.openvino.pool import Pool
from forerun.runtime.openvino.request import InferRequest


class SourcedOpenVINOExecutor(OpenVINOExecutor):
    """Runs the decoder of an encoder-decoder model on the CPU with OpenVINO.

    The encoder and what makes the keys and values of sources stay torch's. These lie in blocks like
    those of the text, and the attention node reads them as it reads a text: every token counts as
    a row of its own that is fed the last token of its source, behind all others of it. What the
    node writes then is what is there already.

    Args:
        graph, facts, threads: as for `OpenVINOExecutor`, of the decoder.
        model: the whole, on the CPU in fp32.
        make: an executor of this kind for a draft, which attends to what this one read.
        first: that of a target, whose encoder is this model's, too.
    """

    copies = False
    on_torch = True

    def __init__(
        self,
        graph: ov.Model,
        facts: Facts,
        model: Any,
        make: Callable[[Any, CrossAttention], Executor],
        first: CrossAttention | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(graph, facts, threads)
        self.model, self.cross, self._make = model, CrossAttention(model, first), make
        self._lengths: list[int] = []
        self._last: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        if first is None:
            warn_of_settings(model)
        self._forms.tell(self._tell)
        ports = self._forms.open.ports(SOURCE)
        self.sources = Pool(ports, FIRST_BLOCKS, lambda pools: self._forms.bind(pools, SOURCE))

    def module(self) -> Any:
        return self.model

    def beside(self, model: Any) -> Executor:
        return self._make(model, self.cross)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().keep(rows, lengths)
        self._lengths = [self._lengths[row] for row in rows]
        self._last = self._last[list(rows)]
        self.sources.keep(rows, self._lengths)

    def attend(self, sources: Sequence[Sequence[int]]) -> None:
        read = list(self.cross.read(sources))  # an error of the encoder leaves all as it was
        first = len(self._lengths)
        self._lengths.extend(map(len, sources))
        last = [torch.empty(0)] * len(sources)
        kind = torch.bfloat16 if self.facts.precision == "bfloat16" else torch.float32
        for places, pairs in read:
            for at, place in enumerate(places):
                own = [x[at, :, : len(sources[place])] for pair in pairs for x in pair]
                held = [x.to(kind).contiguous().view(torch.uint8).numpy() for x in own]
                self.sources.write(first + place, 0, held)
                last[place] = torch.cat([x[:, -1].reshape(-1) for x in own])
        new = torch.stack(last).numpy()
        self._last = np.concatenate((self._last, new)) if first else new
        self._version += 1

    def _tell(self, request: InferRequest, rows: list[int]) -> None:
        tables = [self.sources.tables[row] for row in rows]
        blocks = [block for table in tables for block in table]
        lengths = [self._lengths[row] for row in rows]
        for name, values in (
            (SOURCE_ROW, rows),
            (f"{SOURCE}past_lens", [length - 1 for length in lengths]),
            (f"{SOURCE}subsequence_begins", range(len(rows) + 1)),
            (f"{SOURCE}block_indices", blocks),
            (f"{SOURCE}block_indices_begins", [0, *accumulate(map(len, tables))]),
            (f"{SOURCE}max_context_len", [max(lengths)]),
        ):
            request.input(name, len(values))[:] = array("i", values)
        request.set(SOURCE_LAST, ov.Tensor(self._last, shared_memory=True))
