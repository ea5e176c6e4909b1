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

    def _learn(self, texts: Sequence[Document], rng: random.Random) -> tuple[torch.Tensor, int]:
        said, taught = self._both(texts)
        return divergence(said, taught), len(said)

    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, V)` logits of the adapter, and log-probabilities of the target, where it counts."""
        access, device = self._access, self.target.device
        ids, counts = padded([ids for ids, _ in texts], 0)
        for row, (tokens, start) in enumerate(texts):
            counts[row, :start] = False
            counts[row, len(tokens) - 1 :] = False
        ids, counts = ids.to(device), counts.to(device)
        width, depth = ids.shape[1], self.adapter.depth
        positions = torch.arange(width, device=device).expand(len(texts), width)
        lowest = torch.finfo(self.target.dtype).min
        mask = torch.full((width, width), lowest, dtype=self.target.dtype, device=device)
        mask = mask.triu(1)[None, None]
        with torch.no_grad():
            shallow = access.run(access.embed(ids, positions), 0, depth, mask, positions)
            last = access.run(shallow, depth, access.layers, mask, positions)
            taught = access.logits(last[counts]).float().log_softmax(-1)
        said = access.unembed(self.adapter(access, shallow, mask, positions)[counts]).float()
        return said, taught

    @torch.no_grad()
    def agreement(self, texts: Sequence[Document]) -> dict[str, Any]:
        """How often the adapter's most likely token is the target's: "top1"."""
        hits = []
        for first in range(0, len(texts), self.settings.batch):
            said, taught = self._both(texts[first : first + self.settings.batch])
            hits.append(said.argmax(-1) == taught.argmax(-1))
        return {"top1": round(float(torch.cat(hits).double().mean()), 4)}
