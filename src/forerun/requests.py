"""What is asked of an engine: a prompt to run, and how."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol

from forerun.checks import flag
from forerun.errors import PromptError, SettingError, UnknownNameError, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from forerun.controllers.base import Controller
    from forerun.costs import Costs
    from forerun.rules import AcceptanceRule

SMALL, LARGE = 1e-30, 1e30
"""Bounds of what logits are multiplied by or grow by: float32 has none beyond about 1e38."""
_ID = re.compile(r"-?\d+")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class Matcher(Protocol):
    """Where in a constraint one text is. Asked by one thread at a time."""

    def allowed(self) -> NDArray[np.bool_]:
        """`(≤ V,)` tokens that may come next and go on with the text."""

    def complete(self) -> bool:
        """Whether the text may end here."""

    def advance(self, token: int) -> bool:
        """Follow a token; False, and stay, if it is not allowed."""

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""

    def forced(self) -> Sequence[int]:
        """Tokens that are as good as certain to come next, to be drafted; none is no mistake."""


class Constraint(Protocol):
    """What a text may say: a language over tokens. `forerun.grammar` makes them."""

    def begin(self) -> Matcher:
        """At the beginning of a text."""


@dataclass(frozen=True)
class Sampling:
    """How one request wants its text sampled.

    The transform of the logits, in this order: logit bias, end-of-text banned before
    `min_new_tokens`, repetition / presence / frequency penalties, allowed tokens, bad words, the
    constraint, temperature, top-k, top-p, min-p.

    Args:
        temperature (T): 0 is greedy; higher is more random. Otherwise from 1e-30 to 1e30.
        top_k (K): keep the K most likely tokens; 0 keeps all.
        top_p (P): keep the smallest set with this much probability. In (0, 1].
        min_p (P): drop tokens below P times the highest probability. In [0, 1].
        repetition_penalty: above 1 makes tokens already in the text unlikely. From 1e-30 to 1e30;
            divides positive and multiplies negative logits of tokens in the prompt or the output.
        presence_penalty: subtracted from logits of tokens in the output.
        frequency_penalty: likewise, once per occurrence.
        logit_bias (ID=VALUE): add a value to a token's logit. Token id → value of at most 1e30;
            −inf, as JSON "-inf", bans it.
        seed (S): of the random numbers; the same gives the same. Requests have random numbers of
            their own, by seed and prompt: prompts that share a seed do not draw alike. None draws
            one (it is in the result). With one, no text depends on clock or neighbours, and by the
            rule `gumbel` none on its draft.
        max_new_tokens: most tokens to write, at least 1.
        min_new_tokens: no end of text before this many tokens. By a token or a stop string.
        stop (STR): end before this text. A string or several; one that is a special token is that
            token.
        eos: end-of-text token id or ids; None uses the model's.
        ignore_eos: go on after the end of text.
        constraint: what the output may say (`forerun.grammar`); at every place, tokens that it
            excludes have probability 0, and end-of-text tokens come only where it is complete.
        bad_words: texts that the output must not hold, however it is split into tokens.
        allowed_tokens: the only token ids that may be written; None: all.
        processor: maps the output so far and the `(V,)` logits behind it, both only to be read, to
            logits; asked at every place, of target and draft alike, after all of the above but
            before temperature, top-k, top-p and min-p.
        stopping: whether the text ends after the last token of the output so far; asked once for
            every committed token, in their order.
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
    constraint: Constraint | None = None
    bad_words: tuple[str, ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    processor: Callable[[Sequence[int], Any], Any] | None = None
    stopping: Callable[[Sequence[int]], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            self._set(name, _number(name, getattr(self, name)))
        for name in ("top_k", "max_new_tokens", "min_new_tokens"):
            self._set(name, _integer(name, getattr(self, name)))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -math.inf, math.inf))
        for name in ("stop", "bad_words"):
            texts = _several(name, getattr(self, name), str, "text")
            good = all(t and t.encode("utf-8", "ignore").decode() == t for t in texts)
            require(good, name, texts, "made of strings, none empty or with half a character")
            self._set(name, texts)
        for name in ("eos", "allowed_tokens"):
            if (ids := getattr(self, name)) is not None:
                self._set(name, _several(name, ids, Integral, "a token id"))
        good = self.allowed_tokens is None or bool(self.allowed_tokens)
        require(good, "allowed_tokens", self.allowed_tokens, "at least one token id")
        flag("ignore_eos", self.ignore_eos)
        for name in ("processor", "stopping"):
            asked = getattr(self, name)
            require(asked is None or callable(asked), name, asked, "a function")
        good = self.constraint is None or hasattr(self.constraint, "begin")
        require(good, "constraint", self.constraint, "a Constraint, see forerun.grammar")
        require(not (self.constraint and self.ignore_eos), "ignore_eos", True, "off: a constraint "
                "says where the text may end")  # fmt: skip
        require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias,
                "a mapping of token ids to numbers")  # fmt: skip
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

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sampling:
        """From settings by their names, as files and keyword arguments hold them.

        Raises:
            UnknownNameError: no such setting; the nearest is named.
            SettingError: one of the wrong kind or out of range.

        >>> Sampling.of({"temperature": 0.5, "logit_bias": {"12": -5}}).logit_bias
        {12: -5}
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownNameError.among("setting", name, known)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):  # JSON's keys are texts
            keys = {k: int(k) if isinstance(k, str) and _ID.fullmatch(k) else k for k in bias}
            values = {**values, "logit_bias": {keys[k]: bias[k] for k in bias}}
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is the only one."""
        return self.temperature == 0

    @property
    def reshapes(self) -> bool:
        """Whether anything but the temperature touches the logits."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return self.excludes or any(penalties)

    @property
    def excludes(self) -> bool:
        """Whether tokens may be made impossible, so that none may be left."""
        given = self.logit_bias or self.min_new_tokens or self.bad_words or self.allowed_tokens
        return bool(given) or self.constraint is not None or self.processor is not None

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def to_json(self) -> dict[str, Any]:
        """All that can be written down: no functions of the caller's."""
        hidden = {"processor", "stopping"}
        return {name: value for name, value in asdict(self).items() if name not in hidden}


@dataclass(frozen=True)
class Request:
    """A prompt to run: the one noun for it, at every door.

    Args:
        prompt: token ids, at least one.
        sampling: how its text is sampled.
        controller: how far to run ahead.
        rule: what to keep.
        source: token ids of the text an encoder reads, for encoder-decoder targets.
        stream: somebody waits for its first token: it comes from the pass that reads the prompt, as
            soon as in plain decoding. Else the first draft rides along in that pass, which spares
            one. A rule that tosses coins takes others then.
        logprobs: report the log-probability of every committed token, and of so many of the
            target's most likely ones there, ≥ 0, before the sampling transform; None for none.
        prediction: token ids that the output is expected to hold, in this order: they are drafted
            where it follows them, and the drafter where it does not. Changes no output.
        costs: what its policy, or governor, goes by instead of what is measured; then it decides
            for itself, and nothing is carried to the next request.
        keep_logits: give the target's logits of every committed token back, and
        keep_cache: a copy of its keys and values, but for the last token's.
        read: such a copy (`Columns`) of the prompt's beginning, which is not read again.
        scores: write nothing, and report of every token of the prompt but the first what `logprobs`
            reports of written ones; see `to_score`.
    """

    prompt: Sequence[int]
    sampling: Sampling
    controller: Controller
    rule: AcceptanceRule
    source: Sequence[int] | None = None
    stream: bool = False
    logprobs: int | None = None
    prediction: Sequence[int] = ()
    costs: Costs | None = None
    keep_logits: bool = False
    keep_cache: bool = False
    read: Any = None
    scores: int | None = None

    @classmethod
    def to_score(cls, tokens: Sequence[int], top: int) -> Request:
        """A text of at least two tokens to be scored: nothing is written; `top` is how many of the
        target's likeliest tokens to report at each place, ≥ 0."""
        from forerun.controllers import CONTROLLERS
        from forerun.rules import RULES

        plain, rule = CONTROLLERS.make("fixed(0)"), RULES.make("gumbel")
        return cls(tokens, Sampling(), plain, rule, scores=top)

    def check(
        self,
        vocab_size: int,
        limit: int,
        has_tokenizer: bool,
        tells: bool,
        source_limit: int | None = None,
    ) -> None:
        """Refuse what cannot be served, before anything runs.

        Args:
            vocab_size: of the target.
            limit: most tokens of the target's context.
            has_tokenizer: whether text can be made.
            tells: whether the drafter has a distribution that rules can read.
            source_limit: most tokens of a source; None if the target has no encoder.

        Raises:
            PromptError: the prompt is empty, holds unknown ids or leaves no room in the context.
            SettingError: stop strings without a tokenizer, an unusable token id, or a rule that
                cannot serve this sampling or this drafter.
        """
        if self.scores is None:
            check_length("prompt", len(self.prompt), limit - 1, f"context holds {limit}")
        elif source_limit is not None:
            raise SettingError("an encoder-decoder model scores no text without its source")
        elif not 2 <= (count := len(self.prompt)) <= limit:
            raise PromptError(f"a text of 2 to {limit} tokens can be scored; this one has {count}")
        else:
            require(self.scores >= 0, "top", self.scores, "≥ 0")
        _check_ids("prompt", self.prompt, vocab_size)
        if self.prediction:
            _check_ids("prediction", self.prediction, vocab_size)
            if not self.rule.lossless:
                raise SettingError("a prediction goes with a lossless rule; leave one of them out")
        for name in ("logit_bias", "eos", "allowed_tokens"):
            for token in getattr(self.sampling, name) or ():
                if not 0 <= token < vocab_size:
                    raise SettingError(
                        f"token id {token} in {name} is outside the vocabulary of {vocab_size}"
                    )
        self._check_source(vocab_size, source_limit)
        for what, texts in (("stop strings", "stop"), ("bad_words", "bad_words")):
            if getattr(self.sampling, texts) and not has_tokenizer:
                raise SettingError(f"{what} need a tokenizer")
        if self.logprobs is not None:
            require(0 <= self.logprobs <= vocab_size, "logprobs", self.logprobs, "≥ 0")
        self._check_rule(tells)

    def _check_rule(self, tells: bool) -> None:
        from forerun.rules import RULES

        rule, temperature = self.rule, self.sampling.temperature
        if rule.greedy_only and temperature:
            raise SettingError(
                f"rule {RULES.text(rule)!r} needs temperature 0, got {temperature}; "
                "use rule 'standard'"
            )
        if rule.reads_draft and not tells:
            raise SettingError(
                f"rule {RULES.text(rule)!r} reads the draft's distribution and this drafter has "
                "none; use a draft model, or rule 'standard'"
            )

    def _check_source(self, vocab_size: int, limit: int | None) -> None:
        source = self.source
        if source is None and limit is None:
            return
        if limit is None:
            raise SettingError("a source is for encoder-decoder targets; this one has no encoder")
        if source is None:
            raise SettingError("this target has an encoder: give the text that it reads as source")
        check_length("source", len(source), limit, f"encoder reads {limit}")
        _check_ids("source", source, vocab_size)


def check_length(what: str, count: int, most: int, reason: str) -> None:
    """Raise `PromptError` unless a prompt or source has 1 to `most` tokens."""
    if not count:
        raise PromptError(f"the {what} is empty; give at least one token of text")
    if count > most:
        raise PromptError(f"the {what} has {count} tokens and the {reason}; shorten the {what}")


def _check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise PromptError(f"the {what} holds token ids outside the vocabulary of {vocab_size}")


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
    banned = value == "-inf" or (isinstance(value, Real) and value == -math.inf)
    return -math.inf if banned else _number(f"logit_bias of token {token}", value)
