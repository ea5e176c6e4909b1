"""Texts that were read before: kept as copies of cache columns, so that they are not read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.engine.row import Row
from forerun.engine.text import common
from forerun.errors import SettingError, require
from forerun.runtime.base import Columns, Rows

LEAST = 32  # tokens worth a copy: fewer are read at next to no cost with the rest


@dataclass(eq=False)
class _Node:
    """Tokens that follow those of its parent, and their columns in each cache."""

    tokens: list[int]
    parent: _Node | None
    columns: dict[Rows, Columns] = field(default_factory=dict)  # of the first tokens read there
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token

    @property
    def nbytes(self) -> int:
        return sum(columns.nbytes for columns in self.columns.values())


class Prefixes:
    """A trie of texts whose rows have left, under a budget of bytes.

    What texts have in common is kept once. A text that joins takes over the longest beginning that
    is here, in all caches that have it: target and draft alike. What was used longest ago goes
    first. Columns depend on nothing but the tokens and the model, so neither sampling nor
    controllers nor rules matter to them.

    Args:
        budget: bytes, ≥ 0. With 0 nothing is kept, but texts that run at the same time still read
            a common beginning once.
    """

    def __init__(self, budget: int) -> None:
        require(budget >= 0, "prefix cache", budget, "≥ 0 bytes")
        self.budget = budget
        self.nbytes = 0  # bytes held, ≤ `budget`
        self._root = _Node([], None)
        # Newest last, and every node after those below it: the first one is always a leaf.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    @classmethod
    def of(cls, budget: int, caches: Sequence[Rows]) -> Prefixes | None:
        """Prefixes of rows in these caches; None where an executor has no copies of its cache."""
        return cls(budget) if all(cache.executor.copies for cache in caches) else None

    def take(self, text: Sequence[int], row: int, caches: Sequence[Rows]) -> None:
        """Cover the beginning of a text in an empty row of each cache; its last token is left."""
        path = self._path(text[:-1])
        if sum(count for _, count in path) < LEAST:
            return
        self._touch([node for node, _ in path])
        for cache in caches:
            for node, count in path:
                columns = node.columns.get(cache)
                had = min(count, columns.count) if columns else 0
                if columns and had:
                    cache.extend(row, columns if had == columns.count else columns.part(0, had))
                if had < count:
                    break

    def put(self, text: Sequence[int], row: int, caches: Sequence[Rows]) -> None:
        """Keep what the caches hold of a row's text."""
        whole = [cache for cache in caches if not cache.begins[row]]
        held = {cache: min(cache.lengths[row], len(text)) for cache in whole}
        token_bytes = sum(cache.facts.token_bytes for cache in caches)
        most = self.budget // token_bytes if token_bytes else len(text)
        text = text[: min(held[caches[0]], most)]
        if not self.budget or len(text) < LEAST:
            return
        path, place = self._path(text), 0
        nodes = []
        for node, count in path:
            node = self._split(node, count)
            nodes.append(node)
            self._fill(node, place, row, held)
            place += count
        if place < len(text):
            parent = nodes[-1] if nodes else self._root
            leaf = parent.children[text[place]] = _Node(list(text[place:]), parent)
            nodes.append(leaf)
            self._fill(leaf, place, row, held)
        self._touch(nodes)
        while self.nbytes > self.budget:
            node, _ = self._order.popitem(last=False)
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.tokens[0]]
            self.nbytes -= node.nbytes

    def clear(self) -> None:
        self.nbytes, self._root = 0, _Node([], None)
        self._order.clear()

    def _path(self, text: Sequence[int]) -> list[tuple[_Node, int]]:
        """Nodes along the longest common prefix, and how many tokens of each belong to it."""
        path, node, place = [], self._root, 0
        while place < len(text) and (child := node.children.get(text[place])) is not None:
            count = common(child.tokens, text[place : place + len(child.tokens)])
            path.append((child, count))
            place += count
            if count < len(child.tokens):
                break
            node = child
        return path

    def _split(self, node: _Node, count: int) -> _Node:
        """Cut a node in two, and return the upper one, of `count` tokens."""
        if count == len(node.tokens):
            return node
        assert node.parent is not None
        upper = _Node(node.tokens[:count], node.parent)
        node.parent.children[upper.tokens[0]] = upper
        self.nbytes -= node.nbytes
        for cache, columns in list(node.columns.items()):
            upper.columns[cache] = columns.part(0, min(count, columns.count))
            if columns.count > count:
                node.columns[cache] = columns.part(count, columns.count)
            else:
                del node.columns[cache]
        node.tokens, node.parent = node.tokens[count:], upper
        upper.children[node.tokens[0]] = node
        self.nbytes += upper.nbytes + node.nbytes
        return upper

    def _fill(self, node: _Node, place: int, row: int, held: dict[Rows, int]) -> None:
        """Copy a node's columns from a row that has more of them."""
        self.nbytes -= node.nbytes
        for cache, length in held.items():
            more = min(length - place, len(node.tokens))
            had = node.columns.get(cache)
            if more > (had.count if had else 0):
                node.columns[cache] = cache.copy_out(row, place, place + more)
        self.nbytes += node.nbytes

    def _touch(self, path: Sequence[_Node]) -> None:
        """These nodes, from the top down, were used."""
        for node in reversed(path):
            self._order[node] = None
            self._order.move_to_end(node)


class Reuse:
    """What an engine does not read again: its rows' part in a `Prefixes` (None: all is read), in
    caches whose first is the target's; `SettingError` if an executor has no copies of one."""

    def __init__(self, prefixes: Prefixes | None, caches: Sequence[Rows]) -> None:
        self._prefixes, self._caches = prefixes, caches
        for cache in caches if prefixes is not None else ():
            if not cache.executor.copies:
                kind = cache.facts.executor or type(cache.executor).__name__
                raise SettingError(
                    f"executor {kind!r} cannot copy its cache; leave the prefix cache off"
                )

    def join(self, rows: Sequence[Row], count: int) -> None:
        """The last `count` rows joined."""
        if self._prefixes is None:
            return
        for i in range(len(rows) - count, len(rows)):
            if not rows[i].reads_all:
                self._prefixes.take(rows[i].context, i, self._caches)
                rows[i].cached = self._caches[0].lengths[i]

    def leave(self, row: Row, i: int) -> None:
        if self._prefixes is None or row.request.source is not None:
            return
        try:
            self._prefixes.put(row.context, i, self._caches)
        except Exception:  # no memory, or an executor's: the row has its text, copies are spare
            self._prefixes.clear()

    def fork(self, rows: Sequence[Row]) -> set[int]:
        """Let rows at their beginning take over what another row has read of the same text.

        Returns:
            Rows that had better wait, for an earlier one is about to read what they need.
        """
        if self._prefixes is None or len(rows) < 2:
            return set()
        waiting = set()
        for i, row in enumerate(rows):
            if len(row.rounds) > 1 or row.prompt <= LEAST or row.reads_all:
                continue
            for cache in self._caches:
                had = cache.begins[i] + cache.lengths[i]
                ready, leader, coming = self._common(rows, i, cache)
                if cache is self._caches[0] and not row.rounds:
                    if coming > ready and coming - had >= max(LEAST, (row.prompt - had) // 2):
                        waiting.add(i)
                        break
                    row.cached += max(ready - had, 0) if ready - had >= LEAST else 0
                if ready - had >= LEAST:
                    cache.extend(i, cache.copy_out(leader, had, ready))
        return waiting

    def _common(self, rows: Sequence[Row], i: int, cache: Rows) -> tuple[int, int, int]:
        """The most tokens of row i's text that another row has read, which row, and the most that
        are in the prompt of an earlier one."""
        text, best, coming = rows[i].context[:-1], (0, 0), 0
        for j, other in enumerate(rows):
            if j == i or other.request.source is not None or other.context[0] != text[0]:
                continue
            count = common(other.context, text)
            best = max(best, (0 if cache.begins[j] else min(count, cache.lengths[j]), j))
            if j < i:
                coming = max(coming, min(count, other.prompt))
        return *best, coming
