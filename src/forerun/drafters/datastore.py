"""Texts to draft from: token ids, and where every run of them occurs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ModelError, require

SORTED = 32  # tokens by which occurrences are sorted: the longest run that can be looked up
SCHEMA = "1"
_END = np.uint32(0xFFFFFFFF)  # between two texts; no token


class Datastore:
    """Token ids of many texts with their suffix array; made by `build` or `load`.

    A run of tokens is found by bisection, whatever the size: its occurrences are neighbours in the
    array.
    """

    def __init__(self, tokens: NDArray[np.uint32], order: NDArray[np.uint32]) -> None:
        self.tokens, self._order = tokens, order
        # Bytes compare like the tokens, most significant first.
        self._bytes = tokens.astype(">u4").tobytes()

    @classmethod
    def build(cls, texts: Iterable[Sequence[int]]) -> Datastore:
        """From token ids of texts; takes about `5·n·log n` steps for n tokens.

        Raises:
            SettingError: there are no tokens.
        """
        parts = [np.array([*text, _END], dtype=np.uint32) for text in texts if len(text)]
        require(bool(parts), "texts", 0, "at least one token")
        tokens = np.concatenate(parts)
        count = len(tokens)
        rank, known = tokens.astype(np.int64), 1
        while known < SORTED:  # prefix doubling
            after = np.full(count, -1, dtype=np.int64)
            after[:-known] = rank[known:]
            order = np.lexsort((after, rank))
            pairs = np.stack([rank[order], after[order]])
            rank[order] = np.concatenate([[0], (pairs[:, 1:] != pairs[:, :-1]).any(0).cumsum()])
            known *= 2
        return cls(tokens, np.argsort(rank, kind="stable").astype(np.uint32))

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """From a file that `save` wrote.

        Raises:
            ModelError: it is none, or cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "np") as file:
                if (file.metadata() or {}).get("datastore") != SCHEMA:
                    raise KeyError
                return cls(file.get_tensor("tokens"), file.get_tensor("order"))
        except (OSError, SafetensorError, KeyError) as error:
            raise ModelError(
                f"{path} is no datastore; make one with forerun build-datastore"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file; `OSError` if that fails."""
        from safetensors.numpy import save

        kept = {"tokens": self.tokens, "order": self._order}
        Path(path).write_bytes(save(kept, {"datastore": SCHEMA}))

    @property
    def highest(self) -> int:
        return int(self.tokens[self.tokens != _END].max())

    def find(self, run: Sequence[int]) -> NDArray[np.int64]:
        """Places right after the occurrences of a run of 1 to `SORTED` tokens."""
        key, size = np.array(run, dtype=">u4").tobytes(), 4 * len(run)

        def begin(place: int) -> bytes:
            return self._bytes[4 * place : 4 * place + size]

        order: list[int] = self._order  # type: ignore[assignment]
        low = bisect_left(order, key, key=begin)
        high = bisect_right(order, key, lo=low, key=begin)
        return self._order[low:high].astype(np.int64) + len(run)

    def follow(self, places: NDArray[np.int64], most: int) -> list[int]:
        """The most frequent token after these places, then after those that go on with it, and so
        on; ends where texts do."""
        out: list[int] = []
        while len(out) < most:
            following = self.tokens[places]
            places, following = places[following != _END], following[following != _END]
            if not len(places):
                break
            values, counts = np.unique(following, return_counts=True)
            token = values[counts.argmax()]
            out.append(int(token))
            places = places[following == token] + 1
        return out
