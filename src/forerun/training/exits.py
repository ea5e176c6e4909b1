"""Training of exit heads, towards the last layer and not the text: a draft is accepted if the
model agrees with it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from forerun.errors import SettingError
from forerun.runtime.base import Rows
from forerun.runtime.heads import LightHeads, default_layers, shapes_of_head
from forerun.runtime.layers import ExitHeads, LogitLens
from forerun.runtime.states import check_depths
from forerun.training.fit import (
    Document,
    StatesTraining,
    TargetStates,
    frequent,
    layers_of_target,
)
from forerun.training.settings import TrainingSettings

SCALE_RATE = 0.04
"""Learning rate of a head's scale, as a multiple of rate × H."""


class ExitTrainer(StatesTraining):
    """Heads in training, all layers in one pass over the texts; they begin as the logit lens.

    Raises:
        SettingError: layers the model does not have or cannot exit after.
    """

    def __init__(self, target: Rows, settings: TrainingSettings, texts: Sequence[Document]) -> None:
        self._access = access = layers_of_target(target, settings.kind)
        asked = settings.layers or default_layers(access.layers)
        layers = check_depths(sorted(asked), access.layers)
        if layers[-1] == access.layers:
            raise SettingError(
                f"layer {layers[-1]} is the model's last and needs no head; exit layers are 1 to "
                f"{access.layers - 1}"
            )
        self._states = TargetStates(target.executor.module(), (*layers, access.layers))
        tokens = None
        if settings.vocab:  # what the last layer says most often, whatever stands in the texts
            self.settings = settings
            parts = self._batches(texts)
            likeliest = torch.cat([self._both(part)[1].argmax(-1) for part in parts])
            tokens = frequent(likeliest, settings.vocab, access)
        device, shapes = access.unembedding.device, shapes_of_head(access.width)
        weights = {
            layer: {
                name: torch.nn.Parameter(torch.full(shape, float(name == "scale"), device=device))
                for name, shape in shapes.items()
            }
            for layer in layers
        }
        own = {f"{layer}.{name}": p for layer in layers for name, p in weights[layer].items()}
        self.heads = LightHeads(access, weights, tokens)
        # A bias is in units of the hidden state, whose size differs from layer to layer.
        sample = torch.cat(self._states.of(texts[:8]))
        self._sizes = dict(zip(layers, sample.float().pow(2).mean((0, 2)).sqrt().tolist(),
                               strict=False))  # fmt: skip
        super().__init__(access, self._states, own, settings, tokens)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """A step changes an output by at most rate × inputs, so rates fall as these grow."""
        width = self._access.width
        base = self.settings.lr or 0.25 / width
        groups = []
        for name, tensor in self.own.items():
            layer, _, part = name.partition(".")
            scales = {"bias": self._sizes[int(layer)], "scale": SCALE_RATE * width}
            rate, decay = base * scales.get(part, 1.0), 0.01 if tensor.dim() > 1 else 0.0
            groups.append({"params": [tensor], "lr": rate, "weight_decay": decay})
        return [torch.optim.AdamW(groups, betas=(0.9, 0.99))]

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        """Layer by layer, for the logits are large."""
        hidden, last = self._both(texts)
        teacher, best = None, last.argmax(-1)
        if self.settings.loss == "distill":
            teacher = last.float().softmax(-1)
            if self.vocabulary is not None:  # what is outside is spread evenly
                teacher = teacher[:, self.vocabulary]
                rest = (1 - teacher.sum(-1, keepdim=True)).clamp(min=0)
                teacher = teacher + rest / teacher.shape[-1]
        for i, layer in enumerate(self.heads.layers):
            logits = self.heads.logits(layer, hidden[:, i].float())
            if teacher is None:
                loss = self._cross_entropy(logits, best)
            else:
                log_probs = logits.float().log_softmax(-1)
                loss = F.kl_div(log_probs, teacher, reduction="batchmean")
            yield loss / len(self.heads.layers)

    @torch.no_grad()
    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, layers, H)` states where predictions count, and `(n, V)` logits of the target."""
        states = self._states.of(texts)
        parts = [own[text.start : -1] for own, text in zip(states, texts, strict=True)]
        hidden = torch.cat(parts)
        return hidden[:, :-1], self._access.logits(hidden[:, -1])

    @torch.no_grad()
    def agreement(self, texts: Sequence[Document]) -> dict[str, Any]:
        """How often the heads' most likely tokens are the last layer's, over held-out texts.

        Returns:
            "top1", the mean over the layers; "layers" and "lens", reports of the heads and of the
            model's own head in their places.
        """
        own = self.reports(self.heads, texts)
        return {
            "top1": round(sum(report["agreement"] for report in own) / len(own), 4),
            "layers": own,
            "lens": self.reports(LogitLens(self._access), texts),
        }

    @torch.no_grad()
    def reports(self, heads: ExitHeads, texts: Sequence[Document]) -> list[dict[str, Any]]:
        """How heads do after each exit "layer" on held-out positions.

        Returns:
            "agreement", the share of positions where the arg-max is the last layer's; "confidence",
            the mean top-1 probability, which of a calibrated head is its agreement; "error", the
            expected calibration error: mean distance of the two over ten bins of confidence.
        """
        right: list[list[torch.Tensor]] = [[] for _ in self.heads.layers]
        sure: list[list[torch.Tensor]] = [[] for _ in self.heads.layers]
        for hidden, last in map(self._both, self._batches(texts)):
            for i, layer in enumerate(self.heads.layers):
                top, index = heads.logits(layer, hidden[:, i]).float().softmax(-1).max(-1)
                token = index if heads.tokens is None else heads.tokens[index]
                sure[i].append(top.double().cpu())
                right[i].append((token == last.argmax(-1)).double().cpu())
        parts = zip(map(torch.cat, right), map(torch.cat, sure), strict=True)
        return [
            {"layer": n, **_calibration(*own)}
            for n, own in zip(self.heads.layers, parts, strict=True)
        ]

    def _form(self) -> dict[str, Any]:
        return self.heads.form


def _calibration(right: torch.Tensor, sure: torch.Tensor) -> dict[str, float]:
    bins = (sure * 10).long().clamp_(max=9)
    gaps = torch.zeros(10, dtype=torch.double).index_add_(0, bins, right - sure)
    error = gaps.abs().sum() / max(len(sure), 1)
    numbers = {"agreement": right.mean(), "confidence": sure.mean(), "error": error}
    return {name: round(float(number), 4) for name, number in numbers.items()}
