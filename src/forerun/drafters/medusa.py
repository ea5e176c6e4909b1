"""`medusa`: heads on the target's last hidden state draft; made by train-draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.checks import Count
from forerun.drafters.base import Drafter, Proposal, StepContext, Texts, TrainedDraft
from forerun.drafters.stepping import by_place, step_by_step
from forerun.runtime.base import Rows
from forerun.runtime.drafts import spread
from forerun.runtime.heads import MEDUSA, MedusaHeads, load_medusa
from forerun.runtime.layers import LayerAccess
from forerun.runtime.support import model_on_torch


class MedusaDrafter(Drafter):
    """One head per drafted token, all on the state of the token before the newest.

    That state is left over from the pass that chose the newest token, so drafting feeds nothing.

    Args:
        target: its executor leaves states; the engine verifies with it.
        access: its layers, whose final norm the heads read through.
        heads: the heads.
        width: how many of them are asked at most.
    """

    def __init__(self, target: Rows, access: LayerAccess, heads: MedusaHeads, width: int) -> None:
        self.target: Rows = target
        self._states = target.executor.tap([access.layers])
        self._access, self._heads, self._width = access, heads, width
        self.seconds = 0.0

    def ratio(self, target: Rows) -> float:
        """Weights that a pass of the target reads over those of one head."""
        own = sum(t.numel() for n, t in self._heads.weights.items() if n.startswith("0."))
        return target.facts.weights / own if target.facts.weights else 5.0

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        ends = [max(len(text or ()) - 1, 1) for text in texts]
        left = [self._states.read(row, end - 1, end) for row, end in enumerate(ends)]
        known = [text if len(own) else None for text, own in zip(texts, left, strict=True)]
        if not any(known):
            return Proposal.none(len(texts))
        # A row without a state, which drafts nothing, has zeros.
        padded = torch.nn.utils.rnn.pad_sequence(left, batch_first=True)[:, 0]
        hidden, vocab = self._access.norm(padded), self.target.vocab_size

        def ask(head: int, texts: Texts) -> torch.Tensor:
            began = time.perf_counter()
            logits = spread(self._heads.logits(head, hidden), self._heads.tokens, vocab)
            self.seconds += time.perf_counter() - began
            return logits

        return step_by_step(by_place(ask), known, [min(n, self._width) for n in most], guide)


@dataclass(frozen=True)
class Medusa(TrainedDraft):
    """Medusa: heads on the target's last hidden state say the tokens after the next; no model.

    Args:
        heads: how many are asked at most, ≥ 1; None: all (the paper trains 5, and so do we unless
            told otherwise).

    Reference: Cai et al. 2024 (Medusa) [medusa2024].
    """

    on_torch = True

    heads: Count | None = None

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        model = model_on_torch(target, MEDUSA)
        heads = load_medusa(model, self.folder(target.facts.name))
        count = heads.count if self.heads is None else min(self.heads, heads.count)
        return MedusaDrafter(target, LayerAccess(model), heads, count)
