"""A Hugging Face model stepped over ragged rows by PyTorch, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from forerun.runtime.attention import Mask, additive_mask, folding, groups_of, mask_of, windows_of
from forerun.runtime.base import Pieces, Rows
from forerun.runtime.cache import cache_argument
from forerun.runtime.padded import PaddedExecutor, facts_of
from forerun.runtime.probe import prove
from forerun.runtime.states import States, Taps
from forerun.runtime.support import PROVEN, check_supported
from forerun.runtime.trees import Parents, trees_of

CACHED_MASKS = 64  # widest pass whose mask is kept: wider ones read prompts
FOLDED_WIDTH = 64  # widest pass whose grouped queries are folded (`folded_attention`)


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
