"""`block`: a shallow decoder proposes a block in one pass; made by train-draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.checks import Count
from forerun.drafters.base import (
    Drafter,
    Prompts,
    Proposal,
    RowsDrafter,
    StepContext,
    Texts,
    TrainedDraft,
)
from forerun.drafters.stepping import by_place, step_by_step
from forerun.runtime.base import CHUNK, Rows
from forerun.runtime.grafts import load_graft, model_of


class BlockDrafter(RowsDrafter):
    """Feeds each text and, behind it, queries in the places that follow; made by `BlockDraft`.

    Args:
        rows: the shallow decoder, which reads ids from `vocab_size` on as queries.
        vocab_size: the target's vocabulary.
        width: tokens it proposes at most.
    """

    def __init__(self, rows: Rows, vocab_size: int, width: int) -> None:
        self.rows, self.width, self._vocab = rows, width, vocab_size
        self.limit = rows.limit - width

    def ratio(self, target: Rows) -> float:
        """Target passes over the share of a pass that a proposed token takes."""
        return self.width * super().ratio(target)

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        self.rows.join(len(prompts), max(map(len, prompts)) + room + self.width, sources)

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """One pass for all places, then a token of each as far as the controllers want."""
        most = [min(n, self.width) for n in most]
        places = torch.empty(0)

        def ask(place: int, texts: Texts) -> torch.Tensor:
            nonlocal places
            if place == 0:  # whose time the pass takes
                places = self._feed(texts, max(most))
            return places[:, place]

        return step_by_step(by_place(ask), texts, most, guide)

    def _feed(self, texts: Texts, count: int) -> torch.Tensor:
        """`(rows, count, V)` logits of what follows each text: one pass over what is new of it, and
        over the queries of its next places."""
        if max(map(len, self._pieces(texts))) > CHUNK:
            self.follow([text and text[:-1] for text in texts])
        for row, text in enumerate(texts):  # its last token says what comes first
            if text is not None:
                self.rows.rollback(row, len(text) - 1)
        queries = range(self._vocab, self._vocab + count - 1)
        pieces = [[*piece, *queries] if piece else [] for piece in self._pieces(texts)]
        logits = self.rows.feed(pieces, [count if piece else 0 for piece in pieces])
        for row, text in enumerate(texts):
            if text is not None:
                self.rows.rollback(row, len(text))
        return logits


@dataclass(frozen=True)
class BlockDraft(TrainedDraft):
    """A shallow decoder that proposes a block of tokens in one parallel pass.

    Args:
        width: tokens proposed at most, ≥ 1; None: as many as it was trained for.

    Reference: Xia et al. 2023 (SpecDec) [specdec2023]; Sen et al. 2025 (CM-ASD) [cmasd2025] draft
    so, too.
    """

    width: Count | None = None

    on_encoder = True

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        made, most = load_graft(
            model_of(target, self.kind), self.folder(target.facts.name), self.kind
        )
        width = most if self.width is None else min(self.width, most)
        return BlockDrafter(Rows(target.executor.beside(made)), target.vocab_size, width)
