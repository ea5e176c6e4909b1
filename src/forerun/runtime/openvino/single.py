"""One token of one row, by a graph whose shapes are all known when it is compiled.

In a graph of open shapes every node asks before it runs whether its shapes have changed. Between
the weights of a pass, which sweep the caches, that costs some 3 µs a node: 9 to 17 % of a pass of
the shipped target. A row that decodes by itself, and every draft step of one row, needs none of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.runtime.base import Facts
from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.request import Request

LARGEST_TWICE = 256 << 20
"""Bytes of weights up to which there are two graphs: each has its own copy of them, and the larger
they are the less it matters what is between them."""


def pays(facts: Facts) -> bool:
    """Whether a second copy of the weights is worth its memory."""
    width = {"float32": 4, "int8": 1}.get(facts.precision, 0)  # bf16: not tried
    return 0 < facts.weights * width <= LARGEST_TWICE


class Single:
    """Passes of one token of one row.

    Args:
        graph: with paged-attention nodes and open shapes; it is changed.
        facts: of the model.
        settings: of the plug-in.
        blocks: of the pool, at least so many; only those can be read.

    Raises:
        RuntimeError: this graph cannot be had with fixed shapes.
    """

    def __init__(
        self, graph: ov.Model, facts: Facts, settings: dict[str, Any], blocks: int
    ) -> None:
        shapes = {"subsequence_begins": [2], "block_indices": [blocks], "block_indices_begins": [2]}
        for port in graph.inputs:
            name, shape = port.get_any_name(), port.get_partial_shape()
            if "_cache." in name:
                shapes[name] = [blocks, *(size.get_length() for size in list(shape)[1:])]
            elif name not in shapes:
                shapes[name] = [1] * len(shape)
        graph.reshape({name: ov.PartialShape(shape) for name, shape in shapes.items()})
        compiled = core().compile_model(graph, "CPU", settings)
        self._blocks = blocks
        self._request = Request(compiled, facts.vocab_size)
        self._pools = [port for port in compiled.inputs if "_cache." in port.get_any_name()]
        self._request.input("subsequence_begins", 2)[1] = 1
        self._request.input("wanted", 1)
        self._ends = self._request.input("block_indices_begins", 2)
        self._table = self._request.input("block_indices", blocks)
        self._past = self._request.input("past_lens", 1)
        self._id = self._request.input("input_ids", 1)
        self._position = self._request.input("position_ids", 1)
        self._logits = self._request.output(1)

    def bind(self, pools: Iterable[ov.Tensor]) -> None:
        """Read and write these pools, in the order of the graph's inputs."""
        for port, pool in zip(self._pools, pools, strict=True):
            end = [self._blocks, *list(pool.get_shape())[1:]]
            part = ov.Tensor(pool, ov.Coordinate([0] * len(end)), ov.Coordinate(end))
            self._request.set(port, part)

    def holds(self, table: Sequence[int]) -> bool:
        """Whether a row of these blocks can be read."""
        return len(table) <= self._blocks and max(table) < self._blocks

    def run(self, token: int, start: int, table: Sequence[int]) -> NDArray[np.float32]:
        """Feed a row that holds `start` tokens one more; `(1, V)`, the next pass overwrites it."""
        self._id[0], self._position[0], self._past[0] = token, start, start
        self._table[: len(table)] = array("i", table)
        self._ends[1] = len(table)
        self._request.longest[0] = start + 1
        self._request.infer()
        return self._logits
