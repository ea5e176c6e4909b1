"""Compiled passes of a few fixed shapes over a row cache of fixed size. Experimental.

What surrounds small products in eager mode, a kernel launch or a Python call each, goes away; on
CUDA whole passes are replayed as graphs. In return every shape is compiled once, for seconds to
minutes, so passes are padded to few: rows, tokens and cache columns to powers of two.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from operator import add
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from forerun.errors import ModelError, SettingError
from forerun.runtime.base import Columns, Executor, Pieces, Rows
from forerun.runtime.cache import cache_argument
from forerun.runtime.support import PROVEN, check_supported, probe
from forerun.runtime.torch_executor import facts_of

FEWEST_COLUMNS = 256
COMPILERS = ("g++", "clang++", "c++")
RECOMPILES = 256
"""Shapes that may be compiled; torch's own limit of 8 then runs the rest eagerly."""


def check_compiler(device: torch.device) -> None:
    """Raise `SettingError` if there is nothing to compile with."""
    if device.type == "cuda" and find_spec("triton") is None:
        raise SettingError("runtime compiled needs triton on a GPU: pip install triton")
    if device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise SettingError(
            f"runtime compiled needs a C++ compiler ({', '.join(COMPILERS)}), and none is on the "
            "PATH; install g++, or the runtime torch"
        )


class FixedCache(Cache):
    """Keys and values `(rows, heads, columns, width)` per layer, written at given places.

    The last column belongs to padding: what it writes there no token sees.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = self.columns = 0
        self.store: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.places: torch.Tensor | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(n, heads, width, dim)` states of the first n rows, and return those rows."""
        if self.places is None:  # the first pass ever, which shows the sizes
            empty = key_states[:0, :, :0].detach(), value_states[:0, :, :0].detach()
            self.store.append(empty)
            return key_states, value_states
        count = len(self.places)
        index = torch.arange(count, device=self.places.device).unsqueeze(1)
        keys, values = (tensor[:count] for tensor in self.store[layer_idx])
        keys[index, :, self.places] = key_states.transpose(1, 2)
        values[index, :, self.places] = value_states.transpose(1, 2)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not known here: masks and positions are given."""
        return 0

    def grow(self, rows: int, columns: int) -> None:
        """Have at least so many rows and columns, powers of two; contents are kept."""
        rows, columns = max(rows, self.rows), max(columns, self.columns)
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows, self.columns = rows, columns
        for layer, pair in enumerate(self.store):
            grown = []
            for old in pair:
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                torch._dynamo.mark_static_address(new)
                grown.append(new)
            self.store[layer] = grown[0], grown[1]

    def keep(self, rows: Sequence[int], longest: int) -> None:
        """Keep these rows, as rows 0, 1, ...; a row may be kept twice."""
        index = list(rows)
        for pair in self.store if index != list(range(len(index))) else ():
            for tensor in pair:
                tensor[: len(index), :, :longest] = tensor[index, :, :longest]

    def copy_out(self, row: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of a row's columns, layer by layer, `(heads, n, dim)` each."""
        return tuple(t[row, :, first:last].clone() for pair in self.store for t in pair)

    def copy_in(self, row: int, first: int, states: Sequence[torch.Tensor]) -> None:
        """Write copied keys and values into a row's columns."""
        own = (t for pair in self.store for t in pair)
        for tensor, new in zip(own, states, strict=True):
            tensor[row, :, first : first + new.shape[1]] = new


class CompiledExecutor(Executor):
    """Runs a decoder-only Hugging Face model by compiled passes of few shapes.

    Pieces are aligned on the right, so wanted tokens are the last columns of every row. Rows that
    are fed nothing, and rows there are none of, are padding like what stands before short pieces.

    Args:
        model: a supported causal language model on its device.
        compiler: turns the step into a faster one, `torch.compile` by default.

    Raises:
        UnsupportedModelError: rows cannot serve this architecture.
    """

    copies = True
    widest: ClassVar[int] = 16
    """Widest pass that computes logits of all its tokens; wider ones read prompts."""

    def __init__(self, model: Any, compiler: Callable[..., Any] | None = None) -> None:
        check_supported(model)
        self.model = model.eval()
        self.device = model.device
        self.facts = replace(facts_of(model), executor="compiled")
        self.cache = FixedCache()
        self._cached = {cache_argument(model): self.cache, "use_cache": True}
        self._seen: set[tuple[int, ...]] = set()
        self._graphs = compiler is None and self.device.type == "cuda"
        self._step = (compiler or self._compiled)(self._eager)
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            self.model(input_ids=one, **self._cached)
        self.reserve(1, FEWEST_COLUMNS - 1)
        if model.config.get_text_config(decoder=True).model_type not in PROVEN:
            probe(Rows(self), model)

    def module(self) -> Any:
        """The model."""
        return self.model

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the cache once for what is expected; other sizes are other shapes to compile."""
        self.cache.grow(_bucket(rows), _bucket(max(columns + 1, FEWEST_COLUMNS)))

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Reorder the cache."""
        self.reserve(max(len(rows), 1), max(lengths, default=0))
        self.cache.keep(rows, max(lengths, default=0))

    def copy_out(self, row: int, first: int, last: int) -> Columns:
        """Out of the cache."""
        return Columns(self.cache.copy_out(row, first, last), last - first)

    def copy_in(self, row: int, first: int, columns: Columns) -> None:
        """Into the cache."""
        self.reserve(row + 1, first + columns.count)
        self.cache.copy_in(row, first, columns.states)

    def run(self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int]) -> torch.Tensor:
        """One padded pass, or two where prompts are read beside rows that decode."""
        counts, most = [len(piece) for piece in pieces], max(wanted, default=0)
        self._make_room(starts, counts)
        groups = [
            fed
            for wide in (False, True)
            if any(fed := [n if (n > self.widest) == wide else 0 for n in counts])
        ]
        shape = len(pieces), most, self.facts.vocab_size
        out = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        for fed in groups:
            rows = [row for row, n in enumerate(fed) if n and wanted[row]]
            logits = self._pass(starts, pieces, fed, max((wanted[row] for row in rows), default=0))
            if len(groups) == 1 and all(n == most for n in wanted):
                return logits[: len(pieces), logits.shape[1] - most :]
            if rows:
                first = torch.tensor([[logits.shape[1] - wanted[row]] for row in rows])
                columns = (first + torch.arange(most)).clamp_(max=logits.shape[1] - 1)
                out[rows] = logits[torch.tensor(rows).unsqueeze(1), columns]
        return out

    def _make_room(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Have columns for rows of these sizes."""
        self.reserve(max(len(counts), 1), max(map(add, starts, counts), default=0))

    def _pass(
        self, starts: Sequence[int], pieces: Pieces, counts: Sequence[int], most: int
    ) -> torch.Tensor:
        """Logits `(rows, kept, V)` after the last tokens of a pass; rows with count 0 rest."""
        inputs = self._inputs(starts, pieces, counts).to(self.device)
        _, rows, width = inputs.shape
        kept = _bucket(max(most, 1)) if width > self.widest else width
        shape = rows, width, kept, self.cache.rows, self.cache.columns
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if shape in self._seen:
            logits = self._step(inputs, kept)
        else:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
                logits = self._first(inputs, kept)
            self._seen.add(shape)
        # The next replay of a graph overwrites it.
        return logits.clone() if self._graphs else logits

    def _padded(self, width: int) -> int:
        """Tokens per row of a pass that needs so many."""
        return _bucket(width)

    def _inputs(self, starts: Sequence[int], pieces: Pieces, counts: Sequence[int]) -> torch.Tensor:
        """`(2, rows, width)` token ids and their places in the cache, on the host."""
        rows, width = _bucket(len(pieces)), self._padded(max(counts))
        ids = [[0] * width for _ in range(rows)]
        places = [[self.cache.columns - 1] * width for _ in range(rows)]
        for row, count in enumerate(counts):
            if count:
                ids[row][width - count :] = pieces[row]
                places[row][width - count :] = range(starts[row], starts[row] + count)
        return torch.tensor([ids, places])

    def _first(self, *inputs: Any) -> torch.Tensor:
        try:
            return self._step(*inputs)
        except Exception as error:  # dynamo and its back ends raise whatever they like
            line = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
            raise ModelError(
                f"the model cannot be compiled ({line}); use the runtime torch"
            ) from error

    def _eager(self, inputs: torch.Tensor, kept: int) -> torch.Tensor:
        """The pass itself: tokens at places of the cache see the places up to their own."""
        ids, places = inputs.unbind()
        columns = torch.arange(self.cache.columns, device=places.device)
        hidden = (columns > places.unsqueeze(-1)).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=places.device)
        mask = mask.masked_fill(hidden, torch.finfo(self.model.dtype).min)
        self.cache.places = places
        output = self.model(
            input_ids=ids,
            position_ids=places.clamp(max=self.facts.limit - 1),
            attention_mask=mask,
            logits_to_keep=kept,
            **self._cached,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        return torch.compile(step, dynamic=False, mode=mode)


def _bucket(count: int) -> int:
    """The power of two that holds so many."""
    return 1 << max(count - 1, 0).bit_length()
