"""Hugging Face models stepped over ragged rows by PyTorch, as they are, in padded passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from forerun.runtime.attention import Mask, additive_mask, folding, groups_of, mask_of, windows_of
from forerun.runtime.base import Facts, Pieces, Rows
from forerun.runtime.cache import CachedExecutor, RowCache, cache_argument
from forerun.runtime.fingerprints import identity
from forerun.runtime.probe import prove
from forerun.runtime.states import States, Taps
from forerun.runtime.support import check_supported, context_limit, end_of_text
from forerun.runtime.trees import Parents, trees_of

TOGETHER = 32  # padded tokens per row that a pass may waste
CACHED_MASKS = 64  # widest pass whose mask is kept: wider ones read prompts
FOLDED_WIDTH = 64  # widest pass whose grouped queries are folded (`folded_attention`)


Pick = Callable[[torch.Tensor], torch.Tensor]
"""Of `(rows, width, ...)` to `(rows, wanted, ...)`."""


class PaddedPass(NamedTuple):
    """What is fed to rows at once."""

    rows: list[int]
    starts: Sequence[int]  # per row the tokens it holds
    counts: list[int]  # and is fed
    ids: torch.Tensor  # `(rows, width)` what follows
    columns: int  # of the cache that attention sees
    tree: torch.Tensor | None  # as by `trees_of`; None: tokens follow each other
    pick: Pick


class PaddedExecutor(CachedExecutor):
    """Runs a Hugging Face model over rows of different lengths, padded to one width."""

    trees = True
    model: Any
    dtype: torch.dtype
    cache: RowCache

    def module(self) -> Any:
        return self.model

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        """One padded pass, or two where prompts are read beside rows that decode."""
        shape = len(pieces), max(wanted, default=0), self.facts.vocab_size
        out: torch.Tensor | None = None
        for rows in _by_width(pieces):
            begin, fed = [starts[row] for row in rows], [pieces[row] for row in rows]
            trees = [parents[row] for row in rows] if parents else ()
            counts, width = list(map(len, fed)), max(map(len, fed))
            columns = self.cache.open(rows, begin, width, self.device)
            padded = [[*piece, *[0] * (width - len(piece))] for piece in fed]
            ids = torch.tensor(padded, device=self.device)
            tree = trees_of(begin, counts, trees, width).to(self.device) if any(trees) else None
            pick = picker(counts, [wanted[row] for row in rows])
            logits = self._forward(PaddedPass(rows, begin, counts, ids, columns, tree, pick))
            if self.device.type == "cuda":  # the caller reads the result at once anyway
                torch.cuda.synchronize(self.device)
            if len(rows) == len(pieces):
                return logits
            if out is None:
                out = torch.zeros(shape, dtype=self.dtype, device=self.device)
            out[rows, : logits.shape[1]] = logits
        return torch.zeros(shape, dtype=self.dtype, device=self.device) if out is None else out

    def _note(self, now: PaddedPass, states: torch.Tensor) -> None:
        """Leave `(rows, width, ...)` states of a pass."""
        assert self.states is not None
        for row, start, count, own in zip(now.rows, now.starts, now.counts, states, strict=True):
            self.states.note(row, start, own[:count])

    @abstractmethod
    def _forward(self, now: PaddedPass) -> torch.Tensor:
        """`(rows, wanted, V)` logits of what the pass picks."""


@contextmanager
def seeing(head: Any, pick: Pick) -> Iterator[None]:
    """Let a module see what is picked alone."""
    handle = head.register_forward_pre_hook(lambda _, args: (pick(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def picker(counts: Sequence[int], wanted: Sequence[int]) -> Pick:
    """Takes of padded rows of so many tokens the last ones that are wanted."""
    most = max(wanted)
    skipped = [count - n for count, n in zip(counts, wanted, strict=True)]

    def pick(hidden: torch.Tensor) -> torch.Tensor:
        if min(skipped) == max(skipped):
            return hidden[:, skipped[0] : skipped[0] + most]
        at = torch.tensor(skipped, device=hidden.device)[:, None]
        at = (at + torch.arange(most, device=hidden.device)).clamp_(max=hidden.shape[1] - 1)
        return hidden[torch.arange(len(at), device=hidden.device)[:, None], at]

    return pick


def facts_of(model: Any) -> Facts:
    """What a Hugging Face causal language model says of itself."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every = sum(parameter.numel() for parameter in model.parameters())
    config = model.config.get_text_config(decoder=True)
    norm = getattr(model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    heads = getattr(config, "num_attention_heads", 0)
    pairs = getattr(config, "num_key_value_heads", None) or heads
    wide = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
    layers = int(getattr(config, "num_hidden_layers", 0))
    return Facts(
        vocab_size=int(head.shape[0]),
        limit=context_limit(model.config),
        layers=layers,
        weights=every if table is head else every - table.numel(),
        token_bytes=2 * layers * int(pairs) * int(wide) * model.dtype.itemsize,  # of full attention
        eos=end_of_text(getattr(model, "generation_config", None)),
        precision=str(model.dtype).removeprefix("torch."),
        executor="torch",
        name=str(getattr(model, "name_or_path", "") or ""),
        identity="" if weight is None else identity(weight.detach().float().cpu().numpy()),
    )


def _by_width(pieces: Pieces) -> list[list[int]]:
    """Rows with something to feed, those with much longer pieces apart."""
    fed = [row for row, piece in enumerate(pieces) if piece]
    shortest = min((len(pieces[row]) for row in fed), default=0)
    short = [row for row in fed if len(pieces[row]) <= shortest + TOGETHER]
    long = [row for row in fed if len(pieces[row]) > shortest + TOGETHER]
    return [rows for rows in (short, long) if rows]


class TorchExecutor(PaddedExecutor):
    """Runs a decoder-only Hugging Face model over rows of different lengths, padded to one width;
    `UnsupportedModelError` says why a row cache cannot serve it."""

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.facts = facts_of(model)
        self.cache = RowCache()
        self._cached = {cache_argument(model): self.cache, "use_cache": True}
        self._groups, self._windows = groups_of(model), windows_of(model.config)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._places = torch.arange(0, device=self.device)
        self._taps: Taps | None = None
        prove(self, model)

    def tap(self, depths: Sequence[int]) -> States:
        """By hooks on the model's layers, which are there during its own passes only."""
        if self.states is None or self.states.depths != tuple(depths):
            self._taps = Taps(self.model, depths)
            width = self.model.config.get_text_config(decoder=True).hidden_size
            self.states = States(depths, width)
        return self.states

    def _forward(self, now: PaddedPass) -> torch.Tensor:
        width = now.ids.shape[1]
        places = self._positions(now.starts, width)
        if now.tree is not None:
            places = now.tree[0].clamp(max=self.facts.limit - 1)
        mask = self._mask(now.starts, width, now.columns, now.tree)
        # One token a row takes up to a tenth longer folded, more take as little as half as long.
        folds = self._groups > 1 and 1 < width <= FOLDED_WIDTH
        with (
            folding(self.model, self._groups) if folds else nullcontext(),
            seeing(self.model.get_output_embeddings(), now.pick),
            nullcontext() if self._taps is None else self._taps.open(),
        ):
            logits = self._logits(now.ids, places, mask)
        if self._taps is not None:
            self._note(now, self._taps.read())
        return logits

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Of `(n, width)` tokens at positions."""
        logits: torch.Tensor = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, **self._cached
        ).logits
        return logits

    def _positions(self, starts: Sequence[int], width: int) -> torch.Tensor:
        if (end := max(starts) + width) > len(self._places):
            # Padding may point past the end, which learned position tables do not have.
            places = torch.arange(2 * end, device=self.device)
            self._places = places.clamp_(max=self.facts.limit - 1)
        rows = [self._places[start : start + width] for start in starts]
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def _mask(
        self, starts: Sequence[int], width: int, columns: int, tree: torch.Tensor | None = None
    ) -> Mask:
        """Of `(rows, 1, width, columns)`: query `i` of a row sees columns ≤ start + i, or what
        its tree says."""

        def built(window: int | None, starts: Sequence[int], columns: int) -> torch.Tensor:
            begin = torch.tensor(starts, device=self.device).unsqueeze(1)
            places = begin + torch.arange(width, device=self.device)
            return additive_mask(places, columns, window, self.dtype, tree)

        def within(window: int | None) -> torch.Tensor:
            if tree is not None or len(starts) > 1 or width > CACHED_MASKS:
                return built(window, starts, columns)
            # A lower-right corner of one fixed triangle per width: no arithmetic per step.
            full = self._masks.get((width, window))
            if full is None or full.shape[-1] < columns:
                room = max(self.cache.columns, columns) + 256
                full = self._masks[width, window] = built(window, [room - width], room)
            corner = full[..., -columns:]
            # Kernels on a GPU read 16 bytes at a time; a corner may begin anywhere.
            return corner if self.device.type == "cpu" else corner.clone()

        return mask_of(self._windows, within)


def torch_rows(model: Any, own_settings: bool = True) -> Rows:
    """Rows of a Hugging Face model in memory, which is not copied, run by PyTorch.

    Args:
        model: with an encoder or not.
        own_settings: whether generation settings that an encoder-decoder model brings count: some
            tokens are then banned, and other settings warned of.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        from forerun.runtime.encoder_decoder import EncoderDecoderExecutor

        return Rows(EncoderDecoderExecutor(model, own_settings=own_settings))
    return Rows(TorchExecutor(model))
