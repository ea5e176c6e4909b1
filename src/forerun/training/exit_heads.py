"""Training of exit heads from cached features, all layers in one pass over them.

The base model is frozen. What an exit must say is what the last layer says, not what the text says:
a draft is accepted if the model agrees with it. So the goals are the last layer's, as its arg-max
(`hard`) or as its whole distribution (`distill`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from forerun.checks import choice, whole
from forerun.errors import require
from forerun.runtime.heads import KINDS, TrainedHeads, Weights, check_layers
from forerun.runtime.layers import ExitHeads, LayerAccess
from forerun.training.features import Features

CHECKPOINT = "training.pt"
BLOCK = 32
"""Neighbouring positions that are drawn together: a batch reads stretches, not single rows."""
WARM_UP = 0.02
SCALE_RATE = 0.04
"""Of the learning rate of a head's scale, which stands alone, to that of an input: rate × H."""

Tell = Callable[[float, float], None]
"""Told the share of the training that is done, in [0, 1], and the mean loss in nats."""


@dataclass(frozen=True)
class Settings:
    """How heads are trained.

    Args:
        head: "light" (an affine map before the model's own norm and unembedding) or "full" (an LM
            head per layer).
        rank: of the light map, ≥ 1; 0 is a full matrix.
        vocab: the heads can say only the so many tokens that the last layer says most often; 0: all
            of them. Asking an exit then costs less. Where the last layer says another token, they
            learn to be unsure: the goal is then every one of theirs alike.
        loss: "hard" (cross-entropy to the last layer's arg-max) or "distill" (forward KL from its
            distribution). Hard heads say how likely the last layer is to agree, which is what an
            exit by confidence asks, and agree more often; distilled ones are as unsure as the last
            layer itself is, which is closer to what it samples from.
        epochs: passes over the features, ≥ 1. The paper's 20 are for full heads.
        minutes: most minutes of training; the learning rate falls to zero in whichever is shorter.
        batch: positions per step, ≥ 32. Many small steps: over the same data, 256 does clearly
            better than 1024 on the shipped target.
        rate: peak learning rate of AdamW for matrices; None is `0.25 / H`. A step changes an
            output by at most rate × inputs, so the rate must fall as they grow. At the paper's
            `H` = 4096 that is 6e-5; its own is blank in the text we have.
        seed: of the order of batches and of low-rank maps.
    """

    head: str = "light"
    rank: int = 0
    vocab: int = 0
    loss: str = "hard"
    epochs: int = 4
    minutes: float | None = None
    batch: int = 256
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        choice("head", self.head, list(KINDS))
        choice("loss", self.loss, ["hard", "distill"])
        whole("rank", self.rank)
        whole("vocab", self.vocab)
        whole("epochs", self.epochs, 1)
        whole("batch", self.batch, BLOCK)
        whole("seed", self.seed)
        good = self.minutes is None or (math.isfinite(self.minutes) and self.minutes > 0)
        require(good, "minutes", self.minutes, "a number > 0")
        good = self.rate is None or (math.isfinite(self.rate) and self.rate > 0)
        require(good, "rate", self.rate, "a number > 0")
        require(not (self.rank and self.head == "full"), "rank", self.rank, "0 for full heads")


@dataclass(frozen=True)
class LayerReport:
    """How a head does on held-out positions."""

    layer: int
    agreement: float
    """Share of positions where its arg-max is the last layer's."""
    confidence: float
    """Mean top-1 probability; a calibrated head's equals its agreement."""
    error: float
    """Expected calibration error: mean distance of the two over ten bins of confidence."""


def new_heads(access: LayerAccess, features: Features, settings: Settings) -> TrainedHeads:
    """Heads that say what the logit lens says, ready to be trained (float32)."""
    width = access.width
    require(settings.rank <= width, "rank", settings.rank, f"at most the hidden size, {width}")
    layers = check_layers(list(features.hidden), access.layers)
    make = torch.Generator().manual_seed(settings.seed)
    device = access.unembedding.device
    weights: Weights = {}
    tokens = frequent(features.top, settings.vocab, len(access.unembedding)).to(device)
    start = _lens_matrix(access) if settings.head == "full" else {}
    if settings.vocab:
        start = {name: tensor[tokens] for name, tensor in start.items()}
    for layer in layers:
        if settings.head == "full":
            own = {name: tensor.clone() for name, tensor in start.items()}
        elif settings.rank:
            down = torch.randn(settings.rank, width, generator=make) / width**0.5
            own = {"down": down, "up": torch.zeros(width, settings.rank)}
        else:
            own = {"weight": torch.zeros(width, width)}
        if settings.head == "light":
            own |= {"bias": torch.zeros(width), "scale": torch.ones(1)}
        weights[layer] = {n: t.to(device, torch.float32).requires_grad_() for n, t in own.items()}
    return KINDS[settings.head](access, weights, tokens=tokens if settings.vocab else None)


def frequent(top: torch.Tensor, count: int, vocab: int) -> torch.Tensor:
    """Ids, rising, of the `count` most frequent tokens in `top`; raises if there are not so many.

    >>> frequent(torch.tensor([4, 4, 0, 2, 2, 1]), 2, vocab=5).tolist()
    [2, 4]
    """
    require(count <= vocab, "vocab", count, f"at most the model's vocabulary, {vocab}")
    seen = torch.bincount(top.long(), minlength=vocab)
    return seen.argsort(descending=True, stable=True)[:count].sort().values


@torch.no_grad()
def _lens_matrix(access: LayerAccess) -> dict[str, torch.Tensor]:
    """Norm and unembedding as one affine map of hidden states of unit RMS.

    Exact for an RMS norm. A layer norm also centres: nearly so, and a start is all it has to be.
    """
    like = access.unembedding
    width = like.shape[1]
    zero = torch.zeros(1, width, dtype=like.dtype, device=like.device)
    bias = access.logits(zero)[0].float()
    units = torch.eye(width, dtype=like.dtype, device=like.device) * width**0.5
    return {"weight": ((access.logits(units).float() - bias).T / width**0.5), "bias": bias}


def train(
    access: LayerAccess,
    features: Features,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    tell: Tell = lambda share, loss: None,
    stop_after: int | None = None,
) -> TrainedHeads:
    """Train heads for every layer the features have.

    Args:
        access: the model, frozen.
        features: from `forerun.training.features.collect`.
        settings: how.
        checkpoint: a file to save to, when interrupted and every minute, and to go on from if it is
            of the same features and settings.
        tell: told about progress.
        stop_after: leave at that step, as an interruption would (for tests).

    Returns:
        Heads with bfloat16 weights: half the size, and a rounding far below what training leaves
        undecided.

    Raises:
        SettingError: a rank above the hidden size.
        KeyboardInterrupt: after the checkpoint is saved.
    """
    heads = new_heads(access, features, settings)
    run = _Run(heads, features, settings)
    if checkpoint is not None and checkpoint.is_file():
        run.restore(checkpoint)
    saved = time.monotonic()
    try:
        for share, loss in run.steps():
            tell(share, loss)
            if run.step == stop_after:
                raise KeyboardInterrupt
            if checkpoint is not None and time.monotonic() - saved > 60:
                run.save(checkpoint)
                saved = time.monotonic()
    except KeyboardInterrupt:
        if checkpoint is not None:
            run.save(checkpoint)
        raise
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    done: Weights = {
        layer: {name: tensor.detach().to(torch.bfloat16) for name, tensor in own.items()}
        for layer, own in heads.weights.items()
    }
    return type(heads)(access, done, tokens=heads.tokens)


class _Run:
    """Optimiser, place in the data, and time used."""

    def __init__(self, heads: TrainedHeads, features: Features, settings: Settings) -> None:
        self.heads, self.features, self.settings = heads, features, settings
        self.key = f"{features.key} {asdict(settings)}"
        self.step, self.elapsed = 0, 0.0
        vocab = len(heads.access.unembedding)
        self._places = torch.arange(vocab, device=heads.access.unembedding.device)
        """Per token its place among those the heads can say, −1 if it is none of them."""
        if heads.tokens is not None:
            self._places = torch.full_like(self._places, -1)
            self._places[heads.tokens] = torch.arange(len(heads.tokens), device=heads.tokens.device)
        width = heads.access.width
        base = settings.rate or 0.25 / width
        groups = []
        for layer, own in heads.weights.items():
            # A bias is in units of the hidden state, whose size differs from layer to layer.
            size = float(features.hidden[layer][: 64 * BLOCK].float().pow(2).mean().sqrt())
            for name, tensor in own.items():
                rate = base * width / tensor.shape[1] if name == "up" else base
                if heads.kind == "light":
                    rate *= {"bias": size, "scale": SCALE_RATE * width}.get(name, 1.0)
                decay = 0.01 if heads.kind == "light" and tensor.dim() > 1 else 0.0
                groups.append({"params": [tensor], "lr": rate, "weight_decay": decay})
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def steps(self) -> Iterator[tuple[float, float]]:
        """Train to the end, yielding (share done, mean loss) after every step."""
        settings, count = self.settings, self.features.count
        blocks = -(-count // BLOCK)
        per_batch = min(settings.batch // BLOCK, blocks)
        per_epoch = -(-blocks // per_batch)
        total = settings.epochs * per_epoch
        limit = math.inf if settings.minutes is None else 60 * settings.minutes
        order, epoch = torch.empty(0), -1
        while (share := max(self.step / total, self.elapsed / limit)) < 1:
            began = time.perf_counter()
            if self.step // per_epoch != epoch:
                epoch = self.step // per_epoch
                make = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
                order = torch.randperm(blocks, generator=make)
            at = self.step % per_epoch * per_batch
            rows = (order[at : at + per_batch, None] * BLOCK + torch.arange(BLOCK)).flatten()
            loss = self._learn(rows[rows < count], min(1.0, share / WARM_UP + 0.05, 1 - share))
            self.step += 1
            self.elapsed += time.perf_counter() - began
            yield min(1.0, max(self.step / total, self.elapsed / limit)), loss

    def _learn(self, rows: torch.Tensor, factor: float) -> float:
        """One step of every layer's head; layer by layer, for the logits are large."""
        access, features = self.heads.access, self.features
        device, dtype = access.unembedding.device, access.unembedding.dtype
        goal = self._places[features.top[rows].to(device, torch.long)]
        teacher = None
        if self.settings.loss == "distill":
            with torch.no_grad():
                last = features.last[rows].to(device, dtype)
                teacher = self._teach(access.logits(last).float().softmax(-1))
        total = 0.0
        for layer in self.heads.layers:
            hidden = features.hidden[layer][rows].to(device, torch.float32)
            logits = self.heads.logits(layer, hidden).float()
            said = logits.log_softmax(-1)
            if teacher is not None:
                loss = F.kl_div(said, teacher, reduction="batchmean")
            else:
                known = said.gather(-1, goal.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                loss = -torch.where(goal >= 0, known, said.mean(-1)).mean()
            own = list(self.heads.weights[layer].values())
            # Of these alone: the model's own weights are frozen and get no gradient.
            for tensor, slope in zip(own, torch.autograd.grad(loss, own), strict=True):
                tensor.grad = slope
            total += float(loss.detach())
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / len(self.heads.layers)

    def _teach(self, last: torch.Tensor) -> torch.Tensor:
        """The last layer's probabilities over the heads' tokens; the rest is spread evenly."""
        if self.heads.tokens is None:
            return last
        known = last[:, self.heads.tokens]
        return known + (1 - known.sum(-1, keepdim=True)).clamp(min=0) / known.shape[-1]

    def save(self, path: Path) -> None:
        """Beside, then renamed: there is never half a checkpoint."""
        state = {
            "key": self.key,
            "step": self.step,
            "elapsed": self.elapsed,
            "optimizer": self.optimizer.state_dict(),
            "weights": {
                layer: {name: tensor.detach() for name, tensor in own.items()}
                for layer, own in self.heads.weights.items()
            },
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        beside.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, if it is of the same training."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # a damaged file: whatever it raises, train from the start
            return
        if not isinstance(state, dict) or state.get("key") != self.key:
            return
        with torch.no_grad():
            for layer, own in self.heads.weights.items():
                for name, tensor in own.items():
                    tensor.copy_(state["weights"][layer][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed = state["step"], state["elapsed"]


@torch.inference_mode()
def evaluate(
    access: LayerAccess,
    heads: ExitHeads,
    features: Features,
    layers: Sequence[int],
    batch: int = 1024,
) -> list[LayerReport]:
    """Agreement with the last layer, and calibration, of the heads after each of `layers`."""
    like = access.unembedding
    reports = []
    for layer in layers:
        agree, confidence = [], []
        for at in range(0, features.count, batch):
            hidden = features.hidden[layer][at : at + batch].to(like.device, like.dtype)
            top, place = heads.logits(layer, hidden).float().softmax(-1).max(-1)
            token = place if heads.tokens is None else heads.tokens[place]
            confidence.append(top.cpu())
            agree.append(token.cpu() == features.top[at : at + batch])
        right, sure = torch.cat(agree).double(), torch.cat(confidence).double()
        bins = (sure * 10).long().clamp_(max=9)
        gaps = torch.zeros(10, dtype=torch.double).index_add_(0, bins, right - sure)
        numbers = (right.mean(), sure.mean(), gaps.abs().sum() / len(sure))
        reports.append(LayerReport(layer, *(round(float(number), 4) for number in numbers)))
    return reports
