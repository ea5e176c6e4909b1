"""`OpenVINOExecutor`: ragged passes over a pool of cache blocks, driven from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.errors import SettingError
from forerun.lazy import threads as count_threads
from forerun.lazy import torch
from forerun.runtime.attention import Parents
from forerun.runtime.base import LOGITS, Best, Columns, Executor, Facts, Pieces
from forerun.runtime.load import DTYPES
from forerun.runtime.openvino.blocks import GROUP
from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.forms import HALVED, spans
from forerun.runtime.openvino.making import Maker
from forerun.runtime.openvino.nodes import BLOCK, lookup, tap
from forerun.runtime.openvino.pool import Pool
from forerun.runtime.openvino.store import let_go
from forerun.runtime.states import States
from forerun.signals import read
from forerun.types import Array

FIRST_BLOCKS = 16  # blocks of a new pool; it doubles when it runs out
LARGEST_LOGITS = 256 << 20
"""Bytes of logits that `best` has of one pass, as long as one row's are fewer: 64 rows that judge
15 tokens each over a vocabulary of 150,000 would have 614 MB."""
GROUPS = {"float32": 0, "bfloat16": 0, "int8": 64}
"""Inputs of a product that share a scale when they are rounded to 8 bits, where the CPU multiplies
8-bit numbers (VNNI, AMX); 0: none are rounded."""
NARROW = {"KV_CACHE_PRECISION": "bf16", "SNIPPETS_MODE": "DISABLE"}
"""Settings for attention in bfloat16. In graphs of fixed shapes the plug-in would compile what
becomes bfloat16, and round it to the nearest, which its node in the graph for any number of tokens
does not."""
PACKED = 2, 16
"""Tokens of passes for which the plug-in packs weights in other forms than for one: few, many."""
PRECISIONS = {name: kind for name, kind in DTYPES.items() if kind in GROUPS} | {"int8": "int8"}
"""Names of precisions, and each one's name in `Facts` and reports."""


class OpenVINOExecutor(Executor):
    """Runs an exported model on the CPU with OpenVINO.

    All tokens of a pass are packed, so a pass may read chunks of prompts in some rows and judge
    drafts in others, and costs what its tokens cost. A row's keys and values lie in blocks of 32
    tokens; rolling back is a smaller number in `starts`.

    Args:
        graph: with paged-attention nodes (`nodes.attach`).
        facts: of the model it was exported from.
        threads: of OpenVINO; None: as many as torch has.
        group: of inputs that share a scale; None: that of `GROUPS`.
        again: makes such a graph anew, for `tap`; None: this one is kept.
        least: tokens that a row of a pass is padded to, and whose logits are had; results stay as
            they are.
        lazy: make graphs for exactly so many tokens when they are wanted, and use them if they
            compute the same to the last bit, which is kept under this name ("": not); None: all are
            made at once.
        narrow: whether attention and its cache are in bfloat16, whatever the precision.

    Raises:
        SettingError: bf16 with one thread, or on a CPU without instructions for it.
    """

    copies = True
    own_threads = True
    on_torch = False
    packs = True

    def __init__(
        self,
        graph: ov.Model,
        facts: Facts,
        threads: int | None = None,
        group: int | None = None,
        again: Callable[[], ov.Model] | None = None,
        least: int = 1,
        lazy: str | None = None,
        narrow: bool = False,
    ) -> None:
        self.facts, self.device = facts, "cpu"
        self.threads = threads or count_threads()
        self.group = GROUPS.get(facts.precision, GROUP) if group is None else group
        self._again, self._least, self._narrow = again or graph.clone, least, narrow
        self.entry: str | None = None  # of the store, whose file the graph's weights are in
        self.memory: Any = None  # what must live as long, as the graph reads its memory
        self.given: list[NDArray[np.float32]] = []
        """`(tokens, ≤ D)` of each fed row what the next pass reads beside its tokens, if the graph
        has `GIVEN`; where these are fewer numbers, zeros are the others."""
        self._most = LARGEST_LOGITS // (4 * facts.vocab_size)
        self._version = 0  # of the tables
        self._blank = np.zeros(facts.vocab_size, np.float32)
        self._lazy = lazy
        self._compile(graph)

    def _compile(self, graph: ov.Model) -> None:
        precision = self.facts.precision if self.facts.precision in GROUPS else "fp32"
        options = settings(precision, self.threads, self.group)
        if self._narrow:
            options |= NARROW
        settle = None if self._lazy is None else self.settle
        self._maker = Maker(
            graph, self.facts, options, self._least, settle, self._lazy or "", self._narrow
        )
        self._forms, self.levels = self._maker.forms, self._maker.levels
        self.trees = self._forms.open.trees and not self._maker.most_split
        self.pool = Pool(self._forms.open.ports(), FIRST_BLOCKS, self._forms.bind)
        token_bytes = self.pool.nbytes // (self.pool.total * BLOCK)
        self.facts = replace(self.facts, token_bytes=token_bytes)

    def settle(self) -> None:
        """Give back pages of the graph's file, too."""
        let_go(self.entry)

    @property
    def finished(self) -> bool:
        return self._maker.finished

    def finish(self) -> None:
        """Compile those for exactly so many tokens that passes have not wanted yet."""
        self._maker.finish()

    def tap(self, depths: Sequence[int]) -> States:
        """By an output more of the graphs, which are compiled anew; there must be no rows."""
        if self.states is None or self.states.depths != tuple(depths):
            graph = self._again()
            width = tap(graph, depths)
            del self._maker, self._forms, self.pool  # before as much is taken again
            self._compile(graph)
            self.warm()
            self.settle()
            self.states = States(depths, width)
        return self.states

    def embeddings(self) -> torch.Tensor:
        """Of all ids, looked up by the graph."""
        part = core().compile_model(lookup(self._again()), "CPU")
        table = part(np.arange(self.facts.vocab_size)[:, None])[0]
        return torch.from_numpy(table.reshape(self.facts.vocab_size, -1).copy())

    def warm(self) -> None:
        """Take the first pass of each graph, which takes several times as long as later ones, and
        of each form of its weights; there must be no rows."""
        for tokens in sorted({1, *(self.levels if self.finished else ()), *PACKED}):
            if tokens > self.facts.limit:
                break
            if self.facts.source_limit is not None:
                self.attend([[0]])
            self._pass([0], [[0] * tokens], [tokens])
            self.keep([], [])

    def reserve(self, rows: int, columns: int) -> None:
        self.pool.reserve(rows, columns)
        if rows > 1:
            self._maker.share()
            self.shared_levels = self._maker.shared_levels

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.pool.keep(rows, lengths)
        self._version += 1

    def copy_out(self, row: int, first: int, last: int) -> Columns:
        return Columns(self.pool.read(row, first, last), last - first)

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        self._version += self.pool.write(row, first, columns.states)

    def move(self, row: int, source: int, place: int) -> None:
        self.pool.move(row, source, place)

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> Array:
        """One packed pass; the logits are the caller's own."""
        own = self._pass(starts, pieces, wanted, parents)
        if not any(wanted):
            return np.empty((len(wanted), 0, self.facts.vocab_size), np.float32)
        rows = torch.from_numpy(own).split(list(wanted))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def best(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        signals: frozenset[str],
        parents: Parents = (),
    ) -> Best:
        """One packed pass, or several where logits are many; they are read where they are."""
        shares = list(self._shares(pieces, wanted))
        tokens: list[int] = []
        sound: list[bool] = []
        values: dict[str, list[Any]] = {name: [] for name in signals}
        for fed, asked in shares:
            seen = self._pass(starts, fed, asked, parents)
            best, finite, measured = read(seen, signals - {LOGITS})
            if LOGITS in signals:  # the next pass overwrites them
                measured[LOGITS] = list(seen if len(shares) == 1 else seen.copy())
            tokens += best
            sound += finite
            for name, x in measured.items():
                values[name] += x
        places, width = spans(wanted), max(wanted, default=0)

        def by_row(values: list[Any], nothing: Any) -> list[list[Any]]:
            return [values[a:b] + [nothing] * (width - b + a) for a, b in places]

        return Best(
            by_row(tokens, 0),
            {n: by_row(x, self._blank if n == LOGITS else math.nan) for n, x in values.items()},
            by_row(sound, False),
        )

    def _shares(
        self, pieces: Pieces, wanted: Sequence[int]
    ) -> Iterator[tuple[Pieces, Sequence[int]]]:
        """What to feed and to want in turn: of some rows all, as far as their logits are few, and
        of the others nothing."""
        ends, count = [0], 0
        for row, n in enumerate(wanted):
            if count and count + n > self._most:
                ends, count = [*ends, row], 0
            count += n
        for first, last in pairwise([*ends, len(wanted)]):
            inside = [first <= row < last for row in range(len(wanted))]
            yield (
                [piece if own else [] for piece, own in zip(pieces, inside, strict=True)],
                [n * own for n, own in zip(wanted, inside, strict=True)],
            )

    def _pass(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> NDArray[np.float32]:
        """Run one packed pass; `(sum(wanted), V)`, overwritten by the next one."""
        counts = [len(piece) for piece in pieces]
        if not (size := sum(counts)):
            return np.empty((0, self.facts.vocab_size), np.float32)
        if HALVED < size <= self._maker.most_split:
            return self._in_parts(starts, pieces, wanted)
        fed = self._forms.open.fed(counts)
        ends = list(map(add, starts, fed))
        form = self._maker.fitting(counts)
        last = max(row for row, count in enumerate(counts) if count)
        room = self.facts.limit - ends[last]
        if (more := form.more(counts, room)) > room:
            form, more = self._forms.open, 0
        ends[last] += more
        self._version += self.pool.cover(ends)
        if self.given:
            assert self.states is not None, "what is given is made of what passes leave"
            form.give(self.given, self.states.width, more)
        tables = self.pool.tables
        seen = form.run(starts, pieces, wanted, ends, tables, self._version, parents, more)
        if self.states is not None:
            states = form.request.states()
            for row, first in form.begins.items():
                own = states[first : first + counts[row]]
                self.states.note(row, starts[row], own.copy())
        return seen

    def _in_parts(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int]
    ) -> NDArray[np.float32]:
        """Passes of `HALVED` tokens, a row after the other."""
        starts, left, seen = list(starts), [list(piece) for piece in pieces], []
        while any(left):
            part, last, room = [], [], HALVED
            for row, piece in enumerate(left):
                part.append(piece[:room])
                left[row] = piece[room:]
                room -= len(part[row])
                last.append(max(min(wanted[row] - len(left[row]), len(part[row])), 0))
            seen.append(self._pass(starts, part, last).copy())
            starts = list(map(add, starts, map(len, part)))
        return np.concatenate(seen)


def settings(precision: str, threads: int, group: int = 0) -> dict[str, Any]:
    """The plug-in's settings for a precision, and for inputs in groups that share a scale.

    Raises:
        SettingError: unknown, or one the plug-in cannot run.
    """
    if precision not in PRECISIONS:
        raise SettingError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    reduced = PRECISIONS[precision] == "bfloat16"
    if reduced and threads < 2:
        raise SettingError(
            "bfloat16 on openvino needs at least 2 threads (it ends the process otherwise), got 1; "
            "use fp32, or torch.set_num_threads(2)"
        )
    if reduced and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise SettingError(
            "bfloat16 on openvino needs a CPU with instructions for it, which this one lacks; "
            "use fp32 or int8"
        )
    compute = "bf16" if reduced else "f32"
    return {
        "INFERENCE_PRECISION_HINT": compute,
        "KV_CACHE_PRECISION": compute,  # the plug-in's own choice is 8 bits
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # all processes would be pinned to the same cores
        "INFERENCE_NUM_THREADS": threads,
    }
