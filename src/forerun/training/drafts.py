"""Training of drafts that belong to a target: decoders on its encoder, `shared` and `block`.

The target is frozen. Both learn its distributions (forward KL) at every place of the texts; the
block drafter besides at the places of its queries, behind texts cut off at random. What all such
training has in common is `Training`.
"""

from __future__ import annotations

import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from forerun.checks import choice, whole
from forerun.errors import ModelError, SettingError, require
from forerun.runtime.base import Rows
from forerun.runtime.drafts import About, save_draft
from forerun.runtime.fingerprints import fingerprint
from forerun.runtime.grafts import graft, model_of, own_parameters
from forerun.runtime.placement import placement_of
from forerun.runtime.support import decoder_limit

CHECKPOINT = "training.pt"
LOG = "log.jsonl"
WINDOWS = 16
"""Batches' worth of texts that a batch of alike lengths is chosen from."""


@dataclass(frozen=True)
class Settings:
    """How a draft is trained.

    Args:
        kind: "shared" (token by token), "block" (a block in one pass), "kangaroo" (an adapter) or
            "medusa" (heads).
        layers: of the draft's decoder, ≥ 1; of kangaroo, of the target below the adapter; of
            medusa, residual blocks of a head (the paper: 1).
        width: of block: tokens proposed in a pass, ≥ 2; of medusa: heads, ≥ 1 (the paper advises
            at most 5).
        steps: optimiser steps, ≥ 1.
        batch: texts per step, ≥ 1.
        lr: peak learning rate; rises over a twentieth of the steps, falls to zero over all.
        anchors: of block: places per text behind which a block is learned, ≥ 1.
        seed: decides order and anchors.
        vocab: of medusa: how many tokens the heads can say, the most frequent in the texts; 0: all.
    """

    kind: str = "shared"
    layers: int = 1
    width: int = 8
    steps: int = 1000
    batch: int = 32
    lr: float = 1e-3
    anchors: int = 4
    seed: int = 0
    vocab: int = 0

    def __post_init__(self) -> None:
        choice("kind", self.kind, ["shared", "block", "kangaroo", "medusa"])
        for name in ("layers", "steps", "batch", "anchors"):
            whole(name, getattr(self, name), 1)
        whole("width", self.width, 1 if self.kind == "medusa" else 2)
        whole("vocab", self.vocab)
        only = self.kind == "medusa" or not self.vocab
        require(only, "vocab", self.vocab, f"0 for a draft of kind {self.kind}")
        require(0 < self.lr < 1, "lr", self.lr, "between 0 and 1")

    @property
    def on_encoder(self) -> bool:
        """Whether the draft reads the states of an encoder."""
        return self.kind in ("shared", "block")

    @property
    def block(self) -> int:
        """Tokens proposed in a pass."""
        return self.width if self.kind in ("block", "medusa") else 1


@dataclass(frozen=True)
class Text:
    """A source and what the target's decoder says or shall say of it, as token ids."""

    source: list[int]
    opening: list[int]
    """What the decoder begins with."""
    output: list[int]
    """Its text, with the end."""


@dataclass(frozen=True)
class _Batch:
    """Texts side by side, `(rows, width)` each; padded on the right."""

    states: BaseModelOutput
    read: torch.Tensor
    """`(rows, source)` 1 for a token of the source."""
    fed: torch.Tensor
    """What the decoder is fed: opening and output but its last token."""
    taught: torch.Tensor
    """`(rows, width, V)` the target's log-probabilities after each."""
    scored: torch.Tensor
    """Whether what follows is part of the output."""
    lengths: list[int]


T = TypeVar("T")
"""A text to learn from."""


class Training(ABC, Generic[T]):
    """A draft in training; `save` and `load` keep all of it.

    Args:
        target: the model to draft for; its parameters no longer take gradients.
        own: what is trained.
        settings: how.
    """

    def __init__(
        self, target: Any, own: Mapping[str, torch.nn.Parameter], settings: Settings
    ) -> None:
        self.settings, self.target, self.own = settings, target, dict(own)
        self.identity, self.texts = fingerprint(target), ""
        """Of the target, and of what a draft owes to its texts from the start."""
        target.requires_grad_(False)
        for parameter in self.own.values():
            parameter.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.own.values(), lr=settings.lr, betas=(0.9, 0.98))
        self.step, self.tokens, self.elapsed = 0, 0, 0.0

    @abstractmethod
    def _learn(self, texts: Sequence[T], rng: random.Random) -> tuple[torch.Tensor, int]:
        """The loss on some texts, and how many tokens that is of."""

    def _drawn(self, texts: Sequence[T], rng: random.Random) -> list[T]:
        """The texts of a step."""
        return rng.sample(list(texts), min(self.settings.batch, len(texts)))

    @abstractmethod
    def agreement(self, texts: Sequence[T]) -> dict[str, Any]:
        """How often the draft's most likely token is the target's, over held-out texts: "top1"."""

    def train(self, texts: Sequence[T]) -> Iterator[dict[str, Any]]:
        """Steps to the end of the settings; a record of each."""
        while self.step < self.settings.steps:
            began = time.perf_counter()
            rng = random.Random(f"{self.settings.seed}/{self.step}")
            batch = self._drawn(texts, rng)
            torch.manual_seed(rng.getrandbits(32))  # of dropout
            loss, count = self._learn(batch, rng)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.own.values(), 1.0)
            self.optimizer.param_groups[0]["lr"] = self.settings.lr * self._rate()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            took = time.perf_counter() - began
            self.step, self.tokens = self.step + 1, self.tokens + count
            self.elapsed += took
            yield {
                "step": self.step,
                "tokens": self.tokens,
                "loss": round(float(loss.detach()), 4),
                "tokens_per_second": round(count / took),
                "elapsed": round(self.elapsed, 1),
            }

    def _rate(self) -> float:
        share = (self.step + 1) / self.settings.steps
        return min(1.0, 20 * share) * max(0.0, 1 - share) ** 0.5

    def _trained(self, texts: int, agreement: dict[str, Any]) -> dict[str, Any]:
        """What is written beside a draft of its training."""
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "texts": texts,
            "seconds": round(self.elapsed, 1),
            "held_out": agreement,
        }

    def save(self, path: Path) -> None:
        """Write beside, then rename: a killed run never leaves half a checkpoint."""
        state = {
            "settings": asdict(self.settings),
            "target": [self.identity, self.texts],
            "own": {name: p.detach() for name, p in self.own.items()},
            "optimizer": self.optimizer.state_dict(),
            "counts": [self.step, self.tokens, self.elapsed],
        }
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        os.replace(beside, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            SettingError: it was begun with other settings (but for `steps`) or another target.
        """
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
        except Exception as error:  # whatever a torn file raises
            raise ModelError(f"cannot read the checkpoint {path}: {error}") from error
        mine, theirs = (
            {k: v for k, v in s.items() if k != "steps"}
            for s in (asdict(self.settings), state["settings"])
        )
        if state["target"] != [self.identity, self.texts] or mine != theirs:
            raise SettingError(
                f"{path} was begun with other settings or another target: {state['settings']}; "
                "use these, or another folder"
            )
        with torch.no_grad():
            for name, value in state["own"].items():
                self.own[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.elapsed = state["counts"]

    def export(self, folder: Path, texts: int, measured: dict[str, Any]) -> About:
        """Write the draft as it is, with what was measured of it."""
        settings = self.settings
        form: dict[str, Any] = {"layers": settings.layers}
        if settings.block > 1:
            form["width"] = settings.block
        trained = self._trained(texts, measured) | {"settings": asdict(settings)}
        made = About(settings.kind, self.identity, form, trained)
        save_draft(folder, made, self._tensors())
        return made

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What is saved: in bfloat16, half the size."""
        return {name: p.detach().to(torch.bfloat16) for name, p in self.own.items()}


class Trainer(Training[Text]):
    """A draft decoder in training.

    Args:
        target: the model to draft for.
        settings: how.
    """

    def __init__(self, target: Rows, settings: Settings) -> None:
        model = model_of(target, f"of kind {settings.kind}")
        torch.manual_seed(settings.seed)
        self.draft = graft(model, settings.layers, settings.block)
        super().__init__(model, own_parameters(self.draft), settings)
        decoder = self.draft.get_decoder()
        self._placement = placement_of(decoder, decoder_limit(model.config))
        self._vocab = target.vocab_size

    def _drawn(self, texts: Sequence[Text], rng: random.Random) -> list[Text]:
        """Of alike lengths: padding would take most of a step."""
        batch = self.settings.batch
        drawn = rng.sample(list(texts), min(WINDOWS * batch, len(texts)))
        drawn.sort(key=lambda text: len(text.output) + len(text.source))
        first = rng.randrange(max(1, len(drawn) - batch + 1))
        return drawn[first : first + batch]

    def _learn(self, texts: Sequence[Text], rng: random.Random) -> tuple[torch.Tensor, int]:
        self.draft.get_decoder().train()  # all else is the target's
        return self._loss(self._batch(texts), rng), sum(len(text.output) for text in texts)

    @torch.no_grad()
    def _batch(self, texts: Sequence[Text]) -> _Batch:
        device = self.target.device
        pad = self.target.config.pad_token_id or 0
        source, read = padded([text.source for text in texts], pad)
        fed = [[*text.opening, *text.output[:-1]] for text in texts]
        ids, there = padded(fed, pad)
        for row, text in enumerate(texts):
            there[row, : len(text.opening) - 1] = False
        source, read, ids = source.to(device), read.long().to(device), ids.to(device)
        states = self.target.get_encoder()(input_ids=source, attention_mask=read)
        known = BaseModelOutput(last_hidden_state=states.last_hidden_state)
        logits = self.target(
            encoder_outputs=known, attention_mask=read, decoder_input_ids=ids, use_cache=False
        ).logits
        taught = logits.float().log_softmax(-1)
        return _Batch(known, read, ids, taught, there.to(device), list(map(len, fed)))

    def _loss(self, batch: _Batch, rng: random.Random) -> torch.Tensor:
        """Forward KL per place."""
        if self.settings.block == 1:
            logits = self._say(batch, batch.fed, None)
            return divergence(logits[batch.scored], batch.taught[batch.scored])
        starts = self._anchors(batch, rng)
        logits, taught, scored = self._blocks(batch, starts)
        return divergence(logits[scored], taught[scored])

    def _anchors(self, batch: _Batch, rng: random.Random) -> list[list[int]]:
        """Per text the places behind which blocks are learned."""
        out = []
        for row, length in enumerate(batch.lengths):
            first = length - int(batch.scored[row].sum())
            places = range(first, length)
            out.append([rng.choice(places) for _ in range(self.settings.anchors)])
        return out

    def _blocks(
        self, batch: _Batch, starts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is said at every token and at the queries behind each anchor; what is taught there.

        A query sees the text up to its anchor, and the queries of its block before it.
        """
        rows, width = batch.fed.shape
        queries, count = self.settings.block - 1, len(starts[0])
        device = batch.fed.device
        asked = torch.arange(self._vocab, self._vocab + queries, device=device).repeat(rows, count)
        anchors = torch.tensor(starts, device=device)
        ahead = torch.arange(1, queries + 1, device=device)
        behind = (anchors[:, :, None] + ahead).flatten(1)  # places of the queries
        own = torch.arange(width, device=device).expand(rows, -1)
        places = torch.cat([own, behind], 1)
        block = torch.arange(count, device=device).repeat_interleave(queries)
        group = torch.cat([torch.full((width,), -1, device=device), block])
        upto = torch.cat([own, anchors.repeat_interleave(queries, 1)], 1)
        # A column is seen if it is text up to where a row's own text ends, or of the same block.
        text = (group < 0)[None, None] & (places[:, None] <= upto[:, :, None])
        same = (group[:, None] == group[None])[None] & (group >= 0)[None, None]
        seen = text | (same & (places[:, None] <= places[:, :, None]))
        logits = self._say(batch, torch.cat([batch.fed, asked], 1), (places, ~seen))
        inside = behind < torch.tensor(batch.lengths, device=device)[:, None]
        index = behind.clamp(max=width - 1)
        taught = batch.taught.gather(1, index[:, :, None].expand(-1, -1, self._vocab))
        return (
            logits,
            torch.cat([batch.taught, taught], 1),
            torch.cat([batch.scored, inside], 1),
        )

    def _say(
        self,
        batch: _Batch,
        ids: torch.Tensor,
        layout: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """`(rows, width, V)` logits of the draft; `layout` is places and what is hidden."""
        placed: AbstractContextManager[Any] = nullcontext(None)
        if layout is not None:
            places, hidden = layout
            placed = self._placement.placed(places, places, hidden)
        with placed as mask:
            return self.draft(
                encoder_outputs=batch.states,
                attention_mask=batch.read,
                decoder_input_ids=ids,
                decoder_attention_mask=mask,
                use_cache=False,
            ).logits.float()

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> dict[str, Any]:
        """How often the draft's most likely token is the target's, over held-out texts.

        Returns:
            "top1", at one token ahead; for blocks also "by_depth" and "accepted", the mean number
            of a block's tokens before the first that differs.
        """
        self.draft.get_decoder().eval()
        rng, hits, runs = random.Random(1), [], []
        for first in range(0, len(texts), self.settings.batch):
            batch = self._batch(texts[first : first + self.settings.batch])
            best = batch.taught.argmax(-1)
            if self.settings.block == 1:
                same = self._say(batch, batch.fed, None).argmax(-1) == best
                hits.append(same[batch.scored])
                continue
            starts = self._anchors(batch, rng)
            logits = self._blocks(batch, starts)[0]
            width = batch.fed.shape[1]
            top = logits.argmax(-1)
            for row, anchors in enumerate(starts):
                for i, at in enumerate(anchors):
                    begin = width + i * (self.settings.block - 1)
                    places = [at, *range(begin, begin + self.settings.block - 1)]
                    goal = [at + depth for depth in range(self.settings.block)]
                    inside = [g < batch.lengths[row] for g in goal]
                    runs.append(
                        [
                            float(top[row, p] == best[row, g]) if ok else float("nan")
                            for p, g, ok in zip(places, goal, inside, strict=True)
                        ]
                    )
        if self.settings.block == 1:
            return {"top1": round(float(torch.cat(hits).double().mean()), 4)}
        table = torch.tensor(runs, dtype=torch.float64)
        means = table.nanmean(0).tolist()
        depths = [round(v, 4) for v in means if not math.isnan(v)]  # no text is longer
        kept = table.nan_to_num(0.0).cumprod(1).sum(1).mean()
        return {"top1": depths[0], "by_depth": depths, "accepted": round(float(kept), 3)}


def divergence(logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Mean forward KL, nats, of `(n, V)` logits from log-probabilities that are taught."""
    return F.kl_div(logits.log_softmax(-1), taught, reduction="batchmean", log_target=True)


def padded(texts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rows, longest)` ids and whether each is a token."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    return ids, torch.tensor([[True] * len(t) + [False] * (width - len(t)) for t in texts])
