"""Training of Kangaroo's adapter: the last layer's distribution from a shallow layer's states.

The target is frozen, its head included. The loss is forward KL at every place that counts, which
has the gradient of the paper's cross-entropy (section 3.1).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from forerun.errors import SettingError
from forerun.runtime.adapters import Adapter
from forerun.runtime.base import Rows
from forerun.runtime.layers import LayerAccess
from forerun.training.drafts import Settings, Training, divergence, padded
from forerun.training.features import Document

ROOM = 1 << 30
"""Bytes of the target's states that are kept."""


class AdapterTrainer(Training[Document]):
    """An adapter in training.

    Args:
        target: the model to draft for, with layer-by-layer access.
        settings: how; its `layers` are the exit layer.

    Raises:
        SettingError: no such layer.
        UnsupportedModelError: the target's layers cannot be called one by one.
    """

    def __init__(self, target: Rows, settings: Settings) -> None:
        model = target.executor.module()
        if model is None:
            raise SettingError("an adapter needs a target that is a Hugging Face model")
        self._access = LayerAccess(model)
        self.adapter = Adapter(self._access, settings.layers)
        super().__init__(model, self.adapter.own, settings)
        self._known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._room = ROOM

    def _learn(self, texts: Sequence[Document], rng: random.Random) -> tuple[torch.Tensor, int]:
        logits, taught = self._both(texts)
        return divergence(logits, taught), len(logits)

    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, V)` logits of the adapter, and log-probabilities of the target, where it counts."""
        access, states = self._access, self._states(texts)
        shallow = torch.nn.utils.rnn.pad_sequence([exits for exits, _ in states], batch_first=True)
        counts = torch.zeros(shallow.shape[:2], dtype=torch.bool)
        for row, (tokens, start) in enumerate(texts):
            counts[row, start : len(tokens) - 1] = True
        positions, mask = self._layout(*counts.shape)
        adapted = self.adapter(access, shallow, mask, positions)[counts.to(shallow.device)]
        with torch.no_grad():
            taught = access.logits(torch.cat([last for _, last in states]))
        return access.unembed(adapted).float(), taught.float().log_softmax(-1)

    @torch.no_grad()
    def _states(self, texts: Sequence[Document]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per text its states at the exit, and those of the last layer where it counts.

        The target is frozen: what it said of a text once is kept while there is `ROOM`.
        """
        keys = [(start, tuple(tokens)) for tokens, start in texts]
        fresh: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        new = [text for text, key in zip(texts, keys, strict=True) if key not in self._known]
        if new:
            ids, _ = padded([tokens for tokens, _ in new], 0)
            positions, mask = self._layout(*ids.shape)
            hidden = self._access.embed(ids.to(self.target.device), positions)
            depth, layers = self.adapter.depth, self._access.layers
            shallow = self._access.run(hidden, 0, depth, mask, positions)
            last = self._access.run(shallow, depth, layers, mask, positions)
            for row, (tokens, start) in enumerate(new):
                count = len(tokens)
                pair = shallow[row, :count].clone(), last[row, start : count - 1].clone()
                fresh[start, tuple(tokens)] = pair
        out = [fresh.get(key) or self._known[key] for key in keys]
        for key, pair in fresh.items():
            self._room -= sum(state.nbytes for state in pair)
            if self._room > 0:
                self._known[key] = pair
        return out

    def _layout(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and mask of so many texts, padded on the right, where no token sees it."""
        device, dtype = self.target.device, self.target.dtype
        positions = torch.arange(width, device=device).expand(rows, width)
        mask = torch.full((width, width), torch.finfo(dtype).min, dtype=dtype, device=device)
        return positions, mask.triu(1)[None, None]

    @torch.no_grad()
    def agreement(self, texts: Sequence[Document]) -> dict[str, Any]:
        """How often the adapter's most likely token is the target's: "top1"."""
        hits = []
        for first in range(0, len(texts), self.settings.batch):
            logits, taught = self._both(texts[first : first + self.settings.batch])
            hits.append(logits.argmax(-1) == taught.argmax(-1))
        return {"top1": round(float(torch.cat(hits).double().mean()), 4)}
