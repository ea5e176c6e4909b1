"""Training of drafts that read a frozen target's states once a token: Kangaroo's adapter, Medusa's
heads, and exit heads."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from forerun.errors import SettingError
from forerun.runtime.exits import Adapter
from forerun.runtime.heads import (
    FORM,
    UNEMBEDDING,
    ExitHeads,
    MedusaHeads,
    default_layers,
    new_heads,
    shapes_of_head,
)
from forerun.runtime.states import check_depths
from forerun.training.fit import Document, Own, StatesTraining, divergence, frequent

SHARE = 0.8
"""A Medusa head's part of the loss, of the part of the head before it (the paper's λ_k = 0.8^k)."""
SCALE_RATE = 0.04
"""Learning rate of an exit head's scale, as a multiple of rate × H."""


class AdapterTrainer(StatesTraining):
    """Kangaroo's adapter learns the last layer's distribution from a shallow layer's states.

    The loss is forward KL at every place that counts, which has the gradient of the paper's
    cross-entropy (section 3.1); the target's head stays as it is, too.
    """

    def _read(self, layers: int) -> Sequence[int]:
        self.adapter = Adapter(self._access, self.settings.depth)
        return [self.settings.depth]

    def _begun(self, tokens: torch.Tensor | None, texts: Sequence[Document]) -> Own:
        """In float32, whatever the target is in: its steps are lost in 16 bits."""
        return dict(self.adapter.float().named_parameters())

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        yield divergence(*self._both(texts))

    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, V)` logits of the adapter, and log-probabilities of the target, where it counts."""
        states = [own[:, 0] for own in self._states.of(texts)]
        shallow = torch.nn.utils.rnn.pad_sequence(states, batch_first=True).float()
        at = self._access.places(shallow)
        at = at._replace(positions=at.positions.expand(len(texts), -1))
        adapted = self.adapter(self._access, shallow, at)
        with torch.no_grad():
            taught = self._access.logits(self._scored_states(texts)[:, 1])
        adapted = adapted[self._scored(texts)].to(self._access.unembedding.dtype)
        logits = self._access.unembed(adapted)
        return logits.float(), taught.float().log_softmax(-1)

    def _right(self, texts: Sequence[Document]) -> torch.Tensor:
        logits, taught = self._both(texts)
        return (logits.argmax(-1) == taught.argmax(-1))[:, None]


class MedusaTrainer(StatesTraining):
    """Heads on a frozen target (Medusa-1): head k learns the text's token k places behind the next
    one (section 2.2.1). In use it reads what the target itself is writing, so texts that the target
    wrote teach it best."""

    def _read(self, layers: int) -> Sequence[int]:
        return [layers]

    def _begun(self, tokens: torch.Tensor | None, texts: Sequence[Document]) -> Own:
        self._heads = int(self.settings.width or 0)
        begun = new_heads(self._access.model, self._heads, self.settings.depth, tokens).weights
        own = {name: torch.nn.Parameter(tensor) for name, tensor in begun.items()}
        self.heads = MedusaHeads({**own}, tokens)
        return own

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        hidden, ahead = self._both(texts)
        yield 0.0 * self.own[f"0.{UNEMBEDDING}"].sum()  # texts may be too short for any head
        for head in range(self._heads):
            there = ahead[:, head] >= 0
            if bool(there.any()):
                logits = self.heads.logits(head, hidden[there])
                yield SHARE ** (head + 1) * self._cross_entropy(logits, ahead[there, head])

    @torch.no_grad()
    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, H)` last states where predictions count, and `(n, K)` tokens from the second behind
        each on; −1 beyond the text."""
        ahead = []
        for tokens, start, _ in texts:
            count = len(tokens) - 1 - start
            behind = torch.full((count + self._heads + 1,), -1)
            behind[: count - 1] = torch.tensor(tokens[start + 2 :])
            ahead.append(behind.unfold(0, self._heads, 1)[:count])
        hidden = self._access.norm(self._scored_states(texts)[:, 0]).float()
        return hidden, torch.cat(ahead).to(self.target.device)

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


class ExitTrainer(StatesTraining):
    """Exit heads of all layers in one pass over the texts; they begin as the logit lens, and learn
    towards the last layer and not the text: a draft is accepted if the model agrees with it."""

    def _read(self, layers: int) -> Sequence[int]:
        chosen = check_depths(sorted(self.settings.layers or default_layers(layers)), layers)
        if chosen[-1] == layers:
            raise SettingError(
                f"layer {layers} is the model's last and needs no head; exit layers are 1 to "
                f"{layers - 1}"
            )
        return chosen

    def _tokens(self, texts: Sequence[Document]) -> torch.Tensor | None:
        """What the last layer says most often, whatever stands in the texts."""
        if not self.settings.vocab:
            return None
        likeliest = [self._both(part)[1].argmax(-1) for part in self._batches(texts)]
        return frequent(torch.cat(likeliest), self.settings.vocab, self._access)

    def _begun(self, tokens: torch.Tensor | None, texts: Sequence[Document]) -> Own:
        access = self._access
        device, shapes = access.unembedding.device, shapes_of_head(access.width)
        weights = {
            layer: {
                name: torch.nn.Parameter(torch.full(shape, float(name == "scale"), device=device))
                for name, shape in shapes.items()
            }
            for layer in self.depths
        }
        self.heads = ExitHeads(access, weights, tokens)
        # A bias is in units of the hidden state, whose size differs from layer to layer.
        sizes = torch.cat(self._states.of(texts[:8])).float().pow(2).mean((0, 2)).sqrt()
        self._sizes = dict(zip(self.depths, sizes.tolist(), strict=False))
        return {f"{layer}.{name}": p for layer in weights for name, p in weights[layer].items()}

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
        for i, layer in enumerate(self.depths):
            logits = self.heads.logits(layer, hidden[:, i].float())
            if teacher is None:
                loss = self._cross_entropy(logits, best)
            else:
                log_probs = logits.float().log_softmax(-1)
                loss = F.kl_div(log_probs, teacher, reduction="batchmean")
            yield loss / len(self.depths)

    @torch.no_grad()
    def _both(self, texts: Sequence[Document]) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, layers, H)` states where predictions count, and `(n, V)` logits of the target."""
        hidden = self._scored_states(texts)
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
            "lens": self.reports(ExitHeads(self._access), texts),
        }

    @torch.no_grad()
    def reports(self, heads: ExitHeads, texts: Sequence[Document]) -> list[dict[str, Any]]:
        """How heads do after each exit "layer" on held-out positions.

        Returns:
            "agreement", the share of positions where the arg-max is the last layer's; "confidence",
            the mean top-1 probability, which of a calibrated head is its agreement; "error", the
            expected calibration error: mean distance of the two over ten bins of confidence.
        """
        right: list[list[torch.Tensor]] = [[] for _ in self.depths]
        sure: list[list[torch.Tensor]] = [[] for _ in self.depths]
        for hidden, last in map(self._both, self._batches(texts)):
            for i, layer in enumerate(self.depths):
                top, index = heads.logits(layer, hidden[:, i]).float().softmax(-1).max(-1)
                token = index if heads.tokens is None else heads.tokens[index]
                sure[i].append(top.double().cpu())
                right[i].append((token == last.argmax(-1)).double().cpu())
        parts = zip(map(torch.cat, right), map(torch.cat, sure), strict=True)
        return [
            {"layer": n, **_calibration(*own)} for n, own in zip(self.depths, parts, strict=True)
        ]

    def _form(self) -> dict[str, Any]:
        return {"head": FORM, "layers": list(self.depths)}


def _calibration(right: torch.Tensor, sure: torch.Tensor) -> dict[str, float]:
    bins = (sure * 10).long().clamp_(max=9)
    gaps = torch.zeros(10, dtype=torch.double).index_add_(0, bins, right - sure)
    error = gaps.abs().sum() / max(len(sure), 1)
    numbers = {"agreement": right.mean(), "confidence": sure.mean(), "error": error}
    return {name: round(float(number), 4) for name, number in numbers.items()}
