"""Per-request sampling, applied alike to target and draft before anything is judged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
import torch

from forerun.checks import flag
from forerun.errors import require

SMALL, LARGE = 1e-30, 1e30
"""Bounds of what logits are multiplied by or grow by: float32 has none beyond about 1e38."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Sampling:
    """How one request wants its text sampled.

    The transform of the logits, in this order: logit bias, end-of-text banned before
    `min_new_tokens`, repetition / presence / frequency penalties, temperature, top-k, top-p, min-p.

    Args:
        temperature: from 1e-30 to 1e30, or 0: greedy decoding.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with at least this much probability, in (0, 1].
        min_p: drop tokens below `min_p` times the highest probability, in [0, 1].
        repetition_penalty: from 1e-30 to 1e30; divides positive and multiplies negative
            logits of tokens in the prompt or the output. 1 is off.
        presence_penalty: subtracted from logits of tokens already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id → added to its logit, at most 1e30; −inf bans it.
        seed: of this request's own random stream; None draws one (it is in the result).
        max_new_tokens: ≥ 1.
        min_new_tokens: no end of text before this many tokens.
        stop: a string or several at which the text ends (they are not part of it).
        eos: end-of-text token id or ids; None uses the model's.
        ignore_eos: go on after end-of-text tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            self._set(name, _number(name, getattr(self, name)))
        for name in ("top_k", "max_new_tokens", "min_new_tokens"):
            self._set(name, _integer(name, getattr(self, name)))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -math.inf, math.inf))
        self._set("stop", _several("stop", self.stop, str, "text"))
        if self.eos is not None:
            self._set("eos", _several("eos", self.eos, Integral, "a token id"))
        flag("ignore_eos", self.ignore_eos)
        require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping")
        biases = {
            _integer("a token id in logit_bias", token, -math.inf): _bias(token, bias)
            for token, bias in self.logit_bias.items()
        }
        self._set("logit_bias", biases)
        t, p, m = self.temperature, self.top_p, self.min_p
        good = t == 0 or t >= SMALL
        require(good, "temperature", t, f"a number ≥ {SMALL}, or 0 (greedy)")
        require(0 < p <= 1, "top_p", p, "in (0, 1]")
        require(0 <= m <= 1, "min_p", m, "in [0, 1]")
        r = self.repetition_penalty
        require(r >= SMALL, "repetition_penalty", r, f"a number ≥ {SMALL} (1 is off)")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "≥ 1")
        low, high = self.min_new_tokens, self.max_new_tokens
        require(0 <= low <= high, "min_new_tokens", low, f"between 0 and max_new_tokens={high}")
        require(all(self.stop), "stop", self.stop, "made of non-empty strings")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is the only one."""
        return self.temperature == 0

    @property
    def reshapes(self) -> bool:
        """Whether anything but the temperature touches the logits."""
        return bool(
            self.logit_bias
            or self.min_new_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def _number(name: str, value: Any) -> float:
    """A finite number as Python's own (arrays of numpy have scalars, too)."""
    good = isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= LARGE  # type: ignore[operator]
    require(good, name, value, f"a number of at most {LARGE}")
    return value if isinstance(value, int) else float(value)


def _integer(name: str, value: Any, low: float = 0, high: float = 1 << 62) -> int:
    good = isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high
    require(good, name, value, "a whole number" + (f" of at least {low}" if low == 0 else ""))
    return int(value)


def _several(name: str, value: Any, kind: type[Any], what: str) -> tuple[Any, ...]:
    """One or several of a kind, as a tuple."""
    items = (value,) if isinstance(value, kind) else value
    good = isinstance(items, Iterable) and not isinstance(items, (str, bytes, Mapping))
    items = tuple(items) if good else ()
    good &= all(isinstance(item, kind) and not isinstance(item, bool) for item in items)
    require(good, name, value, f"{what} or a list of such")
    return tuple(int(item) for item in items) if kind is Integral else items


def _bias(token: int, value: Any) -> float:
    banned = isinstance(value, Real) and value == -math.inf
    return -math.inf if banned else _number(f"logit_bias of token {token}", value)


class Text(Protocol):
    """What the penalties look at."""

    context: list[int]
    prompt: int


class Sampler:
    """The sampling of some rows, as one batched transform.

    Args:
        rows: each row's request settings.
        eos: each row's end-of-text ids.
    """

    def __init__(self, rows: Sequence[Sampling], eos: Sequence[frozenset[int]]) -> None:
        self.rows = list(rows)
        self._eos = list(eos)
        self.greedy = torch.tensor([s.greedy for s in rows], dtype=torch.bool)
        self.all_greedy = all(s.greedy for s in rows)
        self._reshapes = any(s.reshapes for s in rows)
        self.trivial = self.all_greedy and not self._reshapes
        """Nothing to do: every row takes the arg-max of the raw logits."""
        self._temperature = torch.tensor([s.temperature or 1.0 for s in rows])

    def process(
        self,
        logits: torch.Tensor,
        texts: Sequence[Text],
        drafted: Sequence[Sequence[int]],
        first: int = 0,
    ) -> torch.Tensor:
        """Apply each row's transform.

        Args:
            logits: `(rows, n, V)` raw; position `i` follows the context and `first + i` drafted
                tokens.
            texts: each row's context and how much of it is the prompt (for penalties).
            drafted: tokens drafted so far, per row.
            first: drafted tokens before position 0.

        Returns:
            `(rows, n, V)` logits whose softmax is the distribution to sample from; the input
            itself when there is nothing to do, never changed in place.
        """
        return self.sharpen(self.shape(logits, texts, drafted, first))

    def shape(
        self,
        logits: torch.Tensor,
        texts: Sequence[Text],
        drafted: Sequence[Sequence[int]],
        first: int = 0,
    ) -> torch.Tensor:
        """The first half of `process`, with its arguments: biases and penalties."""
        if not self._reshapes:
            return logits
        out = _single(logits).clone()
        for row, settings in enumerate(self.rows):
            if settings.reshapes:
                self._reshape(out[row], row, texts[row], drafted[row], first)
        return out

    def sharpen(self, shaped: torch.Tensor) -> torch.Tensor:
        """The second half of `process`: temperature and truncation, nothing if all is greedy."""
        if self.all_greedy:
            return shaped
        out = _single(shaped)
        out = out / self._temperature.to(out).view(-1, 1, 1)
        if any(s.truncates for s in self.rows):
            self._truncate(out)
        return out

    def _reshape(
        self,
        logits: torch.Tensor,
        row: int,
        text: Text,
        drafted: Sequence[int],
        first: int,
    ) -> None:
        s, context, prompt = self.rows[row], text.context, text.prompt
        for token, bias in s.logit_bias.items():
            logits[:, token] += bias
        # Without its own drafted tokens a position would be penalised for another history.
        history, known = [*context, *drafted], len(context) + first
        count, device = len(logits), logits.device
        later = list(enumerate(history[known : known + count - 1], start=1))
        early = s.min_new_tokens - (known - prompt)
        if early > 0:
            logits[:early, list(self._eos[row])] = -torch.inf
        if s.repetition_penalty != 1:
            since = dict.fromkeys(history[:known], 0)  # the first position that has seen a token
            for place, token in later:
                since.setdefault(token, place)
            tokens = _numbers(since, device)
            at = logits[:, tokens]
            scaled = torch.where(at > 0, at / s.repetition_penalty, at * s.repetition_penalty)
            if later:
                places = torch.arange(count, device=device).unsqueeze(1)
                scaled = torch.where(places >= _numbers(since.values(), device), scaled, at)
            logits[:, tokens] = scaled
        if s.presence_penalty or s.frequency_penalty:
            written = Counter(history[prompt:known])
            columns = {
                token: i
                for i, token in enumerate({**written, **dict.fromkeys(t for _, t in later)})
            }
            often = torch.tensor([float(written[token]) for token in columns], device=device)
            often = often.repeat(count, 1)
            for place, token in later:
                often[place:, columns[token]] += 1
            tokens = _numbers(columns, device)
            logits[:, tokens] -= s.presence_penalty * (often > 0) + s.frequency_penalty * often

    def _truncate(self, logits: torch.Tensor) -> None:
        """Top-k, then top-p, then min-p, in place, on rows that ask for them."""
        vocab = logits.shape[-1]
        shape, like = (-1, 1, 1), logits
        off = [not s.truncates for s in self.rows]
        top_k = [
            vocab if o or not s.top_k else s.top_k for o, s in zip(off, self.rows, strict=True)
        ]
        top_p = [1.0 if o else s.top_p for o, s in zip(off, self.rows, strict=True)]
        min_p = [0.0 if o else s.min_p for o, s in zip(off, self.rows, strict=True)]
        if min(top_k) < vocab:
            k = torch.tensor(top_k, device=like.device).clamp(max=vocab)
            best = logits.topk(int(k[k < vocab].max()), dim=-1).values
            last = (k.clamp(max=best.shape[-1]) - 1).view(shape).expand(-1, logits.shape[1], 1)
            cut = best.gather(-1, last)
            cut = torch.where((k == vocab).view(shape), -torch.inf, cut)
            logits.masked_fill_(logits < cut, -torch.inf)
        if min(top_p) < 1:
            ranked, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            before = ranked.cumsum(-1) - ranked
            drop = before >= torch.tensor(top_p).to(like).view(shape)
            drop &= torch.tensor([p < 1 for p in top_p], device=like.device).view(shape)
            drop[..., 0] = False
            logits.masked_fill_(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
        if max(min_p) > 0:
            floor = torch.tensor(min_p).to(like).view(shape)
            probs = logits.softmax(-1)
            logits.masked_fill_(probs < floor * probs.amax(-1, keepdim=True), -torch.inf)


def _numbers(some: Collection[int], device: torch.device) -> torch.Tensor:
    """`(n,)` int64; from hundreds of Python numbers several times as fast as `torch.tensor`."""
    return torch.from_numpy(np.fromiter(some, np.int64, len(some))).to(device)


def _single(logits: torch.Tensor) -> torch.Tensor:
    """At least single precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
