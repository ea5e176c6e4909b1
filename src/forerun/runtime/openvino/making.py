"""What makes a model's forms: some at once, others behind the passes that want them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.cache import keep_json, kept_json
from forerun.runtime.base import Facts
from forerun.runtime.openvino.forms import HALVED, Form, Forms
from forerun.runtime.openvino.nodes import GIVEN, narrow_attention, pad_attention
from forerun.runtime.openvino.parts import has_matrix_units, multiply_in_parts
from forerun.runtime.openvino.pool import Pool
from forerun.runtime.openvino.store import join_pages
from forerun.runtime.openvino.weights import halves, keep_halves, widen
from forerun.runtime.probe import texts

SIZES = (1, 4, 5, 8), (12, 16)
"""Tokens that graphs are compiled for: of a row alone, and when rows first share passes."""
TILES = 5, 10, 16
"""Tokens up to which a pass in parts fills one, two, three tiles of matrix units, of 16 rows: three
rows a token."""
TILED_SIZES = (1, 4, 10, 16), (24, 32, 48)  # those of a model whose weights matrix units multiply
SMALL_SIZES = (1, 2), (4, 8, 12, 16)
"""Those of a small model: it drafts, a token of each row at a time."""
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
    size, wide = weighed(facts), TILED_SIZES if tiled else SIZES
    alone, shared = map(list, wide if size >= SMALLEST_WIDE else SMALL_SIZES)
    if lazy:
        return ([*PACKED_SIZES[0]], [*PACKED_SIZES[1]]) if size <= LARGEST_PACKED else ([], [])
    if is_packed(facts):
        alone, shared = [1], []
    if size >= SMALLEST_WIDE and not halved:  # nothing makes four tokens cheaper than five then
        alone = [n for n in alone if n != HALVED]
    copies = [size // 2 if tiled or (halved and n <= HALVED) else size for n in (*alone, *shared)]
    fitting = sum(total <= LARGEST_COPIES for total in accumulate(copies)) if size else 0
    return alone[:fitting], shared[: max(fitting - len(alone), 0)]


class Maker:
    """Makes the forms of a graph.

    Weights that are bfloat16 numbers are read in 16 bits where that takes less time, and in all
    forms of models whose copies would be too large. Where the CPU has matrix units, passes of more
    than `HALVED` tokens multiply them in parts (`parts`).

    Args:
        graph, facts, settings, least: as for `Form`; the graph is not changed. It may be halved.
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
        size, halved = weighed(facts), bool([*halves(graph)])
        large = halved and size > LARGEST_COPIES
        tiled = halved and facts.precision == "float32" and has_matrix_units()
        is_head = any(GIVEN in port.get_names() for port in graph.inputs)
        spare = NEW_SIZE // max(facts.weights, 1) if settle or is_head else 0
        alone, shared = sizes(facts, halved, tiled, bool(settle))
        # Of a head a row alone goes on by itself, and samples gain nothing by other graphs.
        alone = [] if is_head else [n for n in alone if n >= least]
        widened = graph
        # bfloat16 products read halves as they are, whatever the tokens.
        if halved and not large and facts.precision != "bfloat16":
            widened = graph.clone()
            widen(widened)

        def made(tokens: int, wide: bool = False) -> Form:
            in_parts = wide or (tiled and tokens > HALVED)
            own = (graph if in_parts or 0 < tokens <= HALVED else widened).clone()
            if in_parts:
                multiply_in_parts(own)
            keep_halves(own)
            if narrow:
                narrow_attention(own)
            if least > 1 and tokens not in alone:
                pad_attention(own)
            spared = 0 if tokens else spare
            return Form(own, facts, settings, tokens, spare=spared, least=least)

        there, wide = _compiled(made, [0, *(() if settle else alone)]), None
        if large and tiled and size // 2 <= LARGEST_SECOND:
            with suppress(RuntimeError, MemoryError):
                wide = made(0, wide=True)
        self.forms = Forms(there, wide)
        self.most_split = MOST_SPLIT if large and not wide else 0
        """Tokens up to which a pass is better made of several of `HALVED`."""
        self._later = partial(_compiled, made, shared) if shared and not settle else None
        self._make = partial(_prepared, made, settle) if settle else None  # both have the graph
        self._joins, self._least, self._kept = size >= SMALLEST_JOINED, least, kept
        self._room = LARGEST_PACKED // (size or 1)  # how many may be made behind passes
        self._text = (texts(facts.vocab_size, facts.limit)[1] * 2)[: facts.limit]
        self._wants = (*alone, *WIDER), shared
        """Sizes that passes of one row, and of several, may want."""
        self._first = {*alone} if settle else set()  # those that `finish` makes, too
        self._lacking = {
            n
            for n in (*alone, *shared)
            if settle and n < len(self._text) - 2 and self._known(n) is not False
        }
        self._wanted: Counter[int] = Counter()
        self._coming: dict[int, Future[Form]] = {}

    @property
    def levels(self) -> tuple[int, ...]:
        """Tokens up to which a pass takes as long as one of so many."""
        levels = self._levels(False, self._lacking & self._first)
        return levels if levels and levels[-1] > self._least else ()

    @property
    def shared_levels(self) -> tuple[int, ...]:
        """Those of several rows together."""
        return self._levels(True, self._lacking.intersection(self._wants[True]))

    def _levels(self, several: bool, coming: set[int]) -> tuple[int, ...]:
        parts = TILES if self.forms.wide else range(HALVED, self.most_split + 1, HALVED)
        return tuple(sorted(self.forms.levels(several).union(parts, coming)))

    def fitting(self, counts: Sequence[int]) -> Form:
        """The form that takes least time for so many tokens of each row; it counts which would."""
        several = sum(map(bool, counts)) > 1
        tokens = sum(self.forms.open.own(counts))
        lacking = next((n for n in self._wants[several] if n >= tokens and n in self._lacking), 0)
        there = self.forms.fitting(tokens, several).tokens
        self._want(0 if 0 < there < lacking else lacking)
        return self.forms.fitting(tokens, several)

    def share(self) -> None:
        """Compile, once, what passes of several rows need, too: a second for the shipped
        pair."""
        if self._later:
            new, self._later = self._later(), None
            self.forms.add(new)

    def finish(self) -> None:
        """Have all that a row alone wants most."""
        for size in list(self._coming):
            self._adopt(size)
        if new := sorted(self._lacking & self._first)[: self._left]:
            assert self._make is not None, "it is kept while one is lacking"
            made = _compiled(self._make, new)
            self._lacking -= {*new}
            self._add(made)
        if self._joins and self._wanted[0] < WANTED:
            self._wanted[0] = WANTED
            join_pages(rests=0)

    @property
    def finished(self) -> bool:
        return self._lacking.isdisjoint(self._first)

    @property
    def _left(self) -> int:
        """How many more may be made."""
        return max(self._room - len(self.forms.exact) - len(self._coming), 0)

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
            self._add([coming.result()])

    def _add(self, new: Sequence[Form]) -> None:
        """Use those that compute what the open one does."""
        self.forms.add([form for form in new if self._proves(form)])
        if not self._left:
            self._lacking = {*self._coming}
        if not self._lacking:
            self._make = None  # it holds the graph

    def _known(self, tokens: int) -> bool | None:
        """Whether one for so many computed what the open one does; None: not compared yet."""
        known = kept_json("widths", f"{self._kept}-{tokens}") if self._kept else None
        return known if isinstance(known, bool) else None

    def _proves(self, form: Form) -> bool:
        """Whether it does; it is compared once for a file on a machine."""
        if (equal := self._known(form.tokens)) is None:
            equal = _equal(self.forms.open, form, self._text)
            if self._kept:
                keep_json("widths", f"{self._kept}-{form.tokens}", equal)
        return equal


def _give_way() -> None:
    """Let this thread run where no other wants to."""
    with suppress(OSError, AttributeError):  # other systems know niceness of processes alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


BEHIND = ThreadPoolExecutor(1, "forms", _give_way)  # makes graphs while passes are taken


def _prepared(make: Callable[[int], Form], settle: Callable[[], None], tokens: int) -> Form:
    """One that has taken its first pass, which packs weights; `RuntimeError` if the process ends
    meanwhile."""
    if not threading.main_thread().is_alive():
        raise RuntimeError("nobody will use it")
    form = make(tokens)
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
