"""What a generation reports: per round, per request, per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from forerun.types import Stop

if TYPE_CHECKING:
    import torch

    from forerun.runtime.base import Columns


class Origin(StrEnum):
    """Who wrote a token."""

    DRAFT = "draft"  # drafted and accepted
    CORRECTION = "correction"  # the target's own token after a rejection
    BONUS = "bonus"  # the target's own token after everything drafted was accepted
    PLAIN = "plain"  # the target's own token in a round without a draft
    GRAMMAR = "grammar"  # forced by the request's constraint: drafted without a drafter


FinishReason = Literal["eos", "stop", "length", "context", "cancelled", "error"]


@dataclass(frozen=True)
class Piece:
    """One committed token, the text it added, and who wrote it."""

    token: int
    text: str
    origin: Origin


class Logprob(NamedTuple):
    """What the target said where a token was committed, before the sampling transform."""

    logprob: float  # natural logarithm of the token's probability
    top: list[tuple[int, float]]  # likeliest token ids with theirs, best first, as asked for

    def to_json(self) -> dict[str, Any]:
        top = [{"token": token, "logprob": logprob} for token, logprob in self.top]
        return {"logprob": self.logprob, "top": top}


class _Counted:
    """Counters of early exits by the names that they have in JSON schema 1."""

    counters: Mapping[str, int]

    @property
    def layer_passes(self) -> int | None:
        return self.counters.get("layer_passes")

    @property
    def exit_projections(self) -> int | None:
        return self.counters.get("exit_projections")

    def _exits_json(self) -> dict[str, int | None]:
        return {"layer_passes": self.layer_passes, "exit_projections": self.exit_projections}


@dataclass(frozen=True)
class Round(_Counted):
    """One round of one request."""

    drafted: int  # tokens drafted
    accepted: int  # drafted tokens the rule kept
    committed: int
    """Tokens that reached the output: the accepted ones and the target's own (none after a draft
    kept whole by a rule or drafter without a bonus), less what end of text or a stop cut off."""
    stopped_by: Stop  # why drafting stopped
    draft_seconds: float  # wall time of the batch in drafting forwards
    verify_seconds: float  # of the batch in the target's forward; 0: it read the prompt (prefill)
    other_seconds: float  # of the batch in all else (sampling, judging, control, text)
    drift: list[float] | None = None
    """Under a lossy rule: the exact total-variation distance to the target at each judged position
    that was committed (accepted tokens, and the correction after a rejection)."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """What the drafter counts, by name (`Drafter.counters`). Early exits: `layer_passes`, positions
    × layers of the target, drafting included (plain decoding takes one per layer and token), and
    `exit_projections`, hidden states of shallow layers turned into logits."""

    def to_json(self) -> dict[str, Any]:
        """The documented fields; times in milliseconds."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "committed": self.committed,
            "stopped_by": self.stopped_by.label,
            "draft_ms": round(self.draft_seconds * 1e3, 3),
            "verify_ms": round(self.verify_seconds * 1e3, 3),
            "other_ms": round(self.other_seconds * 1e3, 3),
            "drift": None if self.drift is None else [round(d, 6) for d in self.drift],
            **self._exits_json(),
        }


@dataclass(frozen=True)
class Stats(_Counted):
    """Totals of one request. Times are wall seconds of the rounds it took part in."""

    prompt_tokens: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    judged: int  # drafted tokens accepted, and the first rejected of each round
    prefill_seconds: float  # reading the prompt; alone, the first verification shares that pass
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    first_token_seconds: float  # from submission to the first committed token
    seconds: float  # from submission to the last committed token
    stopped_by: dict[str, int] = field(default_factory=dict)  # rounds by why drafting stopped
    acceptance_rate: float | None = None
    """Accepted / judged drafted tokens: a rejection ends the judging, so the tokens behind it are
    neither accepted nor rejected. None if nothing was drafted."""
    drift_mean: float | None = None
    """Under a lossy rule: total-variation distance to the target per token, in [0, 1] (bonus and
    plain tokens count, with 0). None under a lossless one."""
    drift_max: float | None = None  # likewise the largest of one token
    counters: Mapping[str, int] = field(default_factory=dict)
    """Of the rounds, summed up. `layer_passes` over `tokens` compares with the number of layers."""
    cached_tokens: int = 0  # prompt tokens that a prefix cache spared
    source_tokens: int | None = None  # tokens that the encoder read; None if the target has none
    encode_seconds: float | None = None
    """Reading them, by the target and by a draft with an encoder of its own, together with the
    sources that joined at the same time; in `seconds` and `first_token_seconds`, in no other."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens committed per round (one per target forward in plain decoding)."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def to_json(self) -> dict[str, Any]:
        """All totals and the derived rates."""
        out = {k: v for k, v in asdict(self).items() if k != "counters"} | self._exits_json()
        return out | {k: getattr(self, k) for k in ("tokens_per_second", "block_efficiency")}

    @classmethod
    def of(
        cls, rounds: list[Round], prompt_tokens: int, prefill: float, first: float, total: float,
        cached: int = 0, source: tuple[int, float] | None = None,
    ) -> Stats:  # fmt: skip
        """Add up rounds; `source` is its tokens and the seconds to read it, if there is one."""
        names = "drafted", "accepted", "draft_seconds", "verify_seconds", "other_seconds"
        sums: dict[str, Any] = {name: sum(getattr(r, name) for r in rounds) for name in names}
        judged = sum(min(r.accepted + 1, r.drafted) for r in rounds)
        tokens = sum(r.committed for r in rounds)
        drift = [d for r in rounds for d in r.drift or ()]
        lossy = any(r.drift is not None for r in rounds)
        counters: Counter[str] = Counter()
        for r in rounds:
            counters.update(r.counters)
        return cls(
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            rounds=len(rounds),
            **sums,
            judged=judged,
            prefill_seconds=prefill,
            first_token_seconds=first,
            seconds=total,
            stopped_by=dict(Counter(r.stopped_by.label for r in rounds)),
            acceptance_rate=sums["accepted"] / judged if judged else None,
            drift_mean=sum(drift) / max(tokens, 1) if lossy else None,
            drift_max=max(drift, default=0.0) if lossy else None,
            counters=dict(counters),
            cached_tokens=cached,
            source_tokens=source[0] if source else None,
            encode_seconds=source[1] if source else None,
        )


@dataclass(frozen=True)
class Completion:
    """A finished generation."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    """"eos", "stop" (a stop string of the request), "length" (max_new_tokens), "context" (it is
    full), "cancelled" or "error" (`error` says which; what was written before stands)."""
    rounds: list[Round]
    stats: Stats
    pieces: list[Piece]
    seed: int
    """Of the request's random stream. A request that asks for a seed gets the same text each time;
    one that does not may be drafted by the clock, which takes other random numbers."""
    logprobs: list[Logprob] | None = None  # per token, if the request asked for them
    scores: list[Logprob] | None = None  # of the prompt but its first token, if they were asked for
    error: str | None = None  # what ended the request, in one line, with the finish reason "error"
    error_type: type[Exception] | None = None  # its class: no `ForerunError` if something is broken
    ended_by: str | int | None = None  # the stop string or token that did, if one did
    logits: list[torch.Tensor] | None = None  # `(V,)` per token before the sampling transform, and
    columns: Columns | None = None  # what the cache holds of prompt and text, if kept

    def to_json(self) -> dict[str, Any]:
        """The documented shape of one completion."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "ended_by": self.ended_by,
            "error": self.error,
            "origins": [p.origin.value for p in self.pieces],
            "seed": self.seed,
            **({} if self.logprobs is None else {"logprobs": [p.to_json() for p in self.logprobs]}),
            "rounds": [r.to_json() for r in self.rounds],
            "stats": self.stats.to_json(),
        }


@dataclass(slots=True, eq=False, repr=False)
class Event:
    """What one round added to one request."""

    request: int  # the id `Engine.submit` returned
    drafted: list[int]  # the tokens that were drafted; `round.accepted` of them were kept
    round: Round  # what became of them; of a request that an error ended, perhaps the one before
    _look: Callable[[], list[Piece]] | list[Piece]
    completion: Completion | None = None  # set in a request's last event
    logprobs: Sequence[Logprob] = ()  # of the committed tokens, if the request asked for them
    queued: float = 0.0  # seconds that the request waited until others let it join

    @property
    def pieces(self) -> list[Piece]:
        """The committed tokens with their text, which is made when somebody looks."""
        if callable(self._look):
            self._look = self._look()
        return self._look
