"""Training of Medusa heads on a frozen target (Medusa-1).

Head k learns the text's token k places behind the next one (section 2.2.1). In use it reads what
the target itself is writing, so texts that the target wrote teach it best.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from forerun.runtime.base import Rows
from forerun.runtime.medusa import MedusaHeads, new_heads
from forerun.training.fit import (
    Document,
    StatesTraining,
    TargetStates,
    cut,
    layers_of_target,
)
from forerun.training.settings import TrainingSettings

SHARE = 0.8
"""A head's part of the loss, of the part of the head before it (the paper's λ_k = 0.8^k)."""


class MedusaTrainer(StatesTraining):
    """Heads in training."""

    def __init__(self, target: Rows, settings: TrainingSettings, texts: Sequence[Document]) -> None:
        access = layers_of_target(target, settings.kind)
        tokens, model = cut(texts, settings.vocab or 0, access), access.model
        torch.manual_seed(settings.seed)
        self._heads = int(settings.width or 0)
        begun = new_heads(model, self._heads, settings.depth, tokens).weights
        own = {name: torch.nn.Parameter(tensor) for name, tensor in begun.items()}
        states = TargetStates(model, (access.layers,))
        super().__init__(access, states, own, settings, tokens)
        self.heads = MedusaHeads({**own}, tokens)

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        hidden, ahead = self._both(texts)
        yield 0.0 * self.own["0.unembedding"].sum()  # texts may be too short for any head
        for head in range(self._heads):
            there = ahead[:, head] >= 0
            if bool(there.any()):
                loss = self._cross_entropy(
                    self.heads.logits(head, hidden[there]), ahead[there, head]
                )
                yield SHARE ** (head + 1) * loss

    @torch.no_grad()
    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, H)` last states where predictions count, and `(n, K)` tokens from the second behind
        each on; −1 beyond the text."""
        hidden, ahead = [], []
        for (tokens, start, _), states in zip(texts, self._states.of(texts), strict=True):
            count = len(tokens) - 1 - start
            behind = torch.full((count + self._heads + 1,), -1)
            behind[: count - 1] = torch.tensor(tokens[start + 2 :])
            ahead.append(behind.unfold(0, self._heads, 1)[:count])
            hidden.append(self._access.norm(states[start:-1, 0]).float())
        return torch.cat(hidden), torch.cat(ahead).to(self.target.device)

    def _right(self, texts: Sequence[Document]) -> torch.Tensor:
        """What a chain gains where the target writes the text itself."""
        hidden, ahead = self._both(texts)
        hits = []
        for head in range(self._heads):
            top = self.heads.logits(head, hidden).argmax(-1)
            token = top if self.vocabulary is None else self.vocabulary[top]
            right = (token == ahead[:, head]).double()
            hits.append(torch.where(ahead[:, head] >= 0, right, torch.nan))
        return torch.stack(hits, -1)
