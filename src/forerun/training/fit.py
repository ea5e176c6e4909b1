"""Training of drafts that belong to a target: what all kinds have in common.

The target is frozen. A kind of draft says what it learns (`Training`); the loop, its checkpoints
and what is written at the end are the same for all.
"""

import hashlib
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.nn import functional as F

from forerun.cache import replacing
from forerun.errors import ModelError, SettingError, require
from forerun.runtime.base import Rows
from forerun.runtime.drafts import TOKENS, About, Tensors, fingerprint, save_draft
from forerun.runtime.layers import LayerAccess
from forerun.runtime.states import Taps
from forerun.runtime.support import model_on_torch
from forerun.training.settings import TRAINERS, TrainingSettings

CHECKPOINT = "training.pt"
ROOM = 1 << 30
"""Bytes of the target's states that are kept at least."""


class Document(NamedTuple):
    """A text to learn from."""

    ids: list[int]
    start: int = 0  # first position whose prediction counts: 0, or the last token of a prompt
    family: str = ""  # the kind of prompt it is an answer to, for figures

    @property
    def positions(self) -> int:
        """Predictions that count (its last token has no known successor)."""
        return max(len(self.ids) - 1 - self.start, 0)


T = TypeVar("T", bound=Any)
"""A text to learn from: a `Document`, or a pair of texts."""
Own = Mapping[str, torch.nn.Parameter]
"""What is trained, by name."""


class Training(ABC, Generic[T]):
    """A draft in training for a target's module, whose parameters no longer take gradients; `save`
    and `load` keep all of it. `tokens` `(V,)` are the rising ids of a vocabulary of its own."""

    def __init__(
        self, target: Any, own: Own, settings: TrainingSettings, tokens: torch.Tensor | None = None
    ) -> None:
        self.settings, self.target, self.own, self.vocabulary = settings, target, dict(own), tokens
        self.identity = fingerprint(target)
        target.requires_grad_(False)
        for parameter in self.own.values():
            parameter.requires_grad_()
        self.optimizers = self._optimizers()
        self._peaks = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.step, self.tokens, self.elapsed = 0, 0, 0.0

    @abstractmethod
    def _losses(self, texts: Sequence[T], rng: random.Random) -> Iterator[torch.Tensor]:
        """Losses on the texts of a step; the gradients of each are taken before the next."""

    def _right(self, texts: Sequence[T]) -> torch.Tensor:
        """`(places, depths)` whether the draft's most likely tokens are the target's: 1 or 0, NaN
        where there is none; what `agreement` is made of, unless it is another's."""
        raise NotImplementedError

    @torch.no_grad()
    def agreement(self, texts: Sequence[T]) -> dict[str, Any]:
        """How often that is so over held-out texts.

        Returns:
            "top1" of the first depth, "by_depth" of each, and "accepted", the mean number that are
            right before the first that is not.
        """
        return self._measured([(part, self._right(part).cpu()) for part in self._batches(texts)])

    def _measured(self, parts: Sequence[tuple[Sequence[T], torch.Tensor]]) -> dict[str, Any]:
        """What `agreement` returns, of texts that ran together and what was right there."""
        right = torch.cat([own for _, own in parts]).double()
        means = right.nanmean(0).nan_to_num(0.0).tolist()
        kept = right.nan_to_num(0.0).cumprod(1).sum(1).mean()
        return {
            "top1": round(means[0], 4),
            "by_depth": [round(mean, 4) for mean in means],
            "accepted": round(float(kept.nan_to_num(0.0)), 3),
        }

    def _batches(self, texts: Sequence[T]) -> Iterator[Sequence[T]]:
        """Texts in their order, as many together as in a step."""
        size = self.settings.batch or 1
        for first in range(0, len(texts), size):
            yield texts[first : first + size]

    def _drawn(self, texts: Sequence[T], rng: random.Random) -> list[T]:
        return rng.sample(list(texts), min(self.settings.batch or 1, len(texts)))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Each group's rate is its peak."""
        rate = self.settings.lr or 0.0
        return [torch.optim.AdamW(self.own.values(), lr=rate, betas=(0.9, 0.98))]

    def _rate(self, share: float) -> float:
        """Learning rate over its peak when that share of the steps is done."""
        return min(1.0, 20 * share) * max(0.0, 1 - share) ** 0.5

    def train(self, texts: Sequence[T]) -> Iterator[dict[str, Any]]:
        """Steps to the end of the settings; a record of each."""
        while self.step < self.settings.steps:
            began = time.perf_counter()
            rng = random.Random(f"{self.settings.seed}/{self.step}")
            batch = self._drawn(texts, rng)
            torch.manual_seed(rng.getrandbits(32))  # of dropout
            total = 0.0
            for loss in self._losses(batch, rng):
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(self.own.values(), 1.0)
            rate = self._rate((self.step + 1) / self.settings.steps)
            for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            took, count = time.perf_counter() - began, sum(text.positions for text in batch)
            self.step, self.tokens = self.step + 1, self.tokens + count
            self.elapsed += took
            yield {
                "step": self.step,
                "tokens": self.tokens,
                "loss": round(total, 4),
                "tokens_per_second": round(count / took),
                "elapsed": round(self.elapsed, 1),
            }

    def save(self, path: Path) -> None:
        state = {
            "of": self._of(),
            "own": {name: p.detach() for name, p in self.own.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counts": [self.step, self.tokens, self.elapsed],
        }
        with replacing(path) as beside:
            torch.save(state, beside)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; `SettingError` if it was begun with other settings (but for
        `steps`) or another target."""
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
            of, own, counts = state["of"], state["own"], state["counts"]
        except Exception as error:  # whatever a torn file raises
            raise ModelError(f"cannot read the checkpoint {path}: {error}") from error
        if of != self._of():
            raise SettingError(
                f"{path} was begun with other settings, texts or another target: {of}; use these, "
                "or another folder"
            )
        with torch.no_grad():
            for name, value in own.items():
                self.own[name].copy_(value)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.elapsed = counts

    def _of(self) -> dict[str, Any]:
        """What a checkpoint must share with a training that goes on with it."""
        how = asdict(replace(self.settings, steps=1))
        how["layers"] = list(how["layers"])
        # A draft that has begun on one choice of tokens means nothing on another.
        ids = "" if self.vocabulary is None else str(self.vocabulary.tolist())
        digest = hashlib.sha256(ids.encode()).hexdigest()[:16]
        return {"target": self.identity, "tokens": digest, **how}

    def export(self, folder: Path, texts: int, measured: dict[str, Any], target: str = "") -> About:
        """Write the draft as it is, with what was measured of it and its target's name."""
        trained = {
            "target_name": target,
            "steps": self.step,
            "tokens": self.tokens,
            "texts": texts,
            "seconds": round(self.elapsed, 1),
            "held_out": measured,
            "settings": asdict(self.settings),
        }
        about = About(self.settings.kind, self.identity, self._form(), trained)
        self._write(folder, about)
        return about

    def _write(self, folder: Path, about: About) -> None:
        tokens = {} if self.vocabulary is None else {TOKENS: self.vocabulary.to(torch.int32)}
        save_draft(folder, about, {**self._tensors(), **tokens})

    def _form(self) -> dict[str, Any]:
        """What the drafter must know of the draft's form."""
        return {"layers": self.settings.depth, "width": self.settings.width}

    def _tensors(self) -> Tensors:
        return {name: p.detach().to(torch.bfloat16) for name, p in self.own.items()}


class TargetStates:
    """What a frozen decoder-only target leaves of texts at some depths (`States`); kept while there
    is `room`."""

    def __init__(self, model: Any, depths: Sequence[int]) -> None:
        self._model, self._taps, self._count = model, Taps(model, depths), len(depths)
        self._held: dict[int, tuple[list[int], torch.Tensor]] = {}
        """By the identity of a text's ids, which are kept beside so that it stays one: wherever its
        predictions begin to count, its states are these."""
        self._room = room()

    @torch.no_grad()
    def of(self, texts: Sequence[Document]) -> list[torch.Tensor]:
        """Per text `(n, depths, H)` states of all its tokens."""
        every = [text.ids for text in texts]
        held = {id(ids): self._held[id(ids)] for ids in every if id(ids) in self._held}
        if new := [ids for ids in every if id(ids) not in held]:
            batch, _ = padded(new, 0)
            # Padding stands on the right, where no token before it sees it.
            with self._taps.open():
                self._model.base_model(input_ids=batch.to(self._model.device), use_cache=False)
            for ids, states in zip(new, self._taps.read(), strict=True):
                own = states[: len(ids)].unflatten(-1, (self._count, -1)).clone()
                held[id(ids)] = ids, own
                self._room -= own.nbytes
                if self._room > 0:
                    self._held[id(ids)] = ids, own
        return [held[id(ids)][1] for ids in every]


def room() -> int:
    """Bytes of states to keep: an eighth of the memory, for to read a text anew takes ten times as
    long as to learn from it."""
    try:
        return max(ROOM, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
    except (AttributeError, ValueError):  # Windows does not say
        return ROOM


class StatesTraining(Training[Document]):
    """A draft in training that reads the hidden states of a decoder-only target.

    A vocabulary of its own is counted in `texts`; `SettingError` if the target is none that torch
    runs, or does not have the depths or the vocabulary of the settings, `UnsupportedModelError` if
    its layers cannot be called one by one.
    """

    def __init__(
        self, target: Rows, settings: TrainingSettings, texts: Sequence[Document] = ()
    ) -> None:
        model = model_on_torch(target, f"a draft of kind {settings.kind}")
        self.settings, self._access = settings, LayerAccess(model)
        access = self._access
        self.depths = tuple(self._read(access.layers))
        self._states = TargetStates(access.model, sorted({*self.depths, access.layers}))
        tokens = self._tokens(texts)
        every = torch.arange(len(access.unembedding), device=access.unembedding.device)
        self._index = every if tokens is None else torch.full_like(every, -1)
        """`(V,)` per token of the target its place in the draft's vocabulary, −1 if it has none."""
        if tokens is not None:
            self._index[tokens] = every[: len(tokens)]
        torch.manual_seed(settings.seed)
        super().__init__(access.model, self._begun(tokens, texts), settings, tokens)

    @abstractmethod
    def _read(self, layers: int) -> Sequence[int]:
        """Depths whose states the draft reads, of a target of L layers."""

    @abstractmethod
    def _begun(self, tokens: torch.Tensor | None, texts: Sequence[Document]) -> Own:
        """What is trained as it begins, with a vocabulary of these tokens."""

    def _tokens(self, texts: Sequence[Document]) -> torch.Tensor | None:
        """The draft's vocabulary; None: all of the target's."""
        return cut(texts, self.settings.vocab or 0, self._access)

    def _scored(self, texts: Sequence[Document]) -> torch.Tensor:
        """`(texts, longest)` whether the prediction after a token counts."""
        counts = torch.zeros(len(texts), max(len(text.ids) for text in texts), dtype=torch.bool)
        for row, text in enumerate(texts):
            counts[row, text.start : len(text.ids) - 1] = True
        return counts.to(self.target.device)

    def _scored_states(self, texts: Sequence[Document]) -> torch.Tensor:
        """`(n, depths, H)` of the target where predictions count; the last depth is L."""
        states = zip(self._states.of(texts), texts, strict=True)
        return torch.cat([own[text.start : -1] for own, text in states])

    def _cross_entropy(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, nats, of `(n, V)` logits of the draft's tokens to `(n,)` ids. Of a
        token that it cannot say any is as good, so that it learns to be unsure."""
        log_probs, goal = logits.float().log_softmax(-1), self._index[tokens]
        at_goal = log_probs.gather(-1, goal.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -torch.where(goal >= 0, at_goal, log_probs.mean(-1)).mean()


def trainer(target: Rows, settings: TrainingSettings, texts: Sequence[Any]) -> Training[Any]:
    """A draft of the kind of the settings, as it begins; `SettingError` if the target does not
    allow these, `UnsupportedModelError` if no such draft can be made for it."""
    module, name = TRAINERS[settings.kind].split(":")
    return getattr(import_module(f"forerun.training.{module}"), name)(target, settings, texts)


def cut(texts: Sequence[Document], count: int, access: LayerAccess) -> torch.Tensor | None:
    """Ids, rising, of the `count` tokens most frequent in what counts of texts; None of 0: all."""
    if not count:
        return None
    written = [token for text in texts for token in text.ids[text.start + 1 :]]
    return frequent(torch.tensor(written), count, access)


def frequent(tokens: torch.Tensor, count: int, access: LayerAccess) -> torch.Tensor:
    """Ids, rising, of the `count` most frequent tokens."""
    vocab = len(access.unembedding)
    require(count <= vocab, "vocab", count, f"at most the model's vocabulary, {vocab}")
    counts = torch.bincount(tokens.long(), minlength=vocab)
    chosen = counts.argsort(descending=True, stable=True)[:count].sort().values
    return chosen.to(access.unembedding.device)


def divergence(logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Mean forward KL, nats, of `(n, V)` logits from log-probabilities that are taught."""
    return F.kl_div(logits.log_softmax(-1), taught, reduction="batchmean", log_target=True)


def padded(texts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rows, longest)` ids and whether each is a token."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    return ids, torch.tensor([[True] * len(t) + [False] * (width - len(t)) for t in texts])
