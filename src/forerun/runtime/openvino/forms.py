"""A model's compiled graphs: one for any number of tokens, and some for exactly so many.

In a graph of open shapes every node asks before it runs whether its shapes have changed, and where
they have it prepares itself anew. Between the weights of a pass, which sweep the caches, asking
costs some 3 µs a node, and of the shipped target a change 1 to 2 ms of a pass of 5 to 10. In a
graph for so many tokens only attention stays open, since rows come and go.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.runtime.attention import FARTHEST, Parents, branches
from forerun.runtime.base import Facts, Pieces
from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.nodes import GIVEN, PADDED, SOURCE_ROW, TREES
from forerun.runtime.openvino.request import InferRequest

HALVED = 4
"""Tokens up to which a pass reads weights in 16 bits, if they are bfloat16 numbers. Of the shipped
target it takes a quarter less time; for more tokens the plug-in widens them into memory first, and
a third more."""
STEP = 8
"""Tokens to whose multiples passes of an open graph are padded while that is worth it: in front of
one of a size that it was not fed before, all its nodes prepare themselves anew."""

Tell = Callable[[InferRequest, list[int]], None]
"""Is given a request and, for each token it will be fed, the row it belongs to."""


class Form:
    """A compiled graph, and what is bound to its inputs.

    Args:
        graph: with paged-attention nodes; it is changed.
        facts: of the model.
        settings: of the plug-in.
        tokens: every pass feeds so many; 0: any number.
        ahead: it goes on by itself for so many tokens behind the only one that is wanted, and has
            their logits, too; 0: those of any number of tokens are wanted.
        spare: tokens that passes of one size may be padded by in all, before it is fed as it is.
        least: tokens that each row is fed at least, and the head if any are wanted.

    Raises:
        RuntimeError, MemoryError: this graph cannot be had for so many tokens.
    """

    def __init__(
        self,
        graph: ov.Model,
        facts: Facts,
        settings: dict[str, Any],
        tokens: int = 0,
        ahead: int = 0,
        spare: int = 0,
        least: int = 1,
    ) -> None:
        if tokens:
            shapes = {"input_ids": [tokens, 1], "position_ids": [tokens, 1]}
            shapes |= {"wanted": [1 if ahead else tokens]}
            shapes |= {name: [tokens] for name in (SOURCE_ROW, PADDED[1])}
            named = {name: port for port in graph.inputs for name in port.get_names()}
            if GIVEN in named:
                width = named[GIVEN].get_partial_shape()[2].get_length()
                shapes[GIVEN] = [tokens, 1, width]
            graph.reshape({named[n]: ov.PartialShape(s) for n, s in shapes.items() if n in named})
        self.tokens, self.ahead = tokens, ahead
        self.request = InferRequest(core().compile_model(graph, "CPU", settings), facts.vocab_size)
        self.tell: Tell | None = None
        """Called when the rows of the tokens, or the tables, are others; None: nobody needs it."""
        self._least = least
        self._spare, self._padded = spare, Counter[int]()
        self._places = memoryview(array("q", range(facts.limit + least)))
        self._shape: tuple[Sequence[int], Sequence[int], int] = (), (), 0
        self._fed: list[tuple[int, int, int]] = []  # row, first and last of its tokens
        self._sizes: list[int] = []  # of attention, how many tokens each has
        self.begins: dict[int, int] = {}  # where the tokens of each row that was fed begin
        self._version = -1
        self.trees = all(map(self.request.has, TREES))  # whether passes may feed trees
        self.pads_attention = self.request.has(PADDED[0])
        self._branching = self.trees  # so that the inputs are bound
        self._chains()

    def ports(self, prefix: str = "") -> list[Any]:
        """The inputs that are pools of the rows' own, or with the prefix `SOURCE` of sources."""
        begins = f"{prefix}key_cache.", f"{prefix}value_cache."
        return [port for port in self.request.inputs if port.get_any_name().startswith(begins)]

    def bind(self, pools: Iterable[ov.Tensor], prefix: str = "") -> None:
        """Read and write these pools, in the order of these inputs."""
        for port, pool in zip(self.ports(prefix), pools, strict=True):
            self.request.set(port, pool)

    def give(self, states: Sequence[NDArray[np.float32]], width: int, more: int = 0) -> None:
        """Let the next pass, which is padded by so many tokens, read `(tokens, ≤ width)` states of
        each fed row's, zeros behind them; see `nodes.GIVEN`."""
        at, size = 0, self.tokens or sum(map(len, states)) + more
        into = self.request.floats(GIVEN, size, width)[:, 0]
        for own in states:
            end, known = at + len(own), own.shape[1]
            into[at:end, :known], into[at:end, known:], at = own, 0.0, end

    def fed(self, counts: Iterable[int]) -> list[int]:
        """Tokens of each row with those it is padded with: a row of one token takes another kernel
        of attention, whatever is beside it. Of the products only a single token does, so that a
        graph for any number of tokens pads a row for its attention alone."""
        return [max(count, self._least) if count else 0 for count in counts]

    def own(self, counts: Sequence[int]) -> list[int]:
        """Tokens of each row that products are over."""
        alone = self.pads_attention and sum(counts) >= self._least
        return [*counts] if alone else self.fed(counts)

    def more(self, counts: Sequence[int], room: int) -> int:
        """Tokens that a pass feeds behind those of its last row: if any number, at most `room`."""
        size = sum(self.own(counts))
        if self.tokens:
            return self.tokens - size
        more = -size % STEP
        if more > room or self._padded[size] + more > self._spare:
            return 0
        self._padded[size] += more
        return more

    def run(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        ends: Sequence[int],
        tables: Sequence[Sequence[int]],
        version: int,
        parents: Parents = (),
        more: int = 0,
    ) -> NDArray[np.float32]:
        """One packed pass.

        Args:
            starts, pieces, wanted, parents: see `Executor.run`.
            ends: tokens each row holds afterwards, with those it is padded with; of the last row
                that is fed also all that the graph takes: what comes next overwrites them.
            tables: each row's blocks, enough for that.
            version: another one whenever the tables are others.
            more: tokens that a pass of any number is padded by.

        Returns:
            `(sum(wanted), V)`, overwritten by the next pass.
        """
        counts = [len(piece) for piece in pieces]
        if (counts, wanted, more) != self._shape:
            self._bind_shape(counts, list(wanted), more)
        if version != self._version:
            self._bind_tables(tables)
            self._version = version
        for at, (row, first, last) in enumerate(self._fed):
            piece, start = pieces[row], starts[row]
            self._ids[first : first + len(piece)] = array("q", piece)
            self._positions[first:last] = self._places[start : start + last - first]
            self._past[at] = start
        if any(parents):
            self._branch(starts, parents)
        elif self._branching:
            self._chains()
        self.request.longest[0] = max(ends)
        self.request.infer()
        return self._logits

    def _branch(self, starts: Sequence[int], parents: Parents) -> None:
        """Set the inputs `TREES`, and the positions of tokens that do not follow each other."""
        squares = []
        for (row, first, _), size in zip(self._fed, self._sizes, strict=True):
            depths, seen = branches(parents[row], len(parents[row]))
            end = first + len(depths)
            self._positions[first:end] = array("q", [starts[row] + depth for depth in depths])
            words = np.full(size, -1)
            words[: len(seen)] = seen
            back = np.arange(size)[:, None] - np.arange(size)
            squares.append(((words[:, None] >> back.clip(0, FARTHEST)) & (back >= 0)).ravel() & 1)
        begins = [0, *accumulate(map(len, squares))]
        self.request.array(TREES[0], np.concatenate(squares).astype(np.uint8))
        self.request.array(TREES[1], np.array(begins, np.int32))
        self._branching = True

    def _chains(self) -> None:
        """No row feeds a tree."""
        if self._branching:
            self.request.array(TREES[0], np.zeros(0, np.uint8))
            self.request.array(TREES[1], np.zeros(0, np.int32))
            self._branching = False

    def _bind_shape(self, counts: list[int], wanted: list[int], more: int) -> None:
        """Set the inputs that depend on how many tokens which rows feed, not on which tokens."""
        self._shape = counts, wanted, more
        padded = self.fed(counts)
        fed = [(row, *span) for row, span in enumerate(spans(self.own(counts))) if counts[row]]
        self.begins = {row: first for row, first, _ in fed}
        ends = {row: first + counts[row] for row, first in self.begins.items()}
        heads = [at for row, end in ends.items() for at in range(end - wanted[row], end)]
        size = self.tokens or fed[-1][2] + more
        seen = self.tokens or (heads and max(len(heads), self._least)) or 0
        if self._spare and seen > self._least:
            seen = min(seen + -seen % STEP, size)
        seen = 1 if self.ahead else seen
        self._sizes = [padded[row] for row in ends]
        self._sizes[-1] += size - fed[-1][2]
        fed[-1] = *fed[-1][:2], size
        if self.tell or [row for row, *_ in fed] != [row for row, *_ in self._fed]:
            self._version = -1
        self._fed, request = fed, self.request
        begins = array("i", [0, *accumulate(self._sizes)])
        request.input("subsequence_begins", len(begins))[:] = begins
        request.input("wanted", seen)[:] = array("q", [*heads, *[0] * (seen - len(heads))])
        self._logits = request.output(seen + self.ahead)[: len(heads) + self.ahead]
        self._past = request.input("past_lens", len(fed))
        self._ids = request.input("input_ids", size)
        self._positions = request.input("position_ids", size)
        if self.pads_attention:
            self._bind_padding(begins)

    def _bind_padding(self, begins: Sequence[int]) -> None:
        """Set the inputs `PADDED`: a row is padded with its last token."""
        padded: list[int] = []
        unpadded: list[int] = []
        for (_, first, last), begin, end in zip(self._fed, begins, begins[1:], strict=False):
            unpadded += range(begin, begin + last - first)
            padded += [min(first + at, last - 1) for at in range(end - begin)]
        for name, values in zip(PADDED, (padded, unpadded), strict=True):
            self.request.input(name, len(values))[:] = array("i", values)

    def _bind_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Set the inputs that say where the fed rows' blocks are."""
        held = [tables[row] for row, *_ in self._fed]
        blocks = [block for table in held for block in table]
        begins = list(accumulate(map(len, held)))
        self.request.input("block_indices", len(blocks))[:] = array("i", blocks)
        self.request.input("block_indices_begins", len(begins) + 1)[1:] = array("i", begins)
        if self.tell:
            self.tell(self.request, [row for row, a, b in self._fed for _ in range(a, b)])


class Forms:
    """The forms of a model that there are, and which of them a pass takes.

    Args:
        forms: the one for any number of tokens, then those for exactly so many.
        wide: one for any number above `HALVED`, where that takes less time; None: there is none.
    """

    def __init__(self, forms: Sequence[Form], wide: Form | None = None) -> None:
        self.open, *self.exact = forms
        self.wide = wide
        self._pools: dict[str, list[ov.Tensor]] = {}
        self._tell: Tell | None = None
        self._order()

    def fitting(self, tokens: int, several: bool = False) -> Form:
        """The one that takes least time for so many tokens, of a row alone or of several."""
        fitting = self._fitting[several]
        return fitting[tokens] if tokens < len(fitting) else self.wide or self.open

    def levels(self, several: bool = False) -> set[int]:
        """Tokens of a row alone, or of several, for which one more would take another form."""
        sizes = range(1, len(self._fitting[several]))
        return {n for n in sizes if self.fitting(n + 1, several) is not self.fitting(n, several)}

    def add(self, new: Iterable[Form]) -> None:
        """Let these be taken, and all read and write the same; pools may have been others'."""
        self.exact += new
        for prefix, pools in self._pools.items():
            self.bind(pools, prefix)
        self.tell(self._tell)
        self._order()

    def bind(self, pools: list[ov.Tensor], prefix: str = "") -> None:
        """Let all read and write these pools; see `Form.bind`."""
        self._pools[prefix] = pools
        for form in self._all():
            form.bind(pools, prefix)

    def tell(self, tell: Tell | None) -> None:
        """Let all call this; see `Form.tell`."""
        self._tell = tell
        for form in self._all():
            form.tell = tell

    def _all(self) -> list[Form]:
        return [self.open, *self.exact, *([self.wide] if self.wide else [])]

    def _order(self) -> None:
        exact = [form for form in self.exact if not form.ahead]
        exact.sort(key=lambda form: form.tokens, reverse=True)
        alike = [form for form in exact if form.pads_attention is self.open.pads_attention]
        halved = HALVED if self.wide else -1
        self._fitting = []  # of a row alone, and of several
        for forms in (exact, alike):
            fitting = [self.open] * (1 + max([halved, *(form.tokens for form in forms)]))
            for form in forms:  # padding costs less than open shapes between two weights
                fitting[1 : form.tokens + 1] = [form] * form.tokens
            self._fitting.append(fitting)


def spans(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Where pieces of so many entries begin and end, one after the other."""
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))
