"""A model's compiled graphs: one for any number of tokens, and some for exactly so many.

In a graph of open shapes every node asks before it runs whether its shapes have changed, and where
they have it prepares itself anew. Between the weights of a pass, which sweep the caches, asking
costs some 3 µs a node, and of the shipped target a change 1 to 2 ms of a pass of 5 to 10. In a
graph for so many tokens only attention stays open, since rows come and go.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.cache import keep_json, kept_json
from forerun.runtime.attention import FARTHEST, Parents, branches
from forerun.runtime.base import Facts, Pieces
from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.nodes import (
    GIVEN,
    PADDED,
    SOURCE_ROW,
    TREES,
    caches,
    narrow_attention,
    pad_attention,
)
from forerun.runtime.openvino.parts import has_matrix_units, multiply_in_parts
from forerun.runtime.openvino.pool import Pool
from forerun.runtime.openvino.request import InferRequest
from forerun.runtime.openvino.store import join_pages
from forerun.runtime.openvino.weights import is_halved, keep_halves, widen
from forerun.runtime.probe import texts

SIZES = (1, 4, 5, 8), (12, 16)
"""Tokens that graphs are compiled for: of a row alone, and when rows first share passes."""
TILES = 5, 10, 16
"""Tokens up to which a pass in parts fills one, two, three tiles of matrix units, of 16 rows: three
rows a token."""
TILED_SIZES = (1, 4, 10, 16), (24, 32, 48)  # those of a model whose weights matrix units multiply
SMALL_SIZES = (1, 2), (4, 8, 12, 16)
"""Those of a small model: it drafts, a token of each row at a time."""
HALVED = 4
"""Tokens up to which a pass reads weights in 16 bits, if they are bfloat16 numbers. Of the shipped
target it takes a quarter less time; for more tokens the plug-in widens them into memory first, and
a third more."""
MOST_SPLIT = 16
"""Tokens up to which a pass of a model that reads all weights in 16 bits is made of several of
`HALVED` tokens: of 0.5 billion weights each takes 22 ms, one of 8 to 16 tokens 80 to 110."""
LARGEST_COPIES = 384 << 20
"""Bytes of weights up to which such graphs are held: each has its own copy, and the larger they are
the less it matters what is between them."""
LARGEST_SECOND = 2 << 30
"""Bytes of weights in 16 bits up to which a second copy is held, for passes of more than `HALVED`
tokens on matrix units: of 0.5 billion weights one of 5, 8, 16 tokens takes 35, 40, 53 ms, made of
several 55, 53, 112. A single token would take 32 on them, and takes 23."""
LARGEST_LEAST = 2  # tokens that rows of passes may have to be padded to
PACKED_SIZES = (2, 5), (4, 8, 16, 24, 32, 48)
"""Those of a model of 4- to 6-bit weights that rounds inputs: of a row alone, and of rows that
share passes, padded for attention alone. Drafting makes passes of few tokens and of several take
turns, and an open graph prepares all its nodes anew at each change: of SmolLM2 (Q4_1, Zen 4) one of
four rows takes 25, 29, 40 ms in turns for 1, 2, 4 tokens each, and 18, 22, 30 in graphs for exactly
so many; of sixteen rows 40, 61, 76 and 29, 45, 59 for 1, 2, 3. Where nothing is rounded five tokens
take twice the time of one, and only that gains by its graph (AVX2: 27 ms of CPU for 31)."""
WIDER = 8, 16  # those of rows that share passes that a row alone may want, too
LARGEST_PACKED = 1 << 30
"""Bytes of such weights up to which graphs are made for passes that want them: six of SmolLM2."""
SMALLEST_WIDE = 24 << 20  # bytes of weights from which a model is not small
WANTED = 128
"""Passes that a graph for exactly so many tokens would have taken, after which it is made. One of
SmolLM2 takes two seconds of CPU time and 0.17 GB, and saves each pass a few of its 16 ms: in a
process that writes 96 tokens, or 400, none pays for itself."""
STEP = 8
"""Tokens to whose multiples passes of an open graph are padded while that is worth it: in front of
one of a size that it was not fed before, all its nodes prepare themselves anew."""
NEW_SIZE = 1_350_000_000
"""Weights times tokens that are multiplied meanwhile: SmolLM2 takes 10 to 20 ms of CPU time for it
(Zen 4), ten tokens, its head 4 to 15 for 2 to 3 ms of reading. Models are padded so whose passes
compute the same whatever their size, and heads."""
SMALLEST_JOINED = 128 << 20
"""Bytes of weights from which as many passes also put memory into huge pages (`join_pages`): one of
one token takes 3 to 7 % less time then, of five 0 to 6 % (SmolLM2, Qwen2.5-Coder-1.5B; Zen 4), for
0.1 to 0.8 s of CPU time (Qwen 0.4 to 3), as the system has memory at hand. Passes of the shipped
target would win 0 to 3 %."""


def weighed(facts: Facts) -> int:
    """Bytes of one graph's weights; 0 if graphs of fixed sizes were not tried (bf16). Blocks of a
    few bits take 1.25 with their scales, which are in float32."""
    of = {"float32": 4, "int8": 1}.get(facts.precision, 1.25 if is_packed(facts) else 0)
    return int(facts.weights * of)


def is_packed(facts: Facts) -> bool:
    """Whether most weights have fewer than 8 bits."""
    return facts.precision.startswith(("Q4", "Q5", "Q6", "int4"))


def sizes(facts: Facts, halved: bool, tiled: bool, lazy: bool) -> tuple[list[int], list[int]]:
    """Those that are worth their memory, of `SIZES` and their like; if they are made when passes
    want them, all that may be."""
    size = weighed(facts)
    alone: tuple[int, ...]
    shared: tuple[int, ...]
    wide = TILED_SIZES if tiled else SIZES
    alone, shared = wide if size >= SMALLEST_WIDE else SMALL_SIZES
    if lazy:
        alone, shared = PACKED_SIZES if size <= LARGEST_PACKED else ((), ())
        return [*alone], [*shared]
    if is_packed(facts):
        alone, shared = (1,), ()
    if size >= SMALLEST_WIDE and not halved:  # nothing makes four tokens cheaper than five then
        alone = tuple(n for n in alone if n != HALVED)
    copies = [size // 2 if tiled or (halved and n <= HALVED) else size for n in (*alone, *shared)]
    fitting = sum(total <= LARGEST_COPIES for total in accumulate(copies)) if size else 0
    return list(alone[:fitting]), list(shared[: max(fitting - len(alone), 0)])


def _is_head(graph: ov.Model) -> bool:
    """Whether it is one of a head: alone it goes on by itself, and its samples gain nothing by
    graphs for exactly so many tokens."""
    return any(GIVEN in port.get_names() for port in graph.inputs)


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
        self._least = 1
        self._spare, self._padded = spare, Counter[int]()
        self._places = memoryview(array("q", range(facts.limit + LARGEST_LEAST)))
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
        """The inputs that are pools; see `nodes.caches`."""
        return caches(self.request.inputs, prefix)

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

    def pad(self, least: int) -> None:
        """Feed each row at least so many tokens, and so many to the head if any are wanted."""
        self._least, self._shape = least, ((), (), 0)

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
    """The form for each number of tokens.

    Weights that are bfloat16 numbers are read in 16 bits where that takes less time, and in all
    forms of models whose copies would be too large. Where the CPU has matrix units, passes of more
    than `HALVED` tokens multiply them in parts (`parts`).

    Args:
        graph, facts, settings: as for `Form`; the graph is not changed. It may be halved.
        least: tokens that will be the fewest of a pass (`pad`).
        settle: None, or what to call when one was made behind passes: those for exactly so many
            tokens are made when they are wanted, and used if they compute what the open one does.
        kept: under which name it is kept whether they do; "": it is not.
        narrow: whether attention is in bfloat16; the settings say so of its caches, too.
    """

    def __init__(
        self,
        graph: ov.Model,
        facts: Facts,
        settings: dict[str, Any],
        least: int = 1,
        settle: Callable[[], None] | None = None,
        kept: str = "",
        narrow: bool = False,
    ) -> None:
        halved = is_halved(graph)
        large = halved and weighed(facts) > LARGEST_COPIES
        tiled = halved and facts.precision == "float32" and has_matrix_units()
        # bfloat16 products read them as they are, whatever the tokens.
        only_halves = large or not halved or facts.precision == "bfloat16"

        spare = NEW_SIZE // max(facts.weights, 1) if settle or _is_head(graph) else 0

        @cache
        def widened() -> ov.Model:
            wide = graph.clone()
            widen(wide)
            return wide

        def made(tokens: int, in_parts: bool) -> Form:
            own = (graph if only_halves or in_parts or 0 < tokens <= HALVED else widened()).clone()
            if in_parts:
                multiply_in_parts(own)
            keep_halves(own)
            if narrow:
                narrow_attention(own)
            if least > 1 and tokens not in alone:
                pad_attention(own)
            return Form(own, facts, settings, tokens, spare=0 if tokens else spare)

        def compiled(sizes: Sequence[int]) -> list[Form]:
            if not only_halves:
                widened()  # once, not in every thread
            return _compiled(lambda n: made(n, tiled and n > HALVED), sizes)

        alone, shared = sizes(facts, halved, tiled, bool(settle))
        alone = [n for n in alone if n >= least and not _is_head(graph)]
        self._later = partial(compiled, shared) if shared and not settle else None  # has the graph
        self._pools: dict[str, list[ov.Tensor]] = {}
        self._tell: Tell | None = None
        self._joins = weighed(facts) >= SMALLEST_JOINED
        self._kept, self.least = kept, 1
        self._prepare_wants(facts, *((alone, shared) if settle else ((), ())))
        one = partial(made, in_parts=False)
        self._make = partial(_prepared, one, least, settle) if settle else None
        self.open, *self._exact = compiled([0, *(() if settle else alone)])
        self._wide: Form | None = None
        if large and tiled and weighed(facts) // 2 <= LARGEST_SECOND:
            with suppress(RuntimeError, MemoryError):
                self._wide = made(0, True)
        self.most_split = MOST_SPLIT if large and not self._wide else 0
        """Tokens up to which a pass is better made of several of `HALVED`."""
        self._order()

    def _prepare_wants(self, facts: Facts, alone: Sequence[int], shared: Sequence[int]) -> None:
        """Of forms that are made when passes want them: `alone` are made by `finish`, too."""
        self._text = (texts(facts.vocab_size, facts.limit)[1] * 2)[: facts.limit]
        self._first = set(alone)
        self._wants = (*alone, *(n for n in WIDER if n in shared)), shared
        """Sizes that passes of one row, and of several, may want."""
        unknown = (n for n in (*alone, *shared) if self._known(n) is not False)
        self._lacking = {n for n in unknown if n < len(self._text) - 2}
        self._room = LARGEST_PACKED // (weighed(facts) or 1)  # how many may be made
        self._wanted: Counter[int] = Counter()
        self._coming: dict[int, Future[Form]] = {}

    def fitting(self, counts: Sequence[int]) -> Form:
        """The one that takes least time for so many tokens of each row."""
        several = sum(map(bool, counts)) > 1
        tokens = sum(self.open.own(counts))
        lacking = next((n for n in self._wants[several] if n >= tokens and n in self._lacking), 0)
        there = self._there(tokens, several).tokens
        self._want(0 if 0 < there < lacking else lacking)
        return self._there(tokens, several)

    def _there(self, tokens: int, several: bool = False) -> Form:
        fitting = self._fitting[several]
        return fitting[tokens] if tokens < len(fitting) else self._wide or self.open

    def share(self) -> None:
        """Compile, once, what passes of several rows need, too: a second for the shipped
        pair."""
        if self._later:
            new, self._later = self._later(), None
            self.add(new)

    def finish(self) -> None:
        """Have all that a row alone wants most."""
        for size in list(self._coming):
            self._adopt(size)
        if new := sorted(self._lacking & self._first)[: self._left]:
            assert self._make is not None, "it is kept while one is lacking"
            forms = _compiled(self._make, new)
            self._lacking -= {*new}
            self.add(forms)
        if self._joins and self._wanted[0] < WANTED:
            self._wanted[0] = WANTED
            join_pages(rests=0)

    @property
    def finished(self) -> bool:
        return self._lacking.isdisjoint(self._first)

    @property
    def _left(self) -> int:
        """How many more may be made."""
        return max(self._room - len(self._exact) - len(self._coming), 0)

    def _want(self, size: int) -> None:
        """Count a pass that one for so many tokens would take, 0 if none is lacking; make it, and
        use it when it is there. Behind passes that lack none memory is joined."""
        if (coming := self._coming.get(size)) is not None:
            if coming.done():
                self._adopt(size)
            return
        self._wanted[size] += 1
        if self._wanted[size] == WANTED and size and self._make is not None:
            if self._left:
                self._coming[size] = BEHIND.submit(self._make, size)
        elif self._wanted[size] == WANTED and self._joins:
            threading.Thread(target=join_pages, name="pages", daemon=True).start()

    def _adopt(self, size: int) -> None:
        coming = self._coming.pop(size)
        self._lacking.discard(size)
        self._wanted[0] = 0  # its memory is not joined
        with suppress(RuntimeError, MemoryError):
            self.add([coming.result()])

    def add(self, new: Sequence[Form]) -> None:
        """Let these read and write what all do."""
        for form in new:
            form.tell = self._tell
            form.pad(self.least)
            if self._make is not None and not self._proves(form):
                continue
            for prefix, pools in self._pools.items():
                form.bind(pools, prefix)
            self._exact.append(form)
        if not self._left:
            self._lacking = {*self._coming}
        self._order()
        if not self._lacking:
            self._make = None  # it holds the graph

    def _known(self, tokens: int) -> bool | None:
        """Whether one for so many computed what the open one does; None: not compared yet."""
        known = kept_json("widths", f"{self._kept}-{tokens}") if self._kept else None
        return known if isinstance(known, bool) else None

    def _proves(self, form: Form) -> bool:
        """Whether it does; it is compared once for a file on a machine."""
        if (equal := self._known(form.tokens)) is None:
            equal = _equal(self.open, form, self._text)
            for prefix, pools in self._pools.items():
                self.open.bind(pools, prefix)
            if self._kept:
                keep_json("widths", f"{self._kept}-{form.tokens}", equal)
        return equal

    def fed(self, counts: Iterable[int]) -> list[int]:
        """See `Form.fed`."""
        return self.open.fed(counts)

    def bind(self, pools: list[ov.Tensor], prefix: str = "") -> None:
        """Let all read and write these pools; see `Form.bind`."""
        self._pools[prefix] = pools
        for form in self._all():
            form.bind(pools, prefix)

    def pad(self, least: int) -> None:
        """See `Form.pad`."""
        self.least = least
        self._exact = [form for form in self._exact if form.tokens >= least]
        for form in self._all():
            form.pad(least)
        self._order()

    def tell(self, tell: Tell) -> None:
        """Let all call this; see `Form.tell`."""
        self._tell = tell
        for form in self._all():
            form.tell = tell

    def _all(self) -> list[Form]:
        return [self.open, *self._exact, *([self._wide] if self._wide else [])]

    def _order(self) -> None:
        exact = [form for form in self._exact if not form.ahead]
        exact.sort(key=lambda form: form.tokens, reverse=True)
        alike = [form for form in exact if form.pads_attention is self.open.pads_attention]
        halved = HALVED if self._wide else -1
        self._fitting = []  # of a row alone, and of several
        for forms in (exact, alike):
            fitting = [self.open] * (1 + max([halved, *(form.tokens for form in forms)]))
            for form in forms:  # padding costs less than open shapes between two weights
                fitting[1 : form.tokens + 1] = [form] * form.tokens
            self._fitting.append(fitting)
        alone = range(1, len(self._fitting[False]))
        last = {n for n in alone if self._there(n + 1) is not self._there(n)}
        parts = TILES if self._wide else range(HALVED, self.most_split + 1, HALVED)
        levels = sorted(last.union(parts, self._lacking & self._first))
        self.levels = tuple(levels) if levels and levels[-1] > self.least else ()
        """Tokens up to which a pass takes as long as one of so many."""


def _give_way() -> None:
    """Let this thread run where no other wants to."""
    with suppress(OSError, AttributeError):  # other systems know niceness of processes alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


BEHIND = ThreadPoolExecutor(1, "forms", _give_way)  # makes graphs while passes are taken


def _prepared(
    make: Callable[[int], Form], least: int, settle: Callable[[], None], tokens: int
) -> Form:
    """One that has taken its first pass, which packs weights; `RuntimeError` if the process ends
    meanwhile."""
    if not threading.main_thread().is_alive():
        raise RuntimeError("nobody will use it")
    form = make(tokens)
    form.pad(least)
    pool = Pool(form.ports(), 2, form.bind)
    every = [[0] * tokens], [tokens], [tokens]
    form.run([0], *every, [[0, 1]], -2)  # a version that tables never have
    del pool
    settle()
    return form


def _equal(any_number: Form, exact: Form, text: Sequence[int]) -> bool:
    """Whether both compute the same, to the last bit: of a row alone that fills the second or is a
    token shorter, and of one beside a row of one token. They are bound to another pool afterwards.
    """

    def bind(pools: list[ov.Tensor]) -> None:
        any_number.bind(pools)
        exact.bind(pools)

    Pool(any_number.ports(), 5, bind)
    begin, tables = len(text) - exact.tokens, [[0, 1, 2], [3, 4]]
    any_number.run([0, 0], [text[:begin], text[:1]], [0, 0], [begin, 2], tables, -3)

    def seen(form: Form, counts: list[int]) -> NDArray[np.float32]:
        pieces = [text[begin : begin + counts[0]], text[1 : 1 + counts[1]]]
        ends = [len(text), 1 + exact.tokens]
        return form.run([begin, 1], pieces, counts, ends, tables, -3)

    every = [exact.tokens, 0], [exact.tokens - 1, 0], [exact.tokens - 2, 1]
    return all(np.array_equal(seen(any_number, n), seen(exact, n)) for n in every)


def _compiled(make: Callable[[int], Form], sizes: Sequence[int]) -> list[Form]:
    """Those for so many tokens each; but for 0 only those that can be had."""
    if list(sizes) == [0]:  # another thread leaves its heap in pieces: SmolLM2 takes 40 MB more
        return [make(0)]
    with ThreadPoolExecutor() as pool:  # most of compiling runs on one thread
        made = [pool.submit(make, tokens) for tokens in sizes]
    return [
        form.result()
        for tokens, form in zip(sizes, made, strict=True)
        if not tokens or not isinstance(form.exception(), (RuntimeError, MemoryError))
    ]


def spans(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Where pieces of so many entries begin and end, one after the other."""
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))
