"""A Hugging Face model stepped over ragged rows by PyTorch, as it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from forerun.runtime.attention import Mask, additive_mask, folding, groups_of, mask_of, windows_of
from forerun.runtime.base import Facts, Pieces, Rows
from forerun.runtime.cache import CachedExecutor, cache_argument
from forerun.runtime.fingerprints import identity
from forerun.runtime.probe import prove
from forerun.runtime.states import States, Taps
from forerun.runtime.support import PROVEN, check_supported, context_limit, end_of_text
from forerun.runtime.trees import Parents, trees_of

CACHED_MASKS = 64  # widest pass whose mask is kept: wider ones read prompts
FOLDED_WIDTH = 64  # widest pass whose grouped queries are folded (`folded_attention`)
TOGETHER = 32  # padded tokens per row that a pass may waste


class PaddedExecutor(CachedExecutor):
    """Runs a Hugging Face model over rows of different lengths, padded to one width."""

    trees = True
    model: Any
    dtype: torch.dtype

    def module(self) -> Any:
        return self.model

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        """One padded pass, or two where prompts are read beside rows that decode."""
        groups = _by_width(pieces)
        if len(groups) == 1 and len(groups[0]) == len(pieces):
            return self._pass(groups[0], starts, pieces, wanted, parents)
        shape = len(pieces), max(wanted, default=0), self.facts.vocab_size
        out = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for rows in groups:
            begin, fed = [starts[row] for row in rows], [pieces[row] for row in rows]
            trees = [parents[row] for row in rows] if parents else ()
            logits = self._pass(rows, begin, fed, [wanted[row] for row in rows], trees)
            out[rows, : logits.shape[1]] = logits
        return out

    @abstractmethod
    def _pass(
        self,
        rows: list[int],
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        parents: Parents,
    ) -> torch.Tensor:
        """One forward of these rows, whose other arguments come in their order; as of `run`."""

    def _ids(self, pieces: Pieces) -> torch.Tensor:
        """`(n, width)` tokens, padded on the right."""
        width = max(map(len, pieces))
        padded = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
        return torch.tensor(padded, device=self.device)

    def _wait(self) -> None:
        """For a GPU: the caller reads the result at once anyway."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class TorchExecutor(PaddedExecutor):
    """Runs a decoder-only Hugging Face model over rows of different lengths, padded to one width.

    Raises:
        UnsupportedModelError: a row cache cannot serve this architecture; says why.
    """

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.facts = facts_of(model)
        super().__init__()
        self._cached = {cache_argument(model): self.cache, "use_cache": True}
        self._groups, self._windows = groups_of(model), windows_of(model.config)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._places = torch.arange(0, device=self.device)
        self._taps: Taps | None = None
        if model.config.get_text_config(decoder=True).model_type not in PROVEN:
            prove(self, model)

    def tap(self, depths: Sequence[int]) -> States:
        """By hooks on the model's layers, which are there during its own passes only."""
        if self.states is None or self.states.depths != tuple(depths):
            self._taps = Taps(self.model, depths)
            width = self.model.config.get_text_config(decoder=True).hidden_size
            self.states = States(depths, width)
        return self.states

    def _pass(
        self,
        rows: list[int],
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        parents: Parents,
    ) -> torch.Tensor:
        counts = [len(piece) for piece in pieces]
        width, most = max(counts), max(wanted)
        skipped = [count - n for count, n in zip(counts, wanted, strict=True)]
        # Of the padded columns, the logits from the first that any row wants.
        first = min(skipped) if most else width - 1
        columns = self.cache.open(rows, starts, width, self.device)
        ids, places = self._ids(pieces), self._positions(starts, width)
        tree = None
        if any(parents):
            tree = trees_of(starts, counts, parents, width).to(self.device)
            places = tree[0].clamp(max=self.facts.limit - 1)
        mask = self._mask(starts, width, columns, tree)
        with nullcontext() if self._taps is None else self._taps.open():
            logits = self._forward(ids, places, mask, first)
        if self._taps is not None and self.states is not None:
            taken = zip(rows, starts, counts, self._taps.read(), strict=True)
            for row, start, count, states in taken:
                self.states.note(row, start, states[:count])
        self._wait()
        if min(skipped) == max(skipped):
            return logits[:, :most]
        at = torch.tensor(skipped, device=self.device).unsqueeze(1) - first
        at = at + torch.arange(most, device=self.device)
        index = torch.arange(len(rows), device=self.device).unsqueeze(1)
        return logits[index, at.clamp_(max=logits.shape[1] - 1)]

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask, first: int
    ) -> torch.Tensor:
        """`(n, width - first, V)` logits of `(n, width)` tokens from column `first` on."""
        width = ids.shape[1]
        # One token a row takes up to a tenth longer folded, more take as little as half as long.
        folds = self._groups > 1 and 1 < width <= FOLDED_WIDTH
        with folding(self.model, self._groups) if folds else nullcontext():
            logits: torch.Tensor = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                logits_to_keep=width - first if first else 0,  # 0: all
                **self._cached,
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

        def within(window: int | None) -> torch.Tensor:
            if tree is None:
                return self._mask_within(window, starts, width, columns)
            return self._build_mask(window, starts, width, columns, tree)

        return mask_of(self._windows, within)

    def _mask_within(
        self, window: int | None, starts: Sequence[int], width: int, columns: int
    ) -> torch.Tensor:
        if len(starts) == 1 and width <= CACHED_MASKS:
            # A lower-right corner of one fixed triangle per width: no arithmetic per step.
            full = self._masks.get((width, window))
            if full is None or full.shape[-1] < columns:
                room = max(self.cache.columns, columns) + 256
                full = self._build_mask(window, [room - width], width, room)
                self._masks[width, window] = full
            corner = full[..., -columns:]
            # Kernels on a GPU read 16 bytes at a time; a corner may begin anywhere.
            return corner if self.device.type == "cpu" else corner.clone()
        return self._build_mask(window, starts, width, columns)

    def _build_mask(
        self,
        window: int | None,
        starts: Sequence[int],
        width: int,
        columns: int,
        tree: torch.Tensor | None = None,
    ) -> torch.Tensor:
        begin = torch.tensor(starts, device=self.device).unsqueeze(1)
        places = begin + torch.arange(width, device=self.device)
        return additive_mask(places, columns, window, self.dtype, tree)


def torch_rows(model: Any, own_settings: bool = True) -> Rows:
    """Rows of a Hugging Face model, run by PyTorch.

    Args:
        model: in memory; not copied.
        own_settings: whether generation settings that an encoder-decoder model brings count: some
            tokens are then banned, and others settings warned of.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        from forerun.runtime.encoder_decoder import EncoderDecoderExecutor

        return Rows(EncoderDecoderExecutor(model, own_settings=own_settings))
    return Rows(TorchExecutor(model))


def facts_of(model: Any) -> Facts:
    """What a Hugging Face causal language model says of itself."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    every = sum(parameter.numel() for parameter in model.parameters())
    config = model.config.get_text_config(decoder=True)
    norm = getattr(model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    return Facts(
        vocab_size=int(head.shape[0]),
        limit=context_limit(model.config),
        layers=int(getattr(config, "num_hidden_layers", 0)),
        weights=every if table is head else every - table.numel(),
        token_bytes=_token_bytes(config, model.dtype),
        eos=end_of_text(getattr(model, "generation_config", None)),
        precision=str(model.dtype).removeprefix("torch."),
        executor="torch",
        name=str(getattr(model, "name_or_path", "") or ""),
        identity="" if weight is None else identity(weight.detach().float().cpu().numpy()),
    )


def _token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Of keys and values; full attention assumed, so never too few."""
    heads = getattr(config, "num_attention_heads", 0)
    pairs = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1)
    layers = getattr(config, "num_hidden_layers", 0)
    return 2 * int(layers) * int(pairs) * int(width) * dtype.itemsize


def _by_width(pieces: Pieces) -> list[list[int]]:
    """Rows with something to feed, those with much longer pieces apart."""
    fed = [row for row, piece in enumerate(pieces) if piece]
    shortest = min((len(pieces[row]) for row in fed), default=0)
    short = [row for row in fed if len(pieces[row]) <= shortest + TOGETHER]
    long = [row for row in fed if len(pieces[row]) > shortest + TOGETHER]
    return [rows for rows in (short, long) if rows]
