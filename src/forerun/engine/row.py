"""One request while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.controllers.base import LengthController
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
    prefill: float = 0.0
    first_token: float = 0.0
    error: str | None = None
    """What ended the request before its time."""
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
        self, draft: Sequence[int], accepted: int, following: int, error: str | None = None
    ) -> tuple[list[Piece], FinishReason | None]:
        """Extend the text by the accepted tokens and the target's own, up to where it ends.

        With an `error` there is no such token, and unless an accepted one does, it ends the text.
        """
        own = Origin.BONUS if accepted == len(draft) else Origin.CORRECTION
        own = own if draft else Origin.PLAIN
        pieces: list[Piece] = []
        reason: FinishReason | None = None
        tokens = [*draft[:accepted], following]
        for place, token in enumerate(tokens[:accepted] if error else tokens):
            self.context.append(token)
            text, stopped = self.stops.push(self.text.push(token))
            reason = self._finished(token, stopped)
            if reason not in (None, "stop"):
                text += self.stops.flush(self.text.flush())
            pieces.append(Piece(token, text, Origin.DRAFT if place < accepted else own))
            if reason:
                break
        self.pieces.extend(pieces)
        if error and not reason:
            self.error, reason = error, "error"
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
        return Completion(
            text, tokens, reason, self.rounds, stats, self.pieces, self.seed, self.error
        )
