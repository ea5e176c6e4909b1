"""Keys and values of rows, in blocks of memory that a compiled graph is given."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from forerun.errors import ModelError
from forerun.runtime.openvino.nodes import BLOCK

LARGEST_RESERVE = 1 << 30  # bytes of cache that are asked for before they are needed


class Pool:
    """Rows' keys and values in blocks of `BLOCK` tokens; the pool doubles when it runs out. A row
    keeps its blocks when it is rolled back, as it is about to need them again, and gives them back
    when it leaves.

    Args:
        ports: inputs of the graph that are its caches.
        blocks: at first.
        bind: called with their tensors, in that order, whenever these are others.
    """

    def __init__(
        self, ports: Sequence[Any], blocks: int, bind: Callable[[list[ov.Tensor]], None]
    ) -> None:
        self._ports, self._bind = ports, bind
        self._tensors: list[ov.Tensor] = []
        self.tables: list[list[int]] = []  # the blocks of each row, in order
        self.total = 0  # blocks
        self._free: list[int] = []
        self.grow(blocks)

    @property
    def nbytes(self) -> int:
        return sum(tensor.get_byte_size() for tensor in self._tensors)

    def reserve(self, rows: int, columns: int) -> None:
        most = LARGEST_RESERVE * self.total // self.nbytes
        self.grow(min(rows * -(-columns // BLOCK), most))

    def cover(self, ends: Sequence[int]) -> bool:
        """Have blocks for rows of so many tokens, and a table for new ones; whether any changed."""
        held = [*map(len, self.tables), *[0] * (len(ends) - len(self.tables))]
        lacking = [max(-(-end // BLOCK) - n, 0) for end, n in zip(ends, held, strict=False)]
        if (more := sum(lacking) - len(self._free)) > 0:
            self.grow(self.total + max(more, self.total))
        changed = len(ends) > len(self.tables) or any(lacking)
        self.tables += [[] for _ in ends[len(self.tables) :]]
        for table, count in zip(self.tables, lacking, strict=False):
            table += [self._free.pop() for _ in range(count)]
        return changed

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """As `Executor.keep`. Of a row that is kept twice the first has its blocks, the others have
        copies."""
        left = dict(enumerate(self.tables))
        self.tables = [left.pop(row, []) for row in rows]
        for table in left.values():
            self._free.extend(table)
        twice = [at for at, row in enumerate(rows) if row in rows[:at]]
        if not twice:
            return
        self.cover([n if at in twice else 0 for at, n in enumerate(lengths)])
        for tensor in self._tensors:
            blocks = _bytes(tensor).reshape(self.total, -1)
            for at in twice:
                source, copy = self.tables[rows.index(rows[at])], self.tables[at]
                blocks[copy] = blocks[source[: len(copy)]]

    def read(self, row: int, first: int, last: int) -> tuple[NDArray[np.uint8], ...]:
        """A copy of what a row's tokens `first` to `last` have, as bytes, per tensor."""
        blocks, places = self._places(row, first, last)
        pools = map(_blocks_of, self._tensors)
        return tuple(pool[blocks, :, places].transpose(1, 0, 2).copy() for pool in pools)

    def write(self, row: int, first: int, states: Sequence[NDArray[np.uint8]]) -> bool:
        """Let a row have `(heads, tokens, bytes)` per tensor from its token `first` on; whether any
        row has new blocks."""
        rows, last = max(row + 1, len(self.tables)), first + states[0].shape[1]
        changed = self.cover([last if at == row else 0 for at in range(rows)])
        blocks, places = self._places(row, first, last)
        for tensor, new in zip(self._tensors, states, strict=True):
            _blocks_of(tensor)[blocks, :, places] = new.transpose(1, 0, 2)
        return changed

    def _places(self, row: int, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Blocks of a row's tokens `first` to `last`, and their places there."""
        blocks, places = np.divmod(np.arange(first, last), BLOCK)
        return np.array(self.tables[row], dtype=np.intp)[blocks], places

    def move(self, row: int, source: int, place: int) -> None:
        (a, i), (b, j) = divmod(source, BLOCK), divmod(place, BLOCK)
        table = self.tables[row]
        for tensor in self._tensors:
            pool = tensor.data
            pool[table[b], :, j] = pool[table[a], :, i]

    def grow(self, blocks: int) -> None:
        """Have at least so many blocks; contents are kept. `ModelError` without memory for them."""
        if blocks <= self.total:
            return
        tensors = []
        try:
            for port in self._ports:
                sizes = [size.get_length() for size in list(port.get_partial_shape())[1:]]
                tensors.append(ov.Tensor(port.get_element_type(), ov.Shape([blocks, *sizes])))
        except (RuntimeError, MemoryError) as error:
            raise ModelError(
                f"no memory for a cache of {blocks * BLOCK} tokens; use a smaller batch"
            ) from error
        for old, new in zip(self._tensors, tensors, strict=False):  # none are old at first
            _bytes(new)[: old.get_byte_size()] = _bytes(old)
        self._bind(tensors)
        self._tensors = tensors
        self._free.extend(range(blocks - 1, self.total - 1, -1))
        self.total = blocks


def _bytes(tensor: ov.Tensor) -> NDArray[np.uint8]:
    return tensor.data.view(np.uint8).reshape(-1)


def _blocks_of(pool: ov.Tensor) -> NDArray[np.uint8]:
    """A pool as bytes, `(blocks, heads, BLOCK, width)`."""
    blocks, heads, size, _ = pool.get_shape()
    return _bytes(pool).reshape(blocks, heads, size, -1)
