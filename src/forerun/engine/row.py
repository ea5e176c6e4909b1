"""One request while it runs, and drafts from a text that it predicts."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from itertools import chain
from secrets import randbits
from typing import Any

import numpy as np

from forerun.controllers.fixed import FixedLength
from forerun.engine.constraint import Place, bans, split_stops
from forerun.engine.results import Completion, FinishReason, Logprob, Origin, Piece, Round, Stats
from forerun.engine.sampling import Noise, stream
from forerun.engine.text import HELD, Detokenizer, StopStrings
from forerun.errors import ForerunError
from forerun.requests import Request, Sampling

COINS = 64  # random numbers that are made at a time: one alone takes as long


@dataclass(eq=False)
class Row:
    """A row of the batch: its request, its text so far, and its own random stream."""

    id: int
    request: Request
    tokenizer: InitVar[Any]
    model_eos: InitVar[frozenset[int]]
    vocab_size: InitVar[int]
    limit: int  # most tokens of context
    rests_first: bool
    """Whether its first token, of a stream its first character, comes without a draft."""
    submitted: float
    queued: float = 0.0  # seconds that it waited for its place in the batch
    ended_by: str | int | None = None
    cached: int = 0  # tokens of its prompt that were not read, for their columns were there
    prefill: float = 0.0
    encode: float = 0.0  # seconds of joining, in which sources were read, those beside it, too
    first_token: float = 0.0
    drift: float | None = None  # summed drift of the tokens so far; None under a lossless rule
    rounds: list[Round] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    """Of what it wrote; of a text to score, of its tokens but the first."""
    logits: list[Any] = field(default_factory=list)  # `(V,)` of every token, if they are kept
    columns: Any = None  # of its cache, if the request keeps them, when it is done
    _pieces: list[Piece] = field(default_factory=list)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    """Events are looked at in any thread, while another takes the next round."""

    def __post_init__(self, tokenizer: Any, model_eos: frozenset[int], vocab_size: int) -> None:
        asked, how = self.request, self.request.sampling
        self.sampling: Sampling = how
        self.context = list(asked.prompt)  # and committed tokens
        self.prompt = len(self.context)  # how many tokens of the context are the prompt
        # Clients whose numbers are doubles can give a drawn seed back.
        self.seed = randbits(53) if how.seed is None else how.seed % (1 << 63)
        strings, self.stop_tokens = split_stops(how.stop, tokenizer)
        self.stops, self.text = StopStrings(strings), Detokenizer.of(tokenizer, self.context)
        named = frozenset(self.stop_tokens)
        eos = (model_eos if how.eos is None else frozenset(how.eos)) | named
        self.eos = named if how.ignore_eos else eos
        self.bans = bans(how.bad_words, tokenizer, vocab_size)
        self.prediction = PredictionCursor(asked.prediction) if asked.prediction else None
        self.place = Place(how.constraint, eos, vocab_size) if how.constraint is not None else None
        self._full = min(self.prompt + self.sampling.max_new_tokens, self.limit)
        bonus = self.request.rule.has_bonus
        self._draft_full = min(self.prompt + self.sampling.max_new_tokens - bonus, self.limit - 1)

    @cached_property
    def noise(self) -> Noise | None:
        """What its tokens are drawn by, if it samples and its rule does not toss coins."""
        asked = self.request
        if not asked.rule.gumbel_max:
            return None
        return Noise.of(self.sampling, asked.prompt, asked.source, self.seed)

    @cached_property
    def coins(self) -> Iterator[float]:
        """Its own random numbers in [0, 1)."""
        asked = self.request
        random = np.random.default_rng(stream(self.seed, asked.prompt, asked.source))
        return chain.from_iterable(iter(lambda: random.random(COINS).tolist(), None))

    @property
    def certain(self) -> bool:
        """Whether its tokens are what they are, however they are come by: nothing is tossed."""
        return self.sampling.greedy or self.noise is not None

    @property
    def reads_all(self) -> bool:
        """Whether no copy stands for its tokens: they depend on a source, or are scored."""
        return self.request.source is not None or self.request.scores is not None

    @property
    def scored(self) -> bool:
        """Whether the target has said of all its text what was asked for."""
        return self.request.scores is not None and len(self.logprobs) == self.prompt - 1

    @property
    def plain(self) -> bool:
        """Whether it is to be decoded without any draft, forced tokens included."""
        return self.request.controller == FixedLength(0)

    @property
    def left(self) -> int:
        return self._full - len(self.context)

    @property
    def produced(self) -> int:
        return len(self.context) - self.prompt

    def room(self, drafter_limit: int) -> int:
        """Most tokens worth drafting: all must fit, with the target's own that follows."""
        # A stream's first character may not be complete yet.
        begins = self.request.stream and self.produced <= HELD and self.text.holds
        if self.rests_first and (not self.rounds or begins):
            return 0
        return max(0, min(self._draft_full, drafter_limit) - len(self.context))

    def commit(
        self, draft: Sequence[int], accepted: int, following: int | None, forced: int = 0
    ) -> tuple[int, FinishReason | None]:
        """Extend the text by the accepted tokens and the target's own, if any, up to where it ends.

        The first `forced` tokens of the draft are the constraint's.

        Returns:
            Tokens committed, and why they end the text, if they do.
        """
        if self.place is not None and self.place.error is not None:
            raise self.place.error
        own = Origin.BONUS if accepted == len(draft) else Origin.CORRECTION
        own = own if draft else Origin.PLAIN
        reason: FinishReason | None = None
        before = self.produced
        tokens = [*draft[:accepted], *([] if following is None else [following])]
        forced = min(forced, accepted)
        self.origins += [Origin.GRAMMAR] * forced + [Origin.DRAFT] * (accepted - forced) + [own]
        for token in tokens:
            self.context.append(token)
            reason = self._finished(token)
            if reason:
                break
        del self.origins[self.produced :]
        return self.produced - before, reason

    def cut(self, produced: int) -> None:
        """Take back what was committed beyond so many tokens."""
        del self.context[self.prompt + produced :], self.origins[produced:]
        del self._pieces[produced:], self.logprobs[produced:], self.logits[produced:]

    def _finished(self, token: int) -> FinishReason | None:
        if token in self.eos:
            self.ended_by = self.stop_tokens.get(token, token)
            return "stop" if token in self.stop_tokens else "eos"
        if self.sampling.stop:
            self.pieces(self.produced)
            if (met := self.stops.met) is not None:
                self.ended_by = met
                return "stop"
        stopping = self.sampling.stopping
        if stopping is not None and stopping(self.context[self.prompt :]):
            return "stop"
        if len(self.context) < self._full:
            return None
        return "length" if self.produced >= self.sampling.max_new_tokens else "context"

    def pieces(self, upto: int) -> list[Piece]:
        """The text of the first `upto` tokens, made now if nobody has looked before."""
        with self._looking:
            for place in range(len(self._pieces), upto):
                token = self.context[self.prompt + place]
                ends = place + 1 >= self.sampling.min_new_tokens
                text = self.stops.push(self.text.push(token), ends)
                self._pieces.append(Piece(token, text, self.origins[place]))
        return self._pieces

    def complete(self, reason: FinishReason, error: Exception | None = None) -> Completion:
        total = time.perf_counter() - self.submitted
        tokens = self.context[self.prompt :]
        source = self.request.source
        stats = Stats.of(
            self.rounds,
            self.prompt,
            self.prefill,
            self.first_token,
            total,
            self.cached,
            None if source is None else (len(source), self.encode),
        )
        assert stats.tokens == len(tokens), "committed tokens must add up"
        if error is None:
            pieces = self.pieces(len(tokens))
            if pieces and self.stops.met is None:
                last = pieces[-1]
                rest = self.stops.flush(self.text.flush())
                pieces[-1] = Piece(last.token, last.text + rest, last.origin)
        else:
            pieces = self._pieces
        return Completion(
            text="".join(piece.text for piece in pieces),
            tokens=tokens,
            finish_reason=reason,
            rounds=self.rounds,
            stats=stats,
            pieces=pieces,
            seed=self.seed,
            logprobs=self.logprobs[: len(tokens)] if self.request.logprobs is not None else None,
            scores=self.logprobs if self.request.scores is not None else None,
            error=None if error is None else error_line(error),
            error_type=None if error is None else type(error),
            ended_by=self.ended_by if reason in ("eos", "stop") else None,
            logits=self.logits[: len(tokens)] if self.request.keep_logits else None,
            columns=self.columns,
        )


def error_line(error: Exception) -> str:
    """One line for the person who asked; of several the last, which gives the reason, as well."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else type(error).__name__
    return text if isinstance(error, ForerunError) else f"{type(error).__name__}: {text}"


MATCH = 3  # tokens of the output that must occur in the prediction for it to be followed there
SHORTEST, LONGEST = 4, 32  # tokens drafted: doubled after a draft kept whole, else shortest


class PredictionCursor:
    """Follows a predicted text, and finds the way back to it after a difference."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._length = SHORTEST
        self._place = 0  # where in the prediction the output has got to
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(MATCH, len(self._tokens) + 1):
            self._ends.setdefault(tuple(self._tokens[end - MATCH : end]), []).append(end)

    def propose(self, output: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that follow the output; none where it left the prediction. Of
        several places, the first after the one that was followed last."""
        count = len(output)
        if count < MATCH:
            ends = [count] if list(output) == self._tokens[:count] else []
        else:
            ends = self._ends.get(tuple(output[-MATCH:]), [])
        if not ends:
            return []
        self._place = next((end for end in ends if end > self._place), ends[-1])
        return self._tokens[self._place : self._place + min(room, self._length)]

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        self._length = min(2 * self._length, LONGEST) if drafted == accepted else SHORTEST
