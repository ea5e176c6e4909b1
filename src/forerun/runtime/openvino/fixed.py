"""A few tokens of one row, by graphs whose shapes are all known when they are compiled.

In a graph of open shapes every node asks before it runs whether its shapes have changed. Between
the weights of a pass, which sweep the caches, that costs some 3 µs a node: 9 to 17 % of a pass of
the shipped target. A row that decodes by itself, every draft step of one row, and the verification
of a few drafted tokens need none of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.runtime.base import Facts
from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.nodes import SOURCE, SOURCE_ROW, caches
from forerun.runtime.openvino.request import Request

WIDTHS = (1, 5, 8)
"""Tokens a graph is compiled for. Fewer are padded: between two weights that sweep the caches, a
token more costs less than open shapes do."""
SMALL_WIDTHS = (1, 2)
"""Those of a small model: a draft whose tokens were all kept has two to read."""
LARGEST_COPIES = 256 << 20
"""Bytes of weights up to which such graphs are held: each has its own copy, and the larger they are
the less it matters what is between them."""
SMALLEST_WIDE = 24 << 20
"""Bytes of weights from which a model is not small."""
SOURCE_BLOCKS = 8
"""Blocks of a source; longer ones go through open shapes."""


def widths(facts: Facts) -> tuple[int, ...]:
    """The `WIDTHS` that are worth their memory."""
    size = facts.weights * {"float32": 4, "int8": 1}.get(facts.precision, 0)  # bf16: not tried
    wanted = WIDTHS if size >= SMALLEST_WIDE else SMALL_WIDTHS
    return wanted[: LARGEST_COPIES // size] if size else ()


class Fixed:
    """Passes of up to `tokens` tokens of one row.

    Args:
        graph: with paged-attention nodes and open shapes; it is changed.
        tokens: it is compiled for.
        facts: of the model.
        settings: of the plug-in.
        blocks: of the pool, at least so many; only those can be read.

    Raises:
        RuntimeError: this graph cannot be had with fixed shapes.
    """

    def __init__(
        self, graph: ov.Model, tokens: int, facts: Facts, settings: dict[str, Any], blocks: int
    ) -> None:
        shapes = _shapes(graph.inputs, tokens, blocks)
        graph.reshape({name: ov.PartialShape(shape) for name, shape in shapes.items()})
        compiled = core().compile_model(graph, "CPU", settings)
        self.tokens = tokens
        self.blocks = blocks
        self.request = Request(compiled, facts.vocab_size)
        self.request.input("subsequence_begins", 2)[1] = tokens
        self.request.input("wanted", tokens)[:] = array("q", range(tokens))
        self._ends = self.request.input("block_indices_begins", 2)
        self._table = self.request.input("block_indices", blocks)
        self._past = self.request.input("past_lens", 1)
        self._ids = self.request.input("input_ids", tokens)
        self._positions = self.request.input("position_ids", tokens)
        self._logits = self.request.output(tokens)

    def bind(self, pools: Iterable[ov.Tensor], prefix: str = "") -> None:
        """Read and write these pools, in the order of the graph's inputs (`nodes.caches`)."""
        for port, pool in zip(caches(self.request.inputs, prefix), pools, strict=True):
            end = [self.blocks, *list(pool.get_shape())[1:]]
            part = ov.Tensor(pool, ov.Coordinate([0] * len(end)), ov.Coordinate(end))
            self.request.set(port, part)

    def holds(self, table: Sequence[int]) -> bool:
        """Whether a row of these blocks can be read."""
        return len(table) <= self.blocks and max(table) < self.blocks

    def run(
        self, piece: Sequence[int], start: int, wanted: int, table: Sequence[int]
    ) -> NDArray[np.float32]:
        """Feed a row that holds `start` tokens up to `tokens` more.

        What is padded lies behind them in the row's blocks, which must have room for it, and is
        overwritten by what comes next. `(wanted, V)`, the next pass overwrites it.
        """
        end = start + self.tokens
        self._ids[: len(piece)] = array("q", piece)
        self._positions[:] = array("q", range(start, end))
        self._past[0] = start
        self._table[: len(table)] = array("i", table)
        self._ends[1] = len(table)
        self.request.longest[0] = end
        self.request.infer()
        return self._logits[len(piece) - wanted : len(piece)]


def _shapes(inputs: Iterable[Any], tokens: int, blocks: int) -> dict[str, list[int]]:
    """Of the inputs there are, for `tokens` tokens of one row and so many blocks of the pools."""
    rows = {"subsequence_begins": [2], "block_indices": [blocks], "block_indices_begins": [2]}
    every: dict[str, list[int]] = {name: [tokens, 1] for name in ("input_ids", "position_ids")}
    every |= rows | {"wanted": [tokens], SOURCE_ROW: [tokens], f"{SOURCE}past_lens": [tokens]}
    every |= {f"{SOURCE}{name}": [tokens + 1] for name, size in rows.items() if size == [2]}
    every[f"{SOURCE}block_indices"] = [tokens * SOURCE_BLOCKS]
    shapes = {}
    for port in inputs:
        name, given = port.get_any_name(), list(port.get_partial_shape())
        known = [every[n] for n in port.get_names() if n in every]
        if not known and given:  # the pools, and what the sources' last tokens have
            first = blocks if "_cache." in name else 1
            known = [[first, *(size.get_length() for size in given[1:])]]
        shapes[name] = known[0] if known else []
    return shapes


def compiled_forms(
    graph: ov.Model, facts: Facts, settings: dict[str, Any], blocks: int
) -> tuple[ov.CompiledModel, list[Fixed]]:
    """The graph with open shapes, and those with fixed ones that can be had and pay, narrow first.

    They are compiled at the same time: most of it runs on one thread.
    """
    with ThreadPoolExecutor() as pool:
        fixed = [
            pool.submit(Fixed, graph.clone(), tokens, facts, settings, blocks)
            for tokens in widths(facts)
        ]
        compiled = core().compile_model(graph, "CPU", settings)
    return compiled, [x.result() for x in fixed if not isinstance(x.exception(), RuntimeError)]
