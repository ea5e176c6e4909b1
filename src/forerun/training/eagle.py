"""Training of the head behind the drafter `eagle`, through as many steps as a draft has.

It learns the target's distribution over its own vocabulary and the target's best token, at the
places of what the target wrote; steps after the first read the head's own outputs, as in use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from forerun.runtime.base import Rows
from forerun.runtime.drafts import Tensors, rounded
from forerun.runtime.eagle import HEAD, EagleHead
from forerun.runtime.states import check_depths
from forerun.training.fit import (
    Document,
    StatesTraining,
    TargetStates,
    cut,
    layers_of_target,
    padded,
    positions_of,
    runs_of,
)
from forerun.training.muon import Muon
from forerun.training.settings import TrainingSettings

STEPS = 3
WEIGHT = 0.8
"""Of a step's loss, over that of the step before."""
LEARNED = 0.5
"""Share of the places at which the second and later steps are learned."""
SOFT = 0.7
"""Share of the loss towards the target's distribution; the rest is towards its best token."""
MATRIX_RATE = 0.02
"""Peak learning rate of the matrices, by Muon; the settings' is that of the table and the norms."""


class EagleTrainer(StatesTraining):
    """A head in training.

    Raises:
        SettingError: depths or a vocabulary that the target does not have.
    """

    def __init__(self, target: Rows, settings: TrainingSettings, texts: Sequence[Document]) -> None:
        access = layers_of_target(target, settings.kind)
        count, vocab = access.layers, len(access.unembedding)
        spread = sorted({max(1, count // 3), max(1, 2 * count // 3), count})
        self.depths = check_depths(settings.layers or spread, count)
        tokens = cut(texts, min(settings.vocab or vocab, vocab), access)
        assert tokens is not None
        assert settings.width is not None
        torch.manual_seed(settings.seed)
        self.head = _new(access, settings.width, tokens, len(self.depths))
        wanted = sorted({*self.depths, count})
        self._columns = [wanted.index(depth) for depth in self.depths]
        states, own = TargetStates(access.model, wanted), dict(self.head.named_parameters())
        super().__init__(access, states, own, settings, tokens)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        table = self.own["embedding.weight"]
        matrices = [p for p in self.own.values() if p.dim() == 2 and p is not table]
        others = [p for p in self.own.values() if p.dim() == 1 or p is table]
        rate = self.settings.lr or 0.0
        return [
            Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.01),
        ]

    def _rate(self, share: float) -> float:
        """Up, level for a third, and down in a line."""
        return min(1.0, 30 * share, max(0.05, 1 - (share - 0.3) / 0.7))

    def _losses(self, texts: Sequence[Document], rng: random.Random) -> Iterator[torch.Tensor]:
        outputs, taught, best = self._both(texts)
        total = outputs[0].new_zeros(())
        for step, x in enumerate(outputs):
            learned = torch.rand(len(x), device=x.device) < (1.0 if step == 0 else LEARNED)
            if bool(learned.any()):
                loss = _loss(self.head.logits(x[learned]), taught[learned], best[learned])
                total = total + WEIGHT**step * loss
        yield total

    def _both(
        self, texts: Sequence[Document]
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Outputs `(n, D)` of each step where it counts; the target's probabilities `(n, V)` of
        the head's tokens there, and the place `(n,)` of its best one, −1 if it has none."""
        states = self._states.of(texts)
        ids, _ = padded([text.ids for text in texts], 0)
        index = self._index[ids.to(self.target.device)]
        index = torch.where(index < 0, len(self.vocabulary), index)  # type: ignore[arg-type]
        known = [own[:, self._columns].flatten(1).float() for own in states]
        outputs = self.unrolled(index, torch.nn.utils.rnn.pad_sequence(known, batch_first=True))
        counts = self._scored(texts)
        with torch.no_grad():
            pairs = zip(states, texts, strict=True)
            last = torch.cat([own[text.start : -1, -1] for own, text in pairs])
            logits = self._access.logits(last).float()
            taught = logits.softmax(-1)[:, self.vocabulary]
        return [x[counts] for x in outputs], taught, self._index[logits.argmax(-1)]

    def unrolled(self, ids: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
        """`(n, tokens, D)` outputs of each step, at every place at once.

        At place i, step s (from 0) has read the target's states up to place i − s − 1 and its own
        outputs of the steps before from there on, as the s-th token of a draft does.

        Args:
            ids: `(n, tokens)` in the head's vocabulary.
            states: `(n, tokens, depths × H)` of the target.
        """
        places = torch.arange(ids.shape[1], device=ids.device)
        before = _shifted(self.head.fused(states, len(self.depths)), 1)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            step = len(keys)
            keys.append(k)
            values.append(v)
            if step == 0:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = places > places[:, None] - step
            true = (q @ keys[0].mT).masked_fill(hidden, -torch.inf)
            # The draft's own keys stand at the last places, one of each step.
            own = [(q * _shifted(keys[r], step - r)).sum(-1, keepdim=True)
                   for r in range(1, step + 1)]  # fmt: skip
            weights = (torch.cat([true, *own], -1) * HEAD**-0.5).softmax(-1)
            mixed = weights[..., : len(places)] @ values[0]
            for r in range(1, step + 1):
                share = weights[..., len(places) + r - 1, None]
                mixed = mixed + share * _shifted(values[r], step - r)
            return mixed

        out = []
        for _ in range(STEPS):
            x = self.head.layer(ids, before, places[None], attend)
            out.append(x)
            before = _shifted(x, 1)
        return out

    def _form(self) -> dict[str, Any]:
        return {"depths": list(self.depths)}

    def _tensors(self) -> Tensors:
        return rounded(self.own)

    @torch.no_grad()
    def agreement(self, texts: Sequence[Document]) -> dict[str, Any]:
        """How well drafts of `STEPS` tokens do on held-out texts.

        Returns:
            As of `runs_of`; "tokens_per_round" of rounds one after the other (1 + kept), over all
            texts and "by_family", which is what counts: misses come in runs.
        """
        tables: list[torch.Tensor] = []
        rounds: dict[str, list[int]] = {}
        for part in self._batches(texts):
            outputs, _, best = self._both(part)
            hits = torch.stack([self.head.logits(x).argmax(-1) == best for x in outputs], -1).cpu()
            for text, right in zip(part, hits.split([positions_of(t) for t in part]), strict=True):
                count = rounds.setdefault(text.family, [0, 0])
                count[0] += _rounds(right)
                count[1] += len(right)
            tables.append(hits.double())
        pace = {name: round(n / max(r, 1), 3) for name, (r, n) in sorted(rounds.items())}
        every = [sum(column) for column in zip(*rounds.values(), strict=True)]
        out = runs_of(torch.cat(tables)) | {"tokens_per_round": round(every[1] / every[0], 3)}
        return out | ({"by_family": pace} if len(pace) > 1 else {})


def _loss(logits: torch.Tensor, taught: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    log_probs = logits.float().log_softmax(-1)
    soft = -(taught * log_probs).sum(-1)
    hard = -log_probs.gather(1, best.clamp(min=0)[:, None])[:, 0] * (best >= 0)
    return (SOFT * soft + (1 - SOFT) * hard).mean()


def _rounds(right: torch.Tensor) -> int:
    """Rounds over the places of a text; `(places, steps)` whether each step is right there."""
    place, count, table = 0, 0, right.tolist()
    while place < len(table):
        kept = 0
        while kept < len(table[0]) and place < len(table) and table[place][kept]:
            kept, place = kept + 1, place + 1
        count, place = count + 1, place + 1
    return count


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Along the tokens, second to last, with zeros first."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


@torch.no_grad()
def _new(access: Any, width: int, tokens: torch.Tensor, depths: int) -> EagleHead:
    """A head whose table is the target's own, turned into its main directions, as what it reads of
    the last depth is; the rest is small and random."""
    hidden, device = access.width, tokens.device
    head = EagleHead(width, 11 * width // 4, len(tokens), depths * hidden).to(device)
    own = access.unembedding[tokens].float()
    main = torch.linalg.svd(own, full_matrices=False).Vh[:width]
    basis = F.pad(main, (0, 0, 0, width - len(main)))
    table = own @ basis.T
    table = table * (0.6 / table.norm(dim=1).mean())
    head.embedding.weight.copy_(torch.cat([table, table.mean(0, keepdim=True)]))
    inner = head.down.in_features
    spreads = {
        "qkv": 0.7 * width**-0.5, "gate_up": 0.7 * width**-0.5, "out": 0.3 * width**-0.5,
        "down": 0.3 * inner**-0.5, "input": 0.2 * width**-0.5, "fuse": 0.3 * hidden**-0.5,
    }  # fmt: skip
    for name, spread in spreads.items():
        torch.nn.init.normal_(getattr(head, name).weight, std=spread)
    head.input.weight += 0.4 * torch.eye(width, device=device).repeat(1, 2)
    # The final norm's weights, which depth L has not met, as a diagonal.
    like = access.unembedding
    scale = access.norm(torch.eye(hidden, dtype=like.dtype, device=device) * hidden**0.5)
    head.fuse.weight[:, -hidden:] = basis @ (scale.float() * hidden**-0.5).diag().diag()
    return head
