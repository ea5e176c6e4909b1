"""Training of Medusa heads on a frozen target, from cached features (Medusa-1).

Head k learns the text's token k places behind the next one. In use it reads what the target itself
is writing, so texts that the target wrote teach it best.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.checks import whole
from forerun.errors import ModelError, SettingError, require
from forerun.runtime.fingerprints import fingerprint
from forerun.runtime.grafts import About
from forerun.runtime.layers import LayerAccess
from forerun.runtime.medusa import KIND, MedusaHeads, new_heads, save_medusa
from forerun.training.exit_heads import frequent
from forerun.training.features import Features

SHARE = 0.8
"""A head's part of the loss, of the part of the head before it (the paper's λ_k = 0.8^k)."""


@dataclass(frozen=True)
class Settings:
    """How Medusa heads are trained.

    Args:
        heads: K, ≥ 1; the paper advises at most 5.
        layers: residual blocks of each, ≥ 1; the paper has 1.
        vocab: how many of the target's most frequent tokens the heads can say; 0: all, as in the
            paper. Fewer make a head cheaper. Where the text has another, the goal is the uniform
            distribution, so that heads learn to be unsure.
        steps: optimiser steps, ≥ 1.
        batch: positions per step, ≥ 1.
        lr: peak learning rate of AdamW (the paper: 1e-3); rises over a twentieth of the steps,
            falls to zero over all.
        seed: decides the order.
    """

    heads: int = 5
    layers: int = 1
    vocab: int = 0
    steps: int = 1000
    batch: int = 256
    lr: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "layers", "steps", "batch"):
            whole(name, getattr(self, name), 1)
        whole("vocab", self.vocab)
        whole("seed", self.seed)
        require(0 < self.lr < 1, "lr", self.lr, "between 0 and 1")


class Trainer:
    """Heads in training; `save` and `load` keep all of it.

    Args:
        access: the target, frozen.
        model: its module.
        settings: how.
        features: what it learns from, with as many tokens ahead as there are heads.

    Raises:
        SettingError: more tokens in `vocab` than the model has.
    """

    def __init__(
        self, access: LayerAccess, model: Any, settings: Settings, features: Features
    ) -> None:
        self.settings, self.access, self.features = settings, access, features
        self.identity = fingerprint(model)
        device, vocab = access.unembedding.device, len(access.unembedding)
        tokens = None
        if settings.vocab:
            tokens = frequent(features.top, settings.vocab, vocab).to(device)
        self.heads = new_heads(model, settings.heads, settings.layers, tokens)
        for tensor in self.heads.weights.values():
            tensor.requires_grad_()
        self._index = torch.arange(vocab, device=device)
        """Per token its index among those the heads can say, −1 outside."""
        if tokens is not None:
            self._index = torch.full_like(self._index, -1)
            self._index[tokens] = torch.arange(len(tokens), device=device)
        own = self.heads.weights.values()
        self.optimizer = torch.optim.AdamW(own, lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.step, self.tokens, self.elapsed = 0, 0, 0.0

    def train(self) -> Iterator[dict[str, Any]]:
        """Steps to the end of the settings; a record of each."""
        count, batch = self.features.count, min(self.settings.batch, self.features.count)
        per_epoch, order, epoch = -(-count // batch), torch.empty(0), -1
        while self.step < self.settings.steps:
            began = time.perf_counter()
            if self.step // per_epoch != epoch:
                epoch = self.step // per_epoch
                make = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
                order = torch.randperm(count, generator=make)
            at = self.step % per_epoch * batch
            loss = self._learn(order[at : at + batch])
            took = time.perf_counter() - began
            self.step, self.tokens = self.step + 1, self.tokens + batch
            self.elapsed += took
            yield {
                "step": self.step,
                "tokens": self.tokens,
                "loss": round(loss, 4),
                "tokens_per_second": round(batch / took),
                "elapsed": round(self.elapsed, 1),
            }

    def _learn(self, rows: torch.Tensor) -> float:
        """One step; the mean loss of a head, in nats."""
        hidden, ahead = self._read(self.features, rows)
        share, losses, total = 1.0, [], 0.0
        for head in range(self.settings.heads):
            there = ahead[:, head] >= 0
            share *= SHARE
            if not bool(there.any()):
                continue
            log_probs = self.heads.logits(head, hidden[there]).log_softmax(-1)
            goal = self._index[ahead[there, head]]
            at_goal = log_probs.gather(-1, goal.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            loss = -torch.where(goal >= 0, at_goal, log_probs.mean(-1)).mean()
            losses.append(share * loss)
            total += float(loss.detach())
        if not losses:
            return 0.0
        torch.stack(losses).sum().backward()
        done = (self.step + 1) / self.settings.steps
        rate = min(1.0, 20 * done) * max(0.0, 1 - done) ** 0.5
        self.optimizer.param_groups[0]["lr"] = self.settings.lr * rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / len(losses)

    @torch.no_grad()
    def _read(self, features: Features, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, H)` states as heads read them, and `(n, K)` tokens ahead."""
        like = self.access.unembedding
        assert features.ahead is not None, "features with tokens ahead"
        hidden = self.access.normed(features.last[rows].to(like.device, like.dtype))
        return hidden.float(), features.ahead[rows].to(like.device, torch.long)

    @torch.no_grad()
    def agreement(self, features: Features) -> dict[str, Any]:
        """How often each head's most likely token is the text's, on held-out positions.

        Returns:
            "top1" of the first head, "by_depth" of each, and "accepted", the mean number of heads
            that are right before the first that is not: what a chain gains where the target writes
            the text itself.
        """
        runs = []
        for first in range(0, features.count, 1024):
            rows = torch.arange(first, min(first + 1024, features.count))
            hidden, ahead = self._read(features, rows)
            hits = []
            for head in range(self.settings.heads):
                top = self.heads.logits(head, hidden).argmax(-1)
                token = top if self.heads.tokens is None else self.heads.tokens[top]
                right = (token == ahead[:, head]).double()
                hits.append(torch.where(ahead[:, head] >= 0, right, torch.nan))
            runs.append(torch.stack(hits, -1).cpu())
        table = torch.cat(runs)
        depths = [round(float(v), 4) for v in table.nanmean(0).nan_to_num(0.0)]
        kept = table.nan_to_num(0.0).cumprod(1).sum(1).mean()
        return {"top1": depths[0], "by_depth": depths, "accepted": round(float(kept), 3)}

    def save(self, path: Path) -> None:
        """Write beside, then rename: a killed run never leaves half a checkpoint."""
        state = {
            "key": self._key(),
            "heads": {name: tensor.detach() for name, tensor in self.heads.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "counts": [self.step, self.tokens, self.elapsed],
        }
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        os.replace(beside, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ModelError: it cannot be read.
            SettingError: it was begun with other settings (but for `steps`), texts or target.
        """
        try:
            state = torch.load(path, map_location=self.access.unembedding.device, weights_only=True)
            key = state["key"]
        except Exception as error:  # whatever a torn file raises
            raise ModelError(f"cannot read the checkpoint {path}: {error}") from error
        if key != self._key():
            raise SettingError(
                f"{path} was begun with other settings, texts or another target: {key}; use "
                "these, or another folder"
            )
        with torch.no_grad():
            for name, value in state["heads"].items():
                self.heads.weights[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.elapsed = state["counts"]

    def _key(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.settings).items() if name != "steps"}
        return {"kind": KIND, "target": self.identity, "texts": self.features.key, **settings}

    def export(self, folder: Path, texts: int, found: dict[str, Any]) -> About:
        """Write the heads as they are, with what was measured of them."""
        trained = {
            "steps": self.step,
            "tokens": self.tokens,
            "texts": texts,
            "positions": self.features.count,
            "vocab": self.settings.vocab,
            "seconds": round(self.elapsed, 1),
            "held_out": found,
        }
        about = About(KIND, self.settings.layers, self.settings.heads, self.identity, trained)
        save_medusa(MedusaHeads(self.heads.weights, self.heads.tokens), about, folder)
        return about
