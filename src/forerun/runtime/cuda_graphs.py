"""Passes replayed as CUDA graphs: one launch instead of one per kernel. Decoder-only models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import add
from typing import Any

import torch

from forerun.errors import UnsupportedModelError, first_line
from forerun.runtime import attention
from forerun.runtime.attention import Parents, branches
from forerun.runtime.base import LOGITS, Best, Columns, Pieces, read_stacked, stacked_best
from forerun.runtime.cache import CachedExecutor, RowCache, cache_argument
from forerun.runtime.padded import facts_of
from forerun.runtime.probe import prove
from forerun.runtime.support import check_supported

COLUMNS = 2048  # tokens a row has room for at first: a grown cache takes new graphs
FEWEST_COLUMNS = 256  # columns that attention reads at least; more come in powers of two
WIDE = 64  # wider passes, which read prompts, are padded to a multiple of twice that
LAST = 16  # widest pass that computes logits of all its tokens
WIDTHS = (1, 2, 4, 8, 16)  # tokens of one row whose passes are captured when a model is loaded
COMPILED_WIDTHS = (1, 4, 16)  # narrower passes are padded, wider ones not compiled
COMPILED_COLUMNS = 256  # as `FEWEST_COLUMNS`, of compiled passes; more come in powers of four
RECOMPILES = 256  # shapes that may be compiled; torch's own limit of 8 then runs the rest eagerly

Step = Callable[[torch.Tensor], torch.Tensor]
log = logging.getLogger(__name__)


class Graph:
    """A step, which never waits for the GPU, captured for inputs of one shape; its result is
    overwritten by the next replay, of whatever graph shares its `pool` of memory."""

    def __init__(self, step: Step, inputs: torch.Tensor, pool: Any) -> None:
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
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._result


class CudaGraphExecutor(CachedExecutor):
    """Captures a pass of each shape when it is first needed, and replays it.

    Launching a kernel from Python takes longer than running it, up to models of some billion
    weights at batch 1. A shape is rows, tokens and columns of the cache that attention reads, each
    rounded up, so that there are few. Pieces are aligned on the right, so wanted tokens are the
    last columns of every row. Rows that are fed nothing, and rows there are none of, are padding
    like what stands before short pieces.

    Args:
        model: a supported causal language model on a CUDA device.
        compile: fuse the kernels under the graphs, too, by `torch.compile`: 30 to 50 s for each
            shape of up to 16 tokens per row, when it is first needed. PyTorch keeps the results.
        capture: makes of a step, inputs and a memory pool what replays it; `UnsupportedModelError`
            if that cannot be, as where a pass waits for the GPU.
    """

    trees = True
    cache: RowCache  # the last column belongs to padding: what it writes there no token sees

    def __init__(
        self, model: Any, compile: bool = False, capture: Callable[..., Any] = Graph
    ) -> None:
        check_supported(model)
        self.model, self.device = model.eval(), model.device
        self.facts = replace(facts_of(model), executor="cudagraphs")
        self.cache = RowCache()
        self._cached = {cache_argument(model): self.cache, "use_cache": True}
        self._groups, self._windows = attention.groups_of(model), attention.windows_of(model.config)
        self._compile, self._capture = compile, capture
        self._captured: dict[tuple[Any, ...], Any] = {}
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.cache.open([0], [0], 1, self.device)
        with torch.no_grad():  # the first pass ever, which shows the sizes
            self.model(input_ids=one, **self._cached)
        self.reserve(1, min(COLUMNS, self.facts.limit + 1) - 1)
        prove(self, model)
        self.levels = COMPILED_WIDTHS if compile else WIDTHS
        self.timeable = not compile
        with torch.inference_mode():  # passes that judge few tokens; they write where padding does
            for width in () if compile else WIDTHS:
                inputs = torch.zeros(3, 1, width, dtype=torch.long)
                inputs[2] = self.cache.columns - 1
                self._replayed(inputs, self._columns(0, width), width, frozenset())

    def module(self) -> Any:
        return self.model

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the cache, to powers of two; graphs captured before would write to the old one."""
        if self.cache.reserve(_rounded(rows), _rounded(max(columns + 1, FEWEST_COLUMNS))):
            self._captured.clear()

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.reserve(max(len(rows), 1), max(lengths, default=0))
        super().keep(rows, lengths)

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        self.reserve(row + 1, first + columns.count)
        super().copy_in(row, first, columns)

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        """One padded pass, or two where prompts are read beside rows that decode."""
        counts, most = list(map(len, pieces)), max(wanted, default=0)
        groups = _by_width(counts)
        shape = len(pieces), most, self.facts.vocab_size
        out = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        for fed in groups:
            rows = [row for row, n in enumerate(fed) if n and wanted[row]]
            last = max((wanted[row] for row in rows), default=0)
            logits = self._pass(starts, pieces, fed, last, None, parents)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # else the pass is timed as its launch
            if len(groups) == 1 and all(n == most for n in wanted):
                # A copy: the next replay overwrites it.
                return logits[: len(pieces), logits.shape[1] - most :].clone()
            if rows:
                first = torch.tensor([[logits.shape[1] - wanted[row]] for row in rows])
                columns = (first + torch.arange(most)).clamp_(max=logits.shape[1] - 1)
                out[rows] = logits[torch.tensor(rows).unsqueeze(1), columns]
        return out

    def best(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        signals: frozenset[str],
        parents: Parents = (),
    ) -> Best:
        """The arg-max and its signals are part of the graph; one transfer each way."""
        counts = list(map(len, pieces))
        if LOGITS in signals or len(_by_width(counts)) != 1:
            return super().best(starts, pieces, wanted, signals, parents)
        values = self._pass(starts, pieces, counts, max(wanted), signals, parents).tolist()
        width = len(values[0][0])  # and padded rows are the last
        last = [[r[width - n :] for r, n in zip(part, wanted, strict=False)] for part in values]
        return read_stacked(last, signals)

    def _pass(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        counts: Sequence[int],
        most: int,
        signals: frozenset[str] | None,
        parents: Parents,
    ) -> torch.Tensor:
        """Replay a pass, in which rows with count 0 rest: `(rows, kept, V)` logits after the last
        tokens, kept ≥ `most`, or what `stacked_best` makes of them. The next one overwrites it."""
        end = max(map(add, starts, counts))
        self.reserve(len(counts), end)
        rows, width = _rounded(len(counts)), self._padded(max(counts))
        columns = min(self._columns(end, width), self.cache.columns)
        kept = width if width <= LAST else min(_rounded(max(most, 1)), width)
        ids = [[0] * width for _ in range(rows)]
        positions = [[0] * width for _ in range(rows)]
        places = [[self.cache.columns - 1] * width for _ in range(rows)]
        seen = [[-1] * width for _ in range(rows)]
        for row, count in enumerate(counts):
            if count:
                depths, words = branches(parents[row] if parents else (), count)
                ids[row][width - count :] = pieces[row]
                positions[row][width - count :] = [starts[row] + depth for depth in depths]
                places[row][width - count :] = range(starts[row], starts[row] + count)
                seen[row][width - count :] = words
        # Passes without trees have graphs of their own, which need no fourth.
        inputs = torch.tensor([ids, positions, places, *([seen] if any(parents) else [])])
        return self._replayed(inputs, columns, kept, signals)

    def _padded(self, width: int) -> int:
        """Tokens per row of a pass that needs so many."""
        if self._compile and width <= COMPILED_WIDTHS[-1]:
            return next(n for n in COMPILED_WIDTHS if n >= width)
        return _rounded(width) if width <= WIDE else -(-width // (2 * WIDE)) * 2 * WIDE

    def _columns(self, end: int, width: int) -> int:
        columns = _rounded(max(end, FEWEST_COLUMNS))
        if self._compile and width <= COMPILED_WIDTHS[-1]:  # 256 times a power of four
            return columns << ((columns // COMPILED_COLUMNS).bit_length() + 1) % 2
        return columns

    def _replayed(
        self, inputs: torch.Tensor, columns: int, kept: int, signals: frozenset[str] | None
    ) -> torch.Tensor:
        key = (*inputs.shape, columns, kept, signals)
        if (graph := self._captured.get(key)) is None:
            graph = self._captured[key] = self._graph(inputs, columns, kept, signals)
            self.graphs += 1
        return graph(inputs)

    def _graph(
        self, inputs: torch.Tensor, columns: int, kept: int, signals: frozenset[str] | None
    ) -> Any:
        def step(inputs: torch.Tensor) -> torch.Tensor:
            logits = self._step(inputs, columns, kept)
            return logits if signals is None else stacked_best(logits, signals)

        _, rows, width = inputs.shape
        fused: Step = step
        if self._compile and width <= COMPILED_WIDTHS[-1]:
            log.warning("compiling passes of %d×%d tokens over %d columns", rows, width, columns)
            fused = torch.compile(step, dynamic=False)

        def run(inputs: torch.Tensor) -> torch.Tensor:
            with attention.folding(self.model, self._groups):
                return fused(inputs)

        try:
            others = next(iter(self._captured.values()), None)
            with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
                return self._capture(run, inputs.to(self.device), others and others.pool)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"a pass of this model cannot be captured as a CUDA graph ({first_line(error)}); "
                "use the runtime torch"
            ) from error

    def _step(self, inputs: torch.Tensor, columns: int, kept: int) -> torch.Tensor:
        """The pass itself: tokens at places of the cache see the places up to their own, or of
        these what their tree says."""
        ids, positions, places = inputs[:3]
        tree = inputs[1::2] if len(inputs) == 4 else None

        def mask(window: int | None) -> torch.Tensor:
            seen = attention.additive_mask(places, columns, window, self.model.dtype, tree)
            return attention.folded_mask(seen, self._groups)

        self.cache.place(places, columns)
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=attention.mask_of(self._windows, mask),
            logits_to_keep=kept,
            **self._cached,
        ).logits


def _by_width(counts: Sequence[int]) -> list[list[int]]:
    """Tokens per row of the passes that feed these: of rows that read prompts, and of others."""
    return [
        fed
        for wide in (False, True)
        if any(fed := [n if (n > WIDE) == wide else 0 for n in counts])
    ]


def _rounded(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << max(count - 1, 0).bit_length()
