"""Hugging Face models stepped over ragged rows by PyTorch, as they are, in padded passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from forerun.runtime.attention import Mask, additive_mask, folding, groups_of, mask_of, windows_of
from forerun.runtime.base import Rows
from forerun.runtime.cache import RowCache, cache_argument
from forerun.runtime.padded import PaddedExecutor, PaddedPass, facts_of, seeing
from forerun.runtime.probe import prove
from forerun.runtime.states import States, Taps
from forerun.runtime.support import check_supported

CACHED_MASKS = 64  # widest pass whose mask is kept: wider ones read prompts
FOLDED_WIDTH = 64  # widest pass whose grouped queries are folded (`folded_attention`)


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
        self._head = model.get_output_embeddings()
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
            seeing(self._head, now.pick),
            nullcontext() if self._taps is None else self._taps.open(),
        ):
            logits = self._logits(now.ids, places, mask)
        if self._taps is not None:
            self._note(now, self._taps.read())
        return logits

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Of `(n, width)` tokens at positions."""
        return self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, **self._cached
        ).logits

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
