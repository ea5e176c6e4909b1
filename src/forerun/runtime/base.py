"""The seam between the engine and whatever executes a model: `Rows` over an `Executor`."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from operator import add
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from forerun.arrays import copied
from forerun.errors import PromptError, SettingError
from forerun.lazy import loaded, torch
from forerun.runtime.attention import Parents
from forerun.runtime.states import States
from forerun.signals import float_type, measure, read
from forerun.types import Array

NO_ENCODER = "a source is for encoder-decoder models; this one has no encoder"
Pieces = Sequence[Sequence[int]]  # per row the token ids it is fed next; may be empty
_Method = TypeVar("_Method", bound=Callable[..., Any])
_Seen = TypeVar("_Seen")


@dataclass(frozen=True)
class Facts:
    """What there is to know of a model without looking into it."""

    vocab_size: int  # columns of the logits (may exceed the tokenizer's vocabulary: padding)
    limit: int  # most tokens of context, prompt and output together
    layers: int = 0
    weights: int = 0
    """Parameters that a pass reads: all but a table of embeddings, of which it reads a row; 0 if
    unknown."""
    token_bytes: int = 0  # bytes of keys and values of a row's token in all layers; 0: unknown
    eos: frozenset[int] | None = None  # end-of-text ids; None if the model names none
    precision: str = "float32"  # of weights and arithmetic, as reports name it
    executor: str = ""  # which one runs it, as `--runtime` names it
    name: str = ""  # folder or Hugging Face id; empty if it was made in memory
    identity: str = ""
    """Hash of the final norm's weights, the same in all precisions; empty if there is no `norm`."""
    source_limit: int | None = None  # most tokens that its encoder reads; None: it has none
    start: tuple[int, ...] = ()
    """With an encoder, what the decoder's text begins with: then the prompt is this, and what a
    user calls the prompt is the source."""


def identity(norm: NDArray[np.float32]) -> str:
    """A name for a model in any precision: by the weights of its final norm, which none rounds."""
    return hashlib.sha256(np.ascontiguousarray(norm, np.float32).tobytes()).hexdigest()[:16]


@dataclass
class Best:
    """Per row and wanted position the most likely token and what its distribution says of it."""

    tokens: list[list[int]]  # `[row][column]` token ids
    signals: dict[str, Any] = field(default_factory=dict)
    """The wanted fields of `Signals`, `[row][column]` each, a number; and `LOGITS`."""
    sound: list[list[bool]] = field(default_factory=list)
    """`[row][column]` whether the best logit was a finite number."""


@dataclass(frozen=True)
class Columns:
    """A copy of what an executor holds of consecutive tokens of one row."""

    states: tuple[Array, ...]  # per cache of keys or values `(heads, count, width)`
    count: int  # tokens

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.states)

    def part(self, first: int, last: int) -> Columns:
        """A copy of some of them."""
        return Columns(tuple(copied(s[:, first:last]) for s in self.states), last - first)


class Executor(ABC):
    """Runs one model over rows; owns its cache, shapes and layout, and decides nothing. It is told
    with every pass how many tokens each row holds. What a row holds beyond that is stale: it must
    neither be seen nor survive. A row that joins holds nothing."""

    facts: Facts
    device: Any  # torch's, or "cpu"
    copies: ClassVar[bool] = False  # whether it has `copy_out` and `copy_in`
    own_threads: ClassVar[bool] = False
    """Whether passes run on threads of their own. Torch's, which wait for more work busily after
    each operation that they share, would take their cores."""
    on_torch: ClassVar[bool] = True  # whether it computes anything by torch

    trees: bool = False  # whether pieces may be trees, and it has `move`
    packs: ClassVar[bool] = False  # whether a pass takes all rows' tokens packed, not padded
    levels: tuple[int, ...] = ()
    """Tokens, rising, up to which a pass of one row takes as long as one of so many; of others
    every token adds something."""
    shared_levels: tuple[int, ...] = ()  # likewise of several rows together, if it packs them
    ahead: int = 0  # see `Drafter.ahead`
    timeable: bool = True  # whether passes may be timed before there are rows
    graphs: int = 0  # graphs that passes had to compile or capture so far: such a pass is slow once
    states: States | None = None  # where passes leave hidden states, once asked for by `tap`

    @abstractmethod
    def reserve(self, rows: int, columns: int) -> None:
        """Expect so many rows of so many tokens; more may come."""

    @abstractmethod
    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep these rows, in this order, with the tokens each holds; a row may be kept twice."""

    @abstractmethod
    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> Array:
        """Feed every row its next tokens.

        Args:
            starts: per row the tokens it holds.
            pieces: per row what follows them.
            wanted: per row how many of its last tokens' logits are wanted, 0 ≤ wanted ≤ its piece.
            parents: what the tokens of a piece follow, with `trees`; empty: each the one before.
                A token sees what its row holds and those of its piece that it follows, and stands
                in the text behind these.

        Returns:
            `(rows, max(wanted), V)` logits, torch's unless none are wanted; column `j` of a row is
            after token `len(piece) - wanted + j` of its piece, columns beyond `wanted` mean
            nothing.
        """

    def best(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        signals: frozenset[str],
        parents: Parents = (),
    ) -> Best:
        """Like `run`, but only the arg-max of each wanted position and what is said of it."""
        return best_of(self.run(starts, pieces, wanted, *_given(parents)), signals)

    def move(self, row: int, source: int, place: int) -> None:
        """Let a row hold at `place` what it holds at `source`."""
        self.copy_in(row, place, self.copy_out(row, source, source + 1))

    def copy_out(self, row: int, first: int, last: int) -> Columns:
        """Copy what a row holds of its tokens `first` to `last`, which it must hold."""
        raise NotImplementedError

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        """Let a row hold copied columns from its token `first` on."""
        raise NotImplementedError

    def tap(self, depths: Sequence[int]) -> States:
        """From now on, passes leave the hidden states of these depths in `States`: the same object
        if it is asked again for the same ones. `SettingError` if there are no such depths or the
        executor gives no states, `UnsupportedModelError` if this model's cannot be had."""
        raise SettingError(
            f"this draft reads the target's hidden states, which the runtime "
            f"{self.facts.executor or 'of this target'} does not give; use torch or openvino"
        )

    def settle(self) -> None:
        """Give back memory that only loading took."""

    @property
    def finished(self) -> bool:
        """Whether passes take as long as they ever will; `finish` sees to it."""
        return True

    def finish(self) -> None:
        """Prepare what is else prepared behind passes, as soon as enough would have used it. Who
        times passes does so first."""

    def module(self) -> Any:
        """The Hugging Face module behind it, or None."""
        return None

    def embeddings(self) -> torch.Tensor:
        """The `(V, H)` table of a model without a module, by which it reads tokens."""
        raise SettingError(
            f"this draft reads the target's embeddings, which the runtime "
            f"{self.facts.executor or 'of this target'} does not show; use torch or openvino"
        )

    def attend(self, sources: Pieces) -> None:
        """Read the sources of the rows that join next, before their first pass. Only of executors
        whose facts have a `source_limit`; `keep` keeps sources, too."""
        raise SettingError(NO_ENCODER)

    def beside(self, model: Any) -> Executor:
        """One of this kind for another decoder, which attends to what this one's encoder reads.
        Only of executors whose facts have a `source_limit` and that show their `module`."""
        raise SettingError(
            f"{self.facts.executor or type(self).__name__} runs no draft that shares the target's "
            "encoder; use a draft model or lookup, or `runtime='torch'`"
        )


def _given(parents: Parents) -> tuple[Parents, ...]:
    """An argument only where there is a tree: not every executor knows them."""
    return (parents,) if any(parents) else ()


LOGITS = "logits"
"""A field of `Best.signals`, if wanted: `[row][column]` `(V,)`, until the next pass."""


def best_of(logits: torch.Tensor, signals: frozenset[str]) -> Best:
    """The arg-max of `(rows, n, V)` logits, with one transfer to the host. Logits on the CPU are
    written to and restored."""
    names = signals - {LOGITS}
    if logits.device.type == "cpu":
        rows, width, vocab = logits.shape
        flat = logits.to(float_type(logits)).reshape(-1, vocab).numpy()

        def by_row(flat: list[Any]) -> list[list[Any]]:
            return [flat[row * width : (row + 1) * width] for row in range(rows)]

        tokens, sound, values = read(flat, names)
        best = Best(by_row(tokens), {n: by_row(x) for n, x in values.items()}, by_row(sound))
    else:
        best = read_stacked(stacked_best(logits, names).tolist(), names)
    if LOGITS in signals:
        best.signals[LOGITS] = logits
    return best


def logits_of(best: Best) -> torch.Tensor:
    """`(rows, n, V)`: a copy of what it was asked for, `LOGITS`."""
    own = best.signals[LOGITS]
    if not isinstance(own, list):
        return own
    return torch.from_numpy(np.stack([np.stack(row) for row in own]))


FLOATS = 1 << 22  # logits that are floats at a time, for signals: 16 MiB


def stacked_best(logits: torch.Tensor, signals: frozenset[str]) -> torch.Tensor:
    """`(2 + signals, rows, n)`: tokens, whether they are sound, and signals by name, sorted."""
    flat = logits.flatten(0, 1)
    parts = flat.split(max(FLOATS // flat.shape[1], 1)) if signals else [flat]
    stacked = []
    for part in parts:
        top, tokens = part.max(-1)
        measured = measure(part, tokens, signals)
        rows = [tokens, top.isfinite(), *(measured[name] for name in sorted(signals))]
        stacked.append(torch.stack(rows))
    return torch.cat(stacked, 1).unflatten(1, logits.shape[:2])


def read_stacked(values: list[Any], signals: frozenset[str]) -> Best:
    """What `stacked_best` made, as lists on the host."""
    tokens = [list(map(int, row)) for row in values[0]]
    sound = [list(map(bool, row)) for row in values[1]]
    return Best(tokens, dict(zip(sorted(signals), values[2:], strict=True)), sound)


def _inferring(method: _Method) -> _Method:
    """In `torch.inference_mode()`, which a round is in already: entering it again would take as
    long as all else the engine does in a step. Executors without torch need none."""

    @wraps(method)
    def run(rows: Rows, *args: Any, **more: Any) -> Any:
        if not rows.executor.on_torch or torch.is_inference_mode_enabled():
            return method(rows, *args, **more)
        with torch.inference_mode():
            return method(rows, *args, **more)

    return run  # type: ignore[return-value]


class Rows:
    """Ragged rows of one model, under one invariant.

    Row `r` covers `context[:lengths[r]]`, and the next pass feeds `context[lengths[r]:]`. So
    reading a prompt, judging a draft and decoding a token are the same thing, rolling back is
    setting a length, and "everything was accepted" is no special case.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.facts, self.device = executor, executor.facts, executor.device
        self.limit, self.vocab_size = executor.facts.limit, executor.facts.vocab_size
        self.lengths: list[int] = []  # tokens covered per row
        self.begins: list[int] = []
        """Per row the place in its text of the first of these: 0, but where a draft left tokens
        before it out. The context is then what is behind."""
        self.seconds = 0.0  # wall time spent in passes so far
        self.passes = 0

    def join(self, count: int, room: int = 0, sources: Pieces | None = None) -> None:
        """Add empty rows at the end, each with a source if the model has an encoder; `room` tokens
        are expected of each."""
        if (sources is None) != (self.facts.source_limit is None) and count:
            wrong = "this model has an encoder: a row joins with a source", NO_ENCODER
            raise SettingError(wrong[sources is not None])
        if sources:
            self.executor.attend(sources)
        self.executor.reserve(len(self.lengths) + count, min(room, self.limit) + 1)
        self.lengths.extend([0] * count)
        self.begins.extend([0] * count)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be kept twice, the others are dropped."""
        self.lengths, self.begins = ([of[r] for r in rows] for of in (self.lengths, self.begins))
        self.executor.keep(rows, self.lengths)
        if self.executor.states is not None:
            self.executor.states.keep(rows)

    def rollback(self, row: int, length: int) -> None:
        """Forget what a row holds beyond `length` tokens."""
        if length < self.lengths[row]:
            self.lengths[row] = length

    @_inferring
    def copy_out(self, row: int, first: int, last: int) -> Columns:
        """A copy of a row's tokens `first` to `last`; see `Executor.copies`."""
        assert first <= last <= self.lengths[row], "only what is covered can be copied"
        return self.executor.copy_out(row, first, last)

    @_inferring
    def extend(self, row: int, columns: Columns) -> None:
        """Cover what comes next in a row by a copy, instead of a pass."""
        self.executor.copy_in(row, self.lengths[row], columns)
        self.lengths[row] += columns.count
        if self.executor.states is not None:
            self.executor.states.drop(row)

    @_inferring
    def move(self, row: int, source: int, place: int) -> None:
        """Let a row cover at `place` what it covers at `source`: a token of a tree in the newest
        pass that is kept, at its place in the text. A path moves from its root on."""
        assert place <= source < self.lengths[row], "only what is covered can be moved"
        if place < source:
            self.executor.move(row, source, place)
            if self.executor.states is not None:
                self.executor.states.move(row, source, place)

    @_inferring
    def feed(
        self, pieces: Pieces, wanted: Sequence[int] | None = None, parents: Parents = ()
    ) -> Array:
        """Feed every row its next tokens and cover them; see `Executor.run`. Without `wanted` the
        logits after every token are. `PromptError` if a row would grow beyond the context."""
        wanted = list(map(len, pieces)) if wanted is None else wanted
        return self._covered(self.executor.run, pieces, wanted, *_given(parents))

    @_inferring
    def best(
        self,
        pieces: Pieces,
        wanted: Sequence[int],
        signals: frozenset[str] = frozenset(),
        parents: Parents = (),
    ) -> Best:
        """Like `feed`, but only the most likely tokens; see `Executor.best`."""
        return self._covered(self.executor.best, pieces, wanted, signals, *_given(parents))

    def read(self, texts: Pieces, room: int = 0, sources: Pieces | None = None) -> None:
        """Add a row per text, and cover all of it but for its last token, in chunks."""
        first = len(self.lengths)
        self.join(len(texts), max(map(len, texts), default=0) + room, sources)
        for at in range(0, max(map(len, texts), default=0) - 1, CHUNK):
            chunks = [list(text[:-1][at : at + CHUNK]) for text in texts]
            self.feed([*[[]] * first, *chunks], [0] * len(self.lengths))

    def _covered(self, run: Callable[..., _Seen], pieces: Pieces, *more: Any) -> _Seen:
        """What a pass says, after which the rows cover their pieces."""
        began = time.perf_counter()
        assert len(pieces) == len(self.lengths), "a piece for every row"
        ends = list(map(add, self.lengths, map(len, pieces)))
        if ends and max(ends) > self.limit:
            raise PromptError(f"{max(ends)} tokens do not fit the model's context of {self.limit}")
        seen = run(self.lengths, pieces, *more)
        self.lengths = ends
        self.seconds += time.perf_counter() - began
        self.passes += 1
        return seen


CHUNK = 512  # prompt tokens fed in one pass


class OneThread:
    """Inside, torch computes on one thread, afterwards on as many as before, if it is there; see
    `Executor.own_threads`. A fifth of a microsecond; not to be entered twice at once."""

    def __enter__(self) -> None:
        self._torch = loaded()
        if self._torch is not None:
            self._before = self._torch.get_num_threads()
            self._torch.set_num_threads(1)

    def __exit__(self, *_: Any) -> None:
        if self._torch is not None:
            self._torch.set_num_threads(self._before)
