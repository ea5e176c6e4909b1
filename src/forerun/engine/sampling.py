"""Per-request sampling, alike for target and draft, and the Gumbel noise that they draw by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from forerun.engine.constraint import Bans, Place
from forerun.errors import SettingError
from forerun.lazy import torch
from forerun.requests import Sampling
from forerun.types import Array

USUALLY_ENOUGH = 256  # tokens that mostly have `top_p` in sum: found ten times as fast as sorted
_GREEDY = Sampling()  # whose logits no temperature and no truncation touches


class PenalizedText(Protocol):
    """What the penalties look at."""

    context: list[int]
    prompt: int


class Sampler:
    """The sampling of some rows, as one batched transform: by their requests' settings, their
    end-of-text ids, and what they draw by; None, also for all, is coins."""

    def __init__(
        self,
        rows: Sequence[Sampling],
        eos: Sequence[frozenset[int]],
        noises: Sequence[Noise | None] | None = None,
    ) -> None:
        self.rows = list(rows)
        self._eos = list(eos)
        self._noises = noises or [None] * len(self.rows)
        self._pairs = list(zip(self.rows, self._noises, strict=True))
        self._certain = [s.greedy or noise is not None for s, noise in self._pairs]
        self.some_certain, self.all_certain = any(self._certain), all(self._certain)
        self._noisy = any(self._noises)
        self.certain_rows = np.array(self._certain)
        self._reshapes = any(s.reshapes for s in rows) or self._noisy
        self.trivial = self.all_certain and not self._reshapes  # arg-maxes of raw logits
        tossing = [s for s, noise in self._pairs if noise is None and not s.greedy]
        self._tempers = any(s.temperature != 1 or s.truncates for s in tossing)
        self.untouched = not (self.some_certain or self._reshapes or self._tempers)
        """Whether every row draws from its raw logits."""

    @cached_property
    def certain(self) -> torch.Tensor:
        """`(rows,)` whether a row takes the arg-max of its shaped logits."""
        return torch.from_numpy(self.certain_rows)

    @cached_property
    def _by_noise(self) -> _Tempering:
        return _Tempering([s if noise else _GREEDY for s, noise in self._pairs])

    @cached_property
    def _by_coins(self) -> _Tempering:
        return _Tempering([_GREEDY if noise else s for s, noise in self._pairs])

    def process(
        self, logits: torch.Tensor, texts: Sequence[PenalizedText],
        drafted: Sequence[Sequence[int]], first: int | None = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Apply each row's transform.

        Args:
            logits: `(rows, n, V)` raw; position `i` follows the context and `first + i` drafted
                tokens.
            texts: each row's context and how much of it is the prompt (for penalties).
            drafted: tokens drafted so far, per row.
            first: drafted tokens before position 0; None: all of each row's.

        Returns:
            `(rows, n, V)` logits whose softmax is the distribution to sample from; the input
            itself when there is nothing to do, never changed in place.
        """
        return self.sharpen(self.shape(logits, texts, drafted, first))

    def shape(
        self, logits: torch.Tensor, texts: Sequence[PenalizedText],
        drafted: Sequence[Sequence[int]], first: int | None = 0, own: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """The first half of `process`, with its arguments: all but temperature and truncation; for
        rows that draw by noise truncation, too, and the noise, times the temperature.

        `own` logits may be changed in place.
        """
        if not self._reshapes:
            return logits
        out = _single(logits) if own else _single(logits).clone()
        before = [len(tokens) if first is None else first for tokens in drafted]
        for row, settings in enumerate(self.rows):
            if settings.reshapes:
                self._reshape(out[row], row, texts[row], drafted[row], before[row])
        if self._noisy:
            self._by_noise.temper(out)
            for row, noise in enumerate(self._noises):
                if noise is not None:
                    settled = len(texts[row].context)
                    noise.add(out[row], settled + before[row], settled)
            if self._by_noise.tempers:
                # The same arg-max, in units that signals mean the same in at any temperature.
                out *= self._by_noise.temperature.to(out)
        return out

    def sharpen(self, shaped: torch.Tensor) -> torch.Tensor:
        """The second half of `process`: temperature and truncation of rows that toss coins."""
        if self.all_certain:
            return shaped
        if not self._tempers:
            return _single(shaped)
        out = _single(shaped).clone()
        self._by_coins.temper(out)
        return out

    def _reshape(
        self, logits: torch.Tensor, row: int, text: PenalizedText, draft: Sequence[int], first: int
    ) -> None:
        s, context, prompt = self.rows[row], text.context, text.prompt
        for token, bias in s.logit_bias.items():
            logits[:, token] += bias
        # Without its own drafted tokens a position would be penalised for another history.
        history, known = [*context, *draft], len(context) + first
        count, device = len(logits), logits.device
        later = list(enumerate(history[known : known + count - 1], start=1))
        early = s.min_new_tokens - (known - prompt)
        if early > 0:
            logits[:early, list(self._eos[row])] = -torch.inf
        if s.repetition_penalty != 1:
            _repeat_less(logits, s.repetition_penalty, history[:known], later)
        if s.presence_penalty or s.frequency_penalty:
            written = Counter(history[prompt:known])
            every = {**written, **dict.fromkeys(token for _, token in later)}
            columns = {token: i for i, token in enumerate(every)}
            often = torch.tensor([float(written[token]) for token in columns], device=device)
            often = often.repeat(count, 1)
            for place, token in later:
                often[place:, columns[token]] += 1
            tokens = _numbers(columns, device)
            logits[:, tokens] -= s.presence_penalty * (often > 0) + s.frequency_penalty * often
        if s.allowed_tokens is not None:
            kept = torch.full_like(logits[0], -torch.inf)
            kept[_numbers(s.allowed_tokens, device)] = 0.0
            logits += kept
        if s.bad_words:
            bans: Bans | None = getattr(text, "bans", None)
            if bans is None:
                raise SettingError("bad_words are for generating; leave them out here")
            bans.exclude(logits, history[prompt:known], history[known : known + count - 1])
        constraint: Place | None = getattr(text, "place", None)
        if constraint is not None:
            constraint.restrict(logits, history[prompt:known], history[known : known + count - 1])
        if s.processor is not None:
            for i in range(min(count, len(history) - known + 1)):
                logits[i] = s.processor(history[prompt : known + i], logits[i])


class _Tempering:
    """Temperature, then top-k, then top-p, then min-p, of rows that sample; others stay."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self.temperature = torch.tensor([s.temperature or 1.0 for s in rows]).view(-1, 1, 1)
        self.tempers = any(s.temperature not in (0, 1) for s in rows)
        self._truncates = any(s.truncates for s in rows)
        self._top_k = [s.top_k if s.truncates else 0 for s in rows]
        self._top_p = [s.top_p if s.truncates else 1.0 for s in rows]
        self._min_p = [s.min_p if s.truncates else 0.0 for s in rows]

    def temper(self, logits: torch.Tensor) -> None:
        """Do it to `(rows, n, V)` logits, in place."""
        if self.tempers:
            logits /= self.temperature.to(logits)
        if not self._truncates:
            return
        vocab = logits.shape[-1]
        shape, like = (-1, 1, 1), logits
        top_k, top_p, min_p = [k or vocab for k in self._top_k], self._top_p, self._min_p
        if min(top_k) < vocab:
            k = torch.tensor(top_k, device=like.device).clamp(max=vocab)
            best = logits.topk(int(k[k < vocab].max()), dim=-1).values
            last = (k.clamp(max=best.shape[-1]) - 1).view(shape).expand(-1, logits.shape[1], 1)
            cut = best.gather(-1, last)
            cut = torch.where((k == vocab).view(shape), -torch.inf, cut)
            logits.masked_fill_(logits < cut, -torch.inf)
        if min(top_p) < 1:
            probs = logits.softmax(-1)
            least = _least_kept(probs, torch.tensor(top_p).to(like).view(shape))
            logits.masked_fill_(probs < least, -torch.inf)
        if max(min_p) > 0:
            floor = torch.tensor(min_p).to(like).view(shape)
            probs = logits.softmax(-1)
            logits.masked_fill_(probs < floor * probs.amax(-1, keepdim=True), -torch.inf)


def _least_kept(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least probability `(rows, n, 1)` among the most likely tokens that have `top_p` in sum,
    of `(rows, n, V)`; tokens as likely as the last are kept, too. A `top_p` of 1 keeps all."""
    best = probs.topk(min(USUALLY_ENOUGH, probs.shape[-1]), dim=-1).values
    total = best.cumsum(-1)
    if not ((total[..., -1:] >= top_p) | (top_p == 1)).all():
        best = probs.sort(dim=-1, descending=True).values
        total = best.cumsum(-1)
    count = (total - best < top_p).sum(-1, keepdim=True).clamp(min=1)
    return best.gather(-1, count - 1) * (top_p < 1)


def _repeat_less(
    logits: torch.Tensor, penalty: float, before: Sequence[int], later: Sequence[tuple[int, int]]
) -> None:
    """Make tokens of the text less likely, in place, in `(n, V)` logits: positive ones are divided
    by the penalty, negative ones multiplied. All positions follow the text `before`; `later` comes
    after it: the first position that has seen a token, and the token."""
    first = dict.fromkeys(before, 0) if later else {}
    for place, token in later:
        first.setdefault(token, place)
    device = logits.device
    tokens = _numbers(first or before, device)
    unseen: Any = None
    if later:
        places = torch.arange(len(logits), device=device).unsqueeze(1)
        unseen = places < _numbers(first.values(), device)
    # On the CPU numpy takes a fraction of the time that torch does for so little.
    lib: Any = torch
    if device.type == "cpu":
        lib, logits, tokens = np, logits.numpy(), tokens.numpy()  # type: ignore[assignment]
        unseen = None if unseen is None else unseen.numpy()
    at = logits[:, tokens]
    scaled = lib.where(at > 0, at / penalty, at * penalty)
    # A token that comes twice is set twice to the same.
    logits[:, tokens] = scaled if unseen is None else lib.where(unseen, at, scaled)


def _numbers(values: Collection[int], device: torch.device) -> torch.Tensor:
    """`(n,)` int64; from hundreds of Python numbers several times as fast as `torch.tensor`."""
    return torch.from_numpy(np.fromiter(values, np.int64, len(values))).to(device)


def _single(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


_SPREAD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds of close places are far apart
MOST_KEPT = 64  # most places whose noise is kept at a time
_BELOW_1 = np.float32(1 - 2**-24)  # the greatest single below 1


def stream(seed: int, prompt: Sequence[int], source: Sequence[int] | None = None) -> int:
    """The seed of a request's own random numbers, in [0, 2^63). It is made of the seed that was
    asked for and of the prompt (and source), so that prompts which share a seed do not all draw the
    same."""
    read = np.array([seed % (1 << 63), *prompt, -1, *(source or ())], "<i8")
    return int.from_bytes(blake2b(read.tobytes(), digest_size=8).digest(), "little") >> 1


class Noise:
    """One request's noise: i.i.d. Gumbel(0, 1) for every token at every place of its text.

    `argmax(log p + noise)` is a draw from `p` (Maddison et al. 2014), to 2e-7 of probability. What
    is at a place depends on the seed (`stream`), the place and the kind of device, and on nothing
    else.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed % (1 << 63)
        self._random = np.random.Philox(key=[self._seed, 0])  # a stream of its own for every key
        self._start: Any = self._random.state
        self._known: dict[int, Array] = {}
        """By place, as long as it may be asked for again: draft and target both do."""

    @classmethod
    def of(
        cls, sampling: Sampling, prompt: Sequence[int], source: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Noise | None:  # fmt: skip
        """What a request draws by, with this seed or its own; None if it is greedy."""
        if sampling.greedy:
            return None
        seed = sampling.seed if seed is None else seed
        assert seed is not None, "what is drawn again needs its seed"
        return cls(stream(seed, prompt, source))

    def add(self, logits: torch.Tensor, first: int, settled: int) -> None:
        """Add noise to `(n, V)` logits, in place: of places in a row, the `first` behind so many
        tokens of text, of which nobody draws the `settled` ones again."""
        known = self._known = {p: noise for p, noise in self._known.items() if p >= settled}
        on_gpu = logits.device.type != "cpu"
        rows = logits if on_gpu else logits.numpy()
        for place, row in enumerate(rows, start=first):
            noise = known.get(place)
            if noise is None or noise.shape != row.shape:
                noise = self._on_gpu(place, row) if on_gpu else self._made(place, len(row))
                if len(known) < MOST_KEPT:
                    known[place] = noise
            row += noise

    def _made(self, place: int, count: int) -> Array:
        self._start["state"]["key"][:] = self._seed, place
        self._random.state = self._start
        bits = self._random.random_raw((count + 1) // 2).view(np.uint32)[:count]
        # log1p keeps what is close to 0 as fine as 32 bits are: there unlikely tokens are drawn.
        x = bits.astype(np.float32)
        x += 0.5
        x *= -(2.0**-32)
        np.maximum(x, -_BELOW_1, out=x)
        torch.from_numpy(x).log1p_().neg_().log_().neg_()  # four times as fast as numpy
        return x

    def _on_gpu(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """Made there: to bring what a large vocabulary needs would take longer."""
        source = torch.Generator(like.device)
        source.manual_seed((self._seed + place * _SPREAD) % (1 << 63))
        x = torch.empty_like(like, dtype=torch.float64)
        return x.exponential_(generator=source).log_().neg_().to(like.dtype)
