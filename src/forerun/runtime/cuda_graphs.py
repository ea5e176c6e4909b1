"""Passes replayed as CUDA graphs: one launch instead of one per kernel. Decoder-only models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, ClassVar

import torch

from forerun.errors import UnsupportedModelError
from forerun.runtime.base import Best, Pieces, read_stacked, stacked_best
from forerun.runtime.compiled import CompiledExecutor

COLUMNS = 2048
"""Tokens a row has room for from the start: graphs are captured anew when the cache grows."""
WIDE = 64
"""Wider passes, which read prompts, are padded to a multiple of it and run kernel by kernel."""
WIDTHS = (1, 2, 4, 8, 16)
"""Tokens of one row whose passes are captured, and timed, when a model is loaded."""
REPEATS = 5


class CudaGraphExecutor(CompiledExecutor):
    """Captures a pass of each shape when it first occurs, and replays it.

    Launching a kernel from Python takes longer than running it, up to models of some billion
    weights at batch 1. The kernels, and so the numbers, are those of PyTorch.

    Args:
        model: a supported causal language model on a CUDA device.

    Raises:
        UnsupportedModelError: rows cannot serve this architecture, or its pass waits for the GPU
            and cannot be captured.
    """

    widest: ClassVar[int] = WIDE

    def __init__(self, model: Any) -> None:
        self._captured: dict[tuple[Any, ...], Graph] = {}
        super().__init__(model, compiler=lambda step: step)
        self.facts = replace(self.facts, executor="cudagraphs")
        self.reserve(1, min(COLUMNS, self.facts.limit + 1) - 1)
        self.timed = tuple((width, self._seconds(width)) for width in WIDTHS)
        self.levels = WIDTHS

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the cache; graphs captured before would write to the old one."""
        before = self.cache.rows, self.cache.columns
        super().reserve(rows, columns)
        if before != (self.cache.rows, self.cache.columns):
            self._captured.clear()

    def best(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        signals: frozenset[str],
    ) -> Best:
        """The arg-max and its signals are part of the graph; one transfer each way."""
        counts = list(map(len, pieces))
        if not 0 < max(counts) <= self.widest:
            return super().best(starts, pieces, wanted, signals)
        self._make_room(starts, counts)
        values = self._replayed(self._inputs(starts, pieces, counts), signals).tolist()
        width = len(values[0][0])
        last = [
            [row[width - n :] for row, n in zip(part, wanted, strict=False)]  # padded rows end it
            for part in values
        ]
        return read_stacked(last, signals)

    def _padded(self, width: int) -> int:
        return super()._padded(width) if width <= WIDE else -(-width // WIDE) * WIDE

    def _pass(
        self, starts: Sequence[int], pieces: Pieces, counts: Sequence[int], most: int
    ) -> torch.Tensor:
        inputs = self._inputs(starts, pieces, counts)
        if inputs.shape[2] > WIDE:
            return self._eager(inputs.to(self.device), max(most, 1))
        return self._replayed(inputs).clone()  # the next replay overwrites it

    def _replayed(
        self, inputs: torch.Tensor, signals: frozenset[str] | None = None
    ) -> torch.Tensor:
        """Logits of all tokens of a narrow pass, or what `stacked_best` makes of them."""
        key = (*inputs.shape[1:], signals)
        if (graph := self._captured.get(key)) is None:
            graph = self._captured[key] = self._capture(inputs, signals)
        return graph(inputs)

    def _capture(self, inputs: torch.Tensor, signals: frozenset[str] | None) -> Graph:
        def step(inputs: torch.Tensor) -> torch.Tensor:
            logits = self._eager(inputs, inputs.shape[2])
            return logits if signals is None else stacked_best(logits, signals)

        try:
            others = next(iter(self._captured.values()), None)
            return Graph(step, inputs.to(self.device), others and others.pool)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"a pass of this model cannot be captured as a CUDA graph ({error}); use the "
                "runtime torch"
            ) from error

    @torch.inference_mode()
    def _seconds(self, width: int) -> float:
        """Of a pass that judges so many tokens; it writes where padding does."""
        inputs = self._inputs([0], [[0] * width], [width])
        inputs[1] = self.cache.columns - 1
        taken = []
        for _ in range(1 + REPEATS):
            began = time.perf_counter()
            self._replayed(inputs, frozenset()).tolist()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])


class Graph:
    """A step captured for one shape; its result is overwritten by the next replay.

    Args:
        step: what to capture, without any wait for the GPU.
        inputs: of the first replay, on the device.
        pool: memory shared with graphs that never run at the same time.
    """

    def __init__(
        self, step: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, pool: Any
    ) -> None:
        self._inputs = inputs
        beside = torch.cuda.Stream(inputs.device)
        beside.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(beside):  # libraries set themselves up, which no capture allows
            step(inputs)
        torch.cuda.current_stream(inputs.device).wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
            self._result = step(inputs)
        self.pool = self._graph.pool()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Replay it on these inputs."""
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._result
