"""Texts that an output must not hold, and stop strings that are special tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.engine.text import TokenBytes, special_tokens, token_bytes
from forerun.errors import SettingError


class Bans:
    """Which tokens would complete a text that the output must not hold, whatever its tokens."""

    def __init__(self, words: Sequence[str], known: TokenBytes, vocab_size: int) -> None:
        self._known, self._tokens = known, known.sorted(vocab_size)
        whole = [word.encode() for word in words]
        self._longest = max(map(len, whole))
        self._rests: dict[bytes, list[bytes]] = {}  # by an output's end: what must not follow
        for word in whole:
            for n in range(1, len(word)):
                self._rests.setdefault(word[:n], []).append(word[n:])
        within = re.compile(b"|".join(map(re.escape, whole))).search
        self._always = np.array([t for data, t in self._tokens if within(data)], np.int64)
        self._beginning: dict[bytes, NDArray[np.int64]] = {}

    def exclude(self, logits: torch.Tensor, output: Sequence[int], draft: Sequence[int]) -> None:
        """Exclude them from `(n, V)` logits in place; position i follows output and draft[:i]."""
        tail = b""
        for token in reversed(output):
            tail = self._known[token] + tail
            if len(tail) >= self._longest:
                break
        for i in range(min(len(logits), len(draft) + 1)):
            for tokens in (self._always, *self._completing(tail)):
                logits[i, torch.from_numpy(tokens).to(logits.device)] = -torch.inf
            if i < len(draft):
                tail = (tail + self._known[draft[i]])[-self._longest :]

    def _completing(self, tail: bytes) -> list[NDArray[np.int64]]:
        """Tokens that complete what the output's last bytes began."""
        ends = (tail[-n:] for n in range(1, min(self._longest, len(tail) + 1)))
        return [self._begin_with(rest) for end in ends for rest in self._rests.get(end, ())]

    def _begin_with(self, rest: bytes) -> NDArray[np.int64]:
        if (tokens := self._beginning.get(rest)) is None:
            first, out = bisect_left(self._tokens, (rest, 0)), []
            while first < len(self._tokens) and self._tokens[first][0].startswith(rest):
                out.append(self._tokens[first][1])
                first += 1
            tokens = self._beginning[rest] = np.array(out, np.int64)
        return tokens


@lru_cache(maxsize=32)
def bans(words: tuple[str, ...], tokenizer: Any, vocab_size: int) -> Bans | None:
    """The bans of a request; None without words. `SettingError` without a tokenizer, or with one
    whose tokens have no bytes of their own."""
    if not words:
        return None
    if (known := token_bytes(tokenizer)) is None:
        raise SettingError(
            "bad_words need a byte-level, byte-fallback or Metaspace tokenizer; this model's is "
            "another"
        )
    return Bans(words, known, vocab_size)


@lru_cache(maxsize=64)
def split_stops(stops: tuple[str, ...], tokenizer: Any) -> tuple[tuple[str, ...], dict[int, str]]:
    """Stop strings to look for in the text, and special tokens, which never show there, by id;
    `SettingError` if a stop string holds such a token and something else."""
    special = special_tokens(tokenizer) if stops else {}
    for stop in stops:
        within = [name for name in special if len(name) > 1 and name in stop and name != stop]
        if within and stop not in special:
            raise SettingError(
                f"stop {stop!r} holds the special token {within[0]!r}, which is never part of a "
                "text; give that token on its own"
            )
    return (
        tuple(stop for stop in stops if stop not in special),
        {special[stop]: stop for stop in stops if stop in special},
    )
