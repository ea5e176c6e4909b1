"""What a row's text may and must not say next, wherever sampling, drafting or judging looks."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.engine.text import TokenBytes, common, special_tokens, token_bytes
from forerun.errors import SettingError
from forerun.lazy import torch
from forerun.requests import Constraint

KEPT = 64  # masks that are kept: more than a round's
STEP_SECONDS, TOTAL_SECONDS = 0.05, 2.0
"""Processor time of constraints in a round, all of them and each, and for a request. One longer
round is forgiven: a collection of Python's garbage runs in whichever thread it meets."""
FREE = 3  # masks that count for the request only: the first ones build what later ones use
QUICK = 0.002  # processor seconds of a mask that no other request feels: not counted


def sit_out(places: Sequence[Place | None]) -> set[int]:
    """Rows that leave a pass to others, whose constraints took all the time there is for it when
    they ran last. Who sat out longest goes first, and one in any case."""
    known = [(i, place) for i, place in enumerate(places) if place is not None]
    busy = [pair for pair in known if pair[1].took > QUICK]
    busy.sort(key=lambda pair: -pair[1].rested)
    out, took = set(), 0.0
    for i, place in busy:
        if took and took + place.took > STEP_SECONDS:
            out.add(i)
            place.rested += 1
        else:
            took += place.took
            place.rested = 0
    return out


class Place:
    """Where in its constraint a text is.

    It follows whatever text it is asked about, forth and back, so nobody has to tell it of
    accepted tokens or of rollbacks. Masks are computed once per place, for draft and target alike.
    An error of the constraint ends its request alone: it is kept in `error`, and nothing is
    restricted any more.
    """

    def __init__(self, constraint: Constraint, eos: frozenset[int], vocab_size: int) -> None:
        self._vocab = vocab_size
        self._matcher, self._eos = constraint.begin(), sorted(eos)
        self._at: list[int] = []
        self._text: list[int] = []
        self._masks: dict[int, NDArray[np.bool_]] = {}
        self.error: Exception | None = None
        self._seconds, self._computed = 0.0, 0
        self._step, self._step_seconds = -1, 0.0
        self._slow = 0  # earlier rounds that took too long
        self.took = 0.0  # processor time of its newest round
        self.rested = 0  # passes that it has sat out, the one that runs included; see `sit_out`

    def restrict(self, logits: torch.Tensor, output: Sequence[int], draft: Sequence[int]) -> None:
        """Exclude what may not be said from `(n, V)` logits in place: position i follows the output
        and `draft[:i]`. Those behind a token that is not allowed, or beyond the draft, mean nothing
        and stay as they are."""
        if self.rested:  # they mean nothing in this pass
            return
        self._begin(output)
        for i in range(min(len(logits), len(draft) + 1)):
            mask = self._mask([*output, *draft[:i]])
            if mask is None:
                return
            logits[i].masked_fill_(torch.from_numpy(~mask).to(logits.device), -torch.inf)

    def valid(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of a draft are allowed, one after the other; this needs no mask."""
        end = next((i for i, token in enumerate(draft) if token in self._eos), len(draft))
        self._begin(output)
        good = 0
        with self._guarded():
            if self._follow([*output, *draft[:end]]):
                good = end + (end < len(draft) and self._matcher.complete())
            else:
                good = max(len(self._at) - len(output), 0)
        return 0 if self.error else good

    def prepare(self, output: Sequence[int], draft: Sequence[int]) -> None:
        """Compute the masks that `restrict` wants next, while a pass runs."""
        self._begin(output)
        for i in range(min(len(draft) + 1, KEPT)):
            if self._mask([*output, *draft[:i]]) is None:
                return

    def forced(self, output: Sequence[int]) -> list[int]:
        self._begin(output)
        forced: Sequence[int] = ()
        with self._guarded():
            forced = self._matcher.forced() if self._follow(output) else ()
        return [] if self.error else list(forced)

    def _begin(self, output: Sequence[int]) -> None:
        """A new round begins where the text has grown."""
        if len(output) != self._step:
            self._slow += self._step_seconds > STEP_SECONDS
            self._step, self._step_seconds, self.took = len(output), 0.0, 0.0

    def _mask(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        """`(V,)` what may follow; None where the text has ended or is none."""
        if self.error is not None or (output and output[-1] in self._eos):
            return None
        kept = common(self._text, list(output))
        if kept < len(output):
            self._masks = {n: mask for n, mask in self._masks.items() if n <= kept}
            self._text = list(output)
        if len(output) not in self._masks:
            with self._guarded():
                if self._follow(output):
                    self._masks[len(output)] = self._compute()
            if len(self._masks) > KEPT:
                del self._masks[next(iter(self._masks))]
        return None if self.error else self._masks.get(len(output))

    def _compute(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab, dtype=np.bool_)
        allowed = self._matcher.allowed()[: self._vocab]
        mask[: len(allowed)] = allowed
        mask[self._eos] |= self._matcher.complete()
        self._computed += 1
        return mask

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Count the processor time of what is done here: too much is an error, too."""
        began = time.thread_time()
        try:
            yield
        except Exception as error:  # of anybody's constraint
            self.error = error
            return
        took = time.thread_time() - began
        self.took += took
        self._seconds += max(took - QUICK, 0)
        self._step_seconds += took * (self._computed > FREE)
        again = self._slow and self._step_seconds > STEP_SECONDS
        if again or self._seconds > TOTAL_SECONDS:
            self.error = SettingError(
                f"the constraint takes too long: {self._step_seconds * 1e3:.0f} ms in one round, "
                f"{self._seconds:.1f} s in all; make its rules less ambiguous"
            )

    def _follow(self, output: Sequence[int]) -> bool:
        """Go to the place after a text; False if it is not allowed."""
        kept = common(self._at, list(output))
        if kept < len(self._at):
            self._matcher.rollback(len(self._at) - kept)
            del self._at[kept:]
        for token in output[kept:]:
            if not self._matcher.advance(token):
                return False
            self._at.append(token)
        return True


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
