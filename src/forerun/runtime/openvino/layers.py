"""Early exits on OpenVINO: graphs of ranges of layers over the cache of the whole model's graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from forerun.errors import SettingError, UnsupportedModelError
from forerun.runtime.base import Pieces
from forerun.runtime.exits import Batch, LayersExecutor, Work
from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.executor import OpenVINOExecutor, settings
from forerun.runtime.openvino.export import export_layers, in_fp32, reason
from forerun.runtime.openvino.nodes import ROWS, attach
from forerun.runtime.openvino.weights import fuse
from forerun.runtime.probe import TOLERANCE, texts


class OpenVINOLayersExecutor(LayersExecutor):
    """A target that also drafts, its layers run by OpenVINO.

    Embedding, norm and exits stay torch's, so that its weights remain in memory beside the graphs'.
    Between two exits lies one graph; all of them write into the blocks of the executor that runs
    the whole model while nothing is pending.

    Args:
        model: the target's module on the CPU; used in fp32.
        whole: the same model's executor, in fp32 and without rows.
        exits: depths where tokens may leave.

    Raises:
        UnsupportedModelError: it has no layer-by-layer access, or a range does not compute what the
            whole does.
        SettingError: `whole` is not in fp32.
    """

    copies = False
    own_threads = True

    def __init__(self, model: Any, whole: OpenVINOExecutor, exits: Iterable[int]) -> None:
        if whole.facts.precision != "float32":
            raise SettingError(
                f"specbound runs on openvino in fp32 only, got {whole.facts.precision}; leave the "
                "precision out, or the runtime torch"
            )
        super().__init__(in_fp32(model))
        self.facts, self.whole = replace(self.facts, executor="openvino"), whole
        self._cuts = sorted({0, *exits, self.access.layers})
        self._ranges = {
            (first, last): _Range(self._graph(first, last), first, last - first, whole.threads)
            for first, last in pairwise(self._cuts)
        }
        self._check()

    def reserve(self, rows: int, columns: int) -> None:
        """Make room in the pool; rows that join have nothing pending."""
        self.whole.reserve(rows, columns)
        self._grow(rows)

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Reorder the rows; pending tokens are dropped."""
        self._keep_pending(rows)
        self.whole.keep(rows, lengths)

    def _whole(self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int]) -> torch.Tensor:
        return self.whole.run(starts, pieces, wanted)

    def _enter(self, rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        ends = list(self._starts)
        for row, start, count in zip(rows, starts, counts, strict=True):
            ends[row] = start + count
        self.whole.cover(ends)
        return torch.empty(0)  # the node masks

    def _through(self, batch: Batch, first: int, last: int) -> torch.Tensor:
        counts = [count for *_, count in batch.spans]
        packed = torch.cat([batch.hidden[i, :count] for i, count in enumerate(counts)]).unsqueeze(1)
        begins = [self._starts[row] + begin for row, begin, _ in batch.spans]
        tables = [self.whole.pool.tables[row] for row, *_ in batch.spans]
        where = _inputs(begins, counts, tables)
        states = packed.numpy()
        cuts = [first, *(cut for cut in self._cuts if first < cut < last), last]
        for reach in pairwise(cuts):
            states = self._ranges[reach].run(states, where, self.whole)
        out = batch.hidden.new_zeros(batch.hidden.shape)
        at = 0
        for i, count in enumerate(counts):
            out[i, :count] = torch.from_numpy(states[at : at + count, 0])
            at += count
        return out

    def _graph(self, first: int, last: int) -> ov.Model:
        graph = export_layers(self.model, first, last)
        fuse(graph)
        return attach(graph, trees=False)

    @torch.inference_mode()
    def _check(self) -> None:
        """The ranges one after the other against the whole model, over a row of their own."""
        text = texts(self.facts.vocab_size, self.facts.limit)[0]
        exact = self.whole.run([0], [text], [1])[0, 0]
        self.climb([len(text) - 1], [text], [self._cuts[-2]], lambda *_: [True])
        got = self.run([len(text) - 1], [text[-1:]], [1])[0, 0]
        self.keep([], [])
        self.work, self.draft_seconds = Work(), 0.0
        worst = float((got - exact).abs().max() / (exact.abs().max() + 1e-6))
        if not worst <= TOLERANCE["float32"]:
            raise UnsupportedModelError(
                f"ranges of layers on openvino differ from the whole model by {worst:.1e} of its "
                "largest logit"
            )


class _Range:
    """A compiled range of layers."""

    def __init__(self, graph: ov.Model, first: int, layers: int, threads: int) -> None:
        try:
            compiled = core().compile_model(graph, "CPU", settings("float32", threads))
        except RuntimeError as error:  # OpenVINO has no other
            raise UnsupportedModelError(f"OpenVINO cannot compile it: {reason(error)}") from error
        self._request = compiled.create_infer_request()
        self._caches = {
            f"{which}_cache.{layer}": f"{which}_cache.{first + layer}"
            for layer in range(layers)
            for which in ("key", "value")
        }
        self._bound: Any = None

    def run(
        self, hidden: NDArray[np.float32], where: dict[str, ov.Tensor], whole: OpenVINOExecutor
    ) -> NDArray[np.float32]:
        """`(tokens, 1, H)` states after the range; the caller's own."""
        pool = whole.pool.named
        if self._bound is not pool:  # it has grown since
            for own, shared in self._caches.items():
                self._request.set_tensor(own, pool[shared])
            self._bound = pool
        self._request.set_tensor("hidden", ov.Tensor(np.ascontiguousarray(hidden)))
        for name, tensor in where.items():
            self._request.set_tensor(name, tensor)
        self._request.start_async()
        self._request.wait()
        return np.array(self._request.get_output_tensor(0).data)


def _inputs(
    begins: Sequence[int], counts: Sequence[int], tables: Sequence[Sequence[int]]
) -> dict[str, ov.Tensor]:
    """What the attention nodes are told of rows, each `counts` tokens from `begins` on."""
    places = [b + i for b, count in zip(begins, counts, strict=True) for i in range(count)]
    ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
    blocks = [block for table in tables for block in table]
    rows = (
        begins,
        [0, *accumulate(counts)],
        blocks,
        [0, *accumulate(map(len, tables))],
        max(ends),
    )
    numbers = {
        name: ov.Tensor(np.array(value, np.int32)) for name, value in zip(ROWS, rows, strict=True)
    }
    positions = np.array(places, np.int64).reshape(-1, 1)
    return {"position_ids": ov.Tensor(positions), **numbers}
