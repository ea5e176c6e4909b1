"""Training of Medusa heads on a frozen target (Medusa-1).

Head k learns the text's token k places behind the next one (section 2.2.1). In use it reads what
the target itself is writing, so texts that the target wrote teach it best.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import torch

from forerun.errors import SettingError
from forerun.runtime.base import Rows
from forerun.runtime.medusa import MedusaHeads, new_heads
from forerun.training.drafts import Settings, Training, padded
from forerun.training.exit_heads import frequent
from forerun.training.features import Document

SHARE = 0.8
"""A head's part of the loss, of the part of the head before it (the paper's λ_k = 0.8^k)."""
ROOM = 1 << 30
"""Bytes of the target's states that are kept."""


class MedusaTrainer(Training[Document]):
    """Heads in training. What the target says of a text is kept while there is `ROOM`.

    Args:
        target: the model to draft for.
        settings: how; its `width` is K, its `layers` are a head's blocks.
        texts: all of them: what is frequent there is what a small vocabulary holds.

    Raises:
        SettingError: no Hugging Face model without encoder, or more tokens than it has.
    """

    def __init__(self, target: Rows, settings: Settings, texts: Sequence[Document]) -> None:
        model = target.executor.module()
        if model is None or target.facts.source_limit is not None:
            raise SettingError("Medusa heads need a target that is a decoder-only Hugging Face "
                               "model")  # fmt: skip
        self._body = model.base_model
        vocab, tokens = target.vocab_size, None
        if settings.vocab:
            written = torch.tensor([token for ids, start in texts for token in ids[start + 1 :]])
            tokens = frequent(written, settings.vocab, vocab).to(model.device)
        torch.manual_seed(settings.seed)
        begun = new_heads(model, settings.width, settings.layers, tokens).weights
        own = {name: torch.nn.Parameter(tensor) for name, tensor in begun.items()}
        super().__init__(model, own, settings)
        self.heads = MedusaHeads({**own}, tokens)
        self._index = torch.arange(vocab, device=model.device)
        """Per token its index among those the heads can say, −1 outside."""
        if tokens is not None:
            self._index = torch.full_like(self._index, -1)
            self._index[tokens] = torch.arange(len(tokens), device=model.device)
            # Heads that have begun on one choice of tokens mean nothing on another.
            self.texts = hashlib.sha256(str(tokens.tolist()).encode()).hexdigest()[:16]
        self._room = ROOM
        self._read: dict[int, tuple[Document, torch.Tensor, torch.Tensor]] = {}
        """By the identity of a text, which is kept beside so that it stays one."""

    def _learn(self, texts: Sequence[Document], rng: random.Random) -> tuple[torch.Tensor, int]:
        hidden, ahead = self._states(texts)
        share = 1.0
        loss = 0.0 * self.own["0.unembedding"].sum()  # texts may be too short for any head
        for head in range(self.settings.width):
            share *= SHARE
            there = ahead[:, head] >= 0
            if not bool(there.any()):
                continue
            log_probs = self.heads.logits(head, hidden[there]).log_softmax(-1)
            goal = self._index[ahead[there, head]]
            at_goal = log_probs.gather(-1, goal.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            # A token that no head can say: any is as good, so that heads learn to be unsure.
            loss = loss - share * torch.where(goal >= 0, at_goal, log_probs.mean(-1)).mean()
        return loss, len(hidden)

    @torch.no_grad()
    def _states(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, H)` last states where predictions count, and `(n, K)` tokens from the second behind
        each on; −1 beyond the text."""
        states = {id(text): self._read[id(text)] for text in texts if id(text) in self._read}
        new = [text for text in texts if id(text) not in states]
        if new:
            ids, _ = padded([ids for ids, _ in new], 0)
            # Padding stands on the right, where no token before it sees it.
            last = self._body(input_ids=ids.to(self.target.device), use_cache=False)[0]
            for text, row in zip(new, last, strict=True):
                tokens, start = text
                count, heads = len(tokens) - 1 - start, self.settings.width
                behind = torch.full((count + heads + 1,), -1)
                behind[: count - 1] = torch.tensor(tokens[start + 2 :])
                ahead = behind.unfold(0, heads, 1)[:count].to(self.target.device)
                hidden = row[start : len(tokens) - 1].float().clone()
                states[id(text)] = text, hidden, ahead
                self._room -= hidden.nbytes + ahead.nbytes
                if self._room > 0:
                    self._read[id(text)] = states[id(text)]
        parts = [states[id(text)] for text in texts]
        return torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])

    @torch.no_grad()
    def agreement(self, texts: Sequence[Document]) -> dict[str, Any]:
        """How often each head's most likely token is the text's, over held-out texts.

        Returns:
            "top1" of the first head, "by_depth" of each, and "accepted", the mean number of heads
            that are right before the first that is not: what a chain gains where the target writes
            the text itself.
        """
        runs = []
        for first in range(0, len(texts), self.settings.batch):
            hidden, ahead = self._states(texts[first : first + self.settings.batch])
            hits = []
            for head in range(self.settings.width):
                top = self.heads.logits(head, hidden).argmax(-1)
                token = top if self.heads.tokens is None else self.heads.tokens[top]
                right = (token == ahead[:, head]).double()
                hits.append(torch.where(ahead[:, head] >= 0, right, torch.nan))
            runs.append(torch.stack(hits, -1).cpu())
        table = torch.cat(runs)
        depths = [round(float(v), 4) for v in table.nanmean(0).nan_to_num(0.0)]
        kept = table.nan_to_num(0.0).cumprod(1).sum(1).mean()
        return {"top1": depths[0], "by_depth": depths, "accepted": round(float(kept), 3)}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return self.heads.tensors
