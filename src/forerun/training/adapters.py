"""Training of Kangaroo's adapter: the last layer's distribution from a shallow layer's states.

The loss is forward KL at every place that counts, which has the gradient of the paper's
cross-entropy (section 3.1); the target's head stays as it is, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from forerun.runtime.adapters import Adapter
from forerun.runtime.base import Rows
from forerun.training.fit import (
    Document,
    StatesTraining,
    TargetStates,
    divergence,
    layers_of_target,
)
from forerun.training.settings import TrainingSettings


class AdapterTrainer(StatesTraining):
    """An adapter in training."""

    def __init__(
        self, target: Rows, settings: TrainingSettings, texts: Sequence[Document] = ()
    ) -> None:
        access = layers_of_target(target, settings.kind)
        self.adapter = Adapter(access, settings.depth)
        states = TargetStates(access.model, (settings.depth, access.layers))
        super().__init__(access, states, dict(self.adapter.named_parameters()), settings)

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        yield divergence(*self._both(texts))

    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, V)` logits of the adapter, and log-probabilities of the target, where it counts."""
        states, counts = self._states.of(texts), self._scored(texts)
        shallow = torch.nn.utils.rnn.pad_sequence([own[:, 0] for own in states], batch_first=True)
        width = shallow.shape[1]
        positions = torch.arange(width, device=shallow.device).expand(len(texts), width)
        lowest = torch.finfo(shallow.dtype).min
        mask = torch.full((width, width), lowest, dtype=shallow.dtype, device=shallow.device)
        adapted = self.adapter(self._access, shallow, mask.triu(1)[None, None], positions)[counts]
        with torch.no_grad():
            last = [own[text.start : -1, 1] for own, text in zip(states, texts, strict=True)]
            taught = self._access.logits(torch.cat(last))
        return self._access.unembed(adapted).float(), taught.float().log_softmax(-1)

    def _right(self, texts: Sequence[Document]) -> torch.Tensor:
        logits, taught = self._both(texts)
        return (logits.argmax(-1) == taught.argmax(-1))[:, None]
