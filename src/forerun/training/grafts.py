"""Training of decoders on a target's encoder, `shared` and `block`.

Both learn the target's distributions (forward KL) at every place of the texts; the block drafter
besides at the places of its queries, behind texts cut off at random.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from forerun.runtime.base import Rows
from forerun.runtime.encoder_decoder import placement_of
from forerun.runtime.grafts import graft, model_of, own_parameters
from forerun.runtime.support import decoder_limit
from forerun.training.fit import Training, divergence, padded
from forerun.training.settings import TrainingSettings

WINDOWS = 16
"""Batches' worth of texts that a batch of alike lengths is chosen from."""


@dataclass(frozen=True)
class TextPair:
    """A source and what the target's decoder says or shall say of it, as token ids."""

    source: list[int]
    opening: list[int]  # what the decoder begins with
    output: list[int]  # its text, with the end

    @property
    def positions(self) -> int:
        return len(self.output)


@dataclass(frozen=True)
class _Batch:
    """Texts side by side, `(rows, width)` each; padded on the right."""

    states: BaseModelOutput
    read: torch.Tensor  # `(rows, source)` 1 for a token of the source
    fed: torch.Tensor  # what the decoder is fed: opening and output but its last token
    taught: torch.Tensor  # `(rows, width, V)` the target's log-probabilities after each
    scored: torch.Tensor  # whether what follows is part of the output
    lengths: list[int]


class GraftTrainer(Training[TextPair]):
    """A draft decoder in training."""

    def __init__(
        self, target: Rows, settings: TrainingSettings, texts: Sequence[TextPair] = ()
    ) -> None:
        model = model_of(target, f"of kind {settings.kind}")
        torch.manual_seed(settings.seed)
        self._block = int(settings.width or 1) if settings.kind == "block" else 1
        self.draft = graft(model, settings.depth, self._block)
        super().__init__(model, own_parameters(self.draft), settings)
        decoder = self.draft.get_decoder()
        self._placement = placement_of(decoder, decoder_limit(model.config))
        self._vocab = target.vocab_size

    def _drawn(self, texts: Sequence[TextPair], rng: random.Random) -> list[TextPair]:
        """Of alike lengths: padding would take most of a step."""
        batch = self.settings.batch or 1
        drawn = rng.sample(list(texts), min(WINDOWS * batch, len(texts)))
        drawn.sort(key=lambda text: len(text.output) + len(text.source))
        first = rng.randrange(max(1, len(drawn) - batch + 1))
        return drawn[first : first + batch]

    def _losses(self, texts: Sequence[TextPair], rng: random.Random) -> Iterator[torch.Tensor]:
        self.draft.get_decoder().train()  # all else is the target's
        batch = self._batch(texts)
        if self._block == 1:
            logits, taught, scored = self._say(batch, batch.fed), batch.taught, batch.scored
        else:
            logits, taught, scored = self._blocks(batch, self._anchors(batch, rng))
        yield divergence(logits[scored], taught[scored])

    @torch.no_grad()
    def _batch(self, texts: Sequence[TextPair]) -> _Batch:
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

    def _anchors(self, batch: _Batch, rng: random.Random) -> list[list[int]]:
        """Per text the places behind which blocks are learned."""
        firsts = [n - int(batch.scored[row].sum()) for row, n in enumerate(batch.lengths)]
        return [
            [rng.choice(range(first, length)) for _ in range(self.settings.anchors)]
            for first, length in zip(firsts, batch.lengths, strict=True)
        ]

    def _blocks(
        self, batch: _Batch, starts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is said at every token and at the queries behind each anchor; what is taught there.
        A query sees the text up to its anchor, and the queries of its block before it."""
        rows, width = batch.fed.shape
        queries, count = self._block - 1, len(starts[0])
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
        logits = self._say(batch, torch.cat([batch.fed, asked], 1), places, ~seen)
        inside = behind < torch.tensor(batch.lengths, device=device)[:, None]
        index = behind.clamp(max=width - 1)
        taught = batch.taught.gather(1, index[:, :, None].expand(-1, -1, self._vocab))
        scored = torch.cat([batch.scored, inside], 1)
        return logits, torch.cat([batch.taught, taught], 1), scored

    def _say(
        self, batch: _Batch, ids: torch.Tensor, places: Any = None, hidden: Any = None
    ) -> torch.Tensor:
        """`(rows, width, V)` logits of the draft, of tokens at places that do not see all."""
        placed: AbstractContextManager[Any] = nullcontext(None)
        if places is not None:
            placed = self._placement.placed(places, places, hidden)
        with placed as mask:
            return self.draft(
                encoder_outputs=batch.states,
                attention_mask=batch.read,
                decoder_input_ids=ids,
                decoder_attention_mask=mask,
                use_cache=False,
            ).logits.float()

    def _right(self, texts: Sequence[TextPair]) -> torch.Tensor:
        self.draft.get_decoder().eval()
        batch = self._batch(texts)
        best = batch.taught.argmax(-1)
        if self._block == 1:
            same = self._say(batch, batch.fed).argmax(-1) == best
            return same[batch.scored][:, None]
        anchors = self._anchors(batch, random.Random(len(texts)))
        top, width = self._blocks(batch, anchors)[0].argmax(-1), batch.fed.shape[1]
        starts = torch.tensor(anchors, device=best.device)[:, :, None]
        goals = starts + torch.arange(self._block, device=best.device)
        asked = torch.arange(width, top.shape[1], device=best.device).view(-1, self._block - 1)
        places = torch.cat([starts, asked.expand(len(top), -1, -1)], -1)
        right = top.gather(1, places.flatten(1)) == best.gather(
            1, goals.clamp(max=width - 1).flatten(1)
        )
        inside = goals < torch.tensor(batch.lengths, device=best.device)[:, None, None]
        right = right.view_as(inside).double()
        return torch.where(inside, right, torch.nan).flatten(0, 1)

    def _form(self) -> dict[str, Any]:
        return {"layers": self.settings.depth, "width": self._block}
