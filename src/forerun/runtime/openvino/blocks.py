"""Which blocks of the pool belong to which row."""

from __future__ import annotations

from collections.abc import Sequence


class Blocks:
    """A free list and a table of blocks per row.

    A row keeps its blocks when it is rolled back: it is about to need them again. They are given
    back when the row leaves.

    Args:
        size: tokens per block.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.total = 0
        """Blocks there are."""
        self.tables: list[list[int]] = []
        self._free: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, total: int) -> None:
        """Have `total` blocks; never fewer than before."""
        self._free.extend(range(total - 1, self.total - 1, -1))
        self.total = max(total, self.total)

    def missing(self, ends: Sequence[int]) -> int:
        """Blocks beyond the free ones that rows of `ends` tokens need."""
        need = 0
        for row, end in enumerate(ends):
            held = len(self.tables[row]) if row < len(self.tables) else 0
            need += max(0, -(-end // self.size) - held)
        return need - len(self._free)

    def cover(self, ends: Sequence[int]) -> bool:
        """Give each row blocks for `ends` tokens; whether any table changed.

        Rows that are new get a table; there must be enough free blocks.
        """
        changed = len(ends) > len(self.tables)
        while len(ends) > len(self.tables):
            self.tables.append([])
        for table, end in zip(self.tables, ends, strict=False):
            while len(table) * self.size < end:
                table.append(self._free.pop())
                changed = True
        return changed

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the blocks of the others are free.

        Of a row that is kept twice, the first has its blocks and the others have none.
        """
        left = dict(enumerate(self.tables))
        self.tables = [left.pop(row, []) for row in rows]
        for table in left.values():
            self._free.extend(table)
