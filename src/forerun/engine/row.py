"""One request while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.controllers.base import LengthController
from forerun.costs import Costs
from forerun.engine.results import Completion, FinishReason, Origin, Piece, Round, Stats
from forerun.engine.sampling import Sampling
from forerun.engine.text import Detokenizer, StopStrings
from forerun.rules.base import AcceptanceRule


@dataclass
class Row:
    """A row of the batch: its request, its text so far, and its own random stream."""

    id: int
    context: list[int]
    """Prompt and committed tokens."""
    prompt: int
    """How many tokens of the context are the prompt."""
    sampling: Sampling
    controller: LengthController
    rule: AcceptanceRule
    eos: frozenset[int]
    seed: int
    random: np.random.Generator
    text: Detokenizer
    stops: StopStrings
    limit: int
    """Most tokens of context."""
    submitted: float
    repeatable: Costs | None = None
    """Costs to draft by where the text must be repeatable."""
    prefill: float = 0.0
    first_token: float = 0.0
    drift: float | None = None
    """Summed drift of the tokens so far; None under a lossless rule."""
    rounds: list[Round] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def produced(self) -> int:
        """Tokens committed so far."""
        return len(self.context) - self.prompt

    def room(self, drafter_limit: int) -> int:
        """Most tokens worth drafting: one more is always committed, and all must fit."""
        budget = self.sampling.max_new_tokens - self.produced - 1
        context = min(self.limit - 1, drafter_limit) - len(self.context)
        return max(0, min(budget, context))

    def commit(
        self, draft: Sequence[int], accepted: int, following: int
    ) -> tuple[list[Piece], FinishReason | None]:
        """Extend the text by the accepted tokens and the target's own, up to where it ends."""
        own = Origin.BONUS if accepted == len(draft) else Origin.CORRECTION
        own = own if draft else Origin.PLAIN
        pieces: list[Piece] = []
        reason: FinishReason | None = None
        for place, token in enumerate([*draft[:accepted], following]):
            self.context.append(token)
            text, stopped = self.stops.push(self.text.push(token))
            reason = self._finished(token, stopped)
            if reason not in (None, "stop"):
                text += self.stops.flush(self.text.flush())
            pieces.append(Piece(token, text, Origin.DRAFT if place < accepted else own))
            if reason:
                break
        self.pieces.extend(pieces)
        return pieces, reason

    def _finished(self, token: int, stopped: bool) -> FinishReason | None:
        if token in self.eos:
            return "eos"
        if stopped:
            return "stop"
        if self.produced >= self.sampling.max_new_tokens:
            return "length"
        return "context" if len(self.context) >= self.limit else None

    def complete(self, reason: FinishReason) -> Completion:
        """The finished generation."""
        total = time.perf_counter() - self.submitted
        tokens = self.context[self.prompt :]
        stats = Stats.of(self.rounds, self.prompt, self.prefill, self.first_token, total)
        assert stats.tokens == len(tokens) == len(self.pieces), "committed tokens must add up"
        text = "".join(piece.text for piece in self.pieces)
        return Completion(text, tokens, reason, self.rounds, stats, self.pieces, self.seed)
