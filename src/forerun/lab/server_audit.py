"""Classifies where greedy texts of two OpenAI-compatible servers part, by their log-probabilities.

Nothing is known of the servers but what they answer. Up to the first difference both read the same
tokens, so their log-probabilities should be the same but for rounding; how far rounding moves them
is measured on the tokens the texts have in common.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from typing import Any, Literal

from forerun.engine.text import common
from forerun.errors import PromptError, SettingError

TOP = 5  # alternatives asked for, as many as OpenAI gives for completions
SAFETY = 4.0  # a gap within this many times the movement on common tokens is rounding
ROUNDING = 1e-4  # least movement that is taken for rounding, in nats: servers write few digits
CEILING = 0.5  # most nats between two tokens that rounding explains in any precision
ServerOutcome = Literal["identical", "near-tie", "other text", "fault"]  # of one comparison
PLAIN = {"speculative": False}  # the field by which forerun's server decodes plainly
TIMEOUT = 600.0


@dataclass(frozen=True)
class ToldToken:
    """One token of an answer as its server tells it."""

    token: str
    logprob: float
    top: Mapping[str, float]  # the most likely tokens there, with their log-probabilities

    def of(self, token: str) -> float | None:
        """The log-probability of a token; None if the server does not say."""
        return self.logprob if token == self.token else self.top.get(token)

    @property
    def lag(self) -> float:
        """How far the token is behind the most likely one, ≥ 0."""
        return max(max(self.top.values(), default=self.logprob) - self.logprob, 0.0)


AnswerPair = tuple[Sequence[ToldToken], Sequence[ToldToken]]  # greedy answers to one prompt


@dataclass(frozen=True)
class ServerComparison:
    """Two answers to one prompt."""

    prompt: int  # its index
    outcome: ServerOutcome
    position: int | None = None  # of the first difference; None if they are identical
    tokens: tuple[str | None, str | None] = (None, None)  # there; None where one ended
    gaps: tuple[float | None, float | None] = (None, None)
    """How far each server prefers its own token, in nats; None where it does not say."""
    bound: float = 0.0  # what counts as rounding
    reason: str = ""


class OpenAIServer:
    """A server's base URL, with or without `http://` and `/v1`, and what every request to it says:
    a key, sent as a bearer token, and fields in each body."""

    def __init__(self, url: str, key: str | None = None, fields: Any = None) -> None:
        address = url if "://" in url else f"http://{url}"
        self.url = address.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._fields = dict(fields or {})

    @cached_property
    def model(self) -> dict[str, Any]:
        """The first model it lists; `SettingError` if it cannot be reached, or lists none."""
        listed = self._call("/models").get("data") or []
        if not listed:
            raise SettingError(f"{self.url} lists no models")
        return dict(listed[0])

    def write(self, content: Any, max_tokens: int) -> list[ToldToken]:
        """The tokens of the greedy answer to a text, token ids or messages; `SettingError` if it
        fails, or answers without log-probabilities."""
        body = {"model": self.model["id"], "max_tokens": max_tokens, "temperature": 0}
        if isinstance(content, list) and content and isinstance(content[0], Mapping):
            path, asked = "/chat/completions", {"messages": content, "logprobs": True}
            asked["top_logprobs"] = TOP
        else:
            path, asked = "/completions", {"prompt": content, "logprobs": TOP}
        answer = self._call(path, body | asked | self._fields)
        try:
            choice = answer["choices"][0]
            places = _places(choice.get("logprobs") or {})
            text = choice.get("text") or (choice.get("message") or {}).get("content")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise SettingError(f"{self.url}{path} answers in no form known: {error!r}") from error
        if text and not places:
            raise SettingError(f"{self.url} gives no log-probabilities; an audit needs them")
        return places

    def _call(self, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace").strip()
            raise SettingError(f"{self.url}{path} answered {error.code}: {text}") from error
        except (OSError, HTTPException, TypeError, ValueError) as error:
            raise SettingError(f"{self.url}{path} cannot be read: {error}") from error


def _places(logprobs: Mapping[str, Any]) -> list[ToldToken]:
    """Of completions' parallel lists, or of chat's (and llama.cpp's) list of entries."""
    if (content := logprobs.get("content")) is not None:
        return [
            ToldToken(
                entry["token"],
                float(entry["logprob"]),
                {top["token"]: float(top["logprob"]) for top in entry.get("top_logprobs") or ()},
            )
            for entry in content
        ]
    tokens = logprobs.get("tokens") or ()
    values = logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    return [
        ToldToken(token, float(value), {k: float(v) for k, v in (top or {}).items()})
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]


def forerun_plain(server: OpenAIServer, key: str | None = None) -> OpenAIServer:
    """The same server with speculation off; `SettingError` if it is none of forerun's."""
    if server.model.get("owned_by") != "forerun":
        raise SettingError(
            f"{server.url} is not forerun's, whose speculation a request can switch off; "
            "give `against`, the URL of the same model without speculation"
        )
    return OpenAIServer(server.url, key, PLAIN)


def compare(pairs: Iterable[AnswerPair]) -> list[ServerComparison]:
    """Judge pairs of answers, one per prompt (`PromptError` without any), by what rounding does on
    all."""
    texts = list(pairs)
    if not texts:
        raise PromptError("no prompts to audit")
    bound = min(SAFETY * max(ROUNDING, *map(_movement, texts)), CEILING)
    return [_judged(i, pair, bound) for i, pair in enumerate(texts)]


def _common(pair: AnswerPair) -> int:
    """How many tokens two answers begin alike."""
    return common(*([place.token for place in text] for text in pair))


def _movement(pair: AnswerPair) -> float:
    """How far log-probabilities of the same token move between two servers: the upper tail. Of the
    tokens chosen alike: one place where a server goes wrong must not excuse itself."""
    shifts = sorted(
        abs(a.logprob - b.logprob) for a, b, _ in zip(*pair, range(_common(pair)), strict=False)
    )
    return shifts[int(0.9 * (len(shifts) - 1))] if shifts else 0.0


def _judged(index: int, pair: AnswerPair, bound: float) -> ServerComparison:
    at = _common(pair)
    if len(pair[0]) == len(pair[1]) == at:
        return ServerComparison(index, "identical", bound=bound)
    left, right = (text[at] if at < len(text) else None for text in pair)
    tokens = left.token if left else None, right.token if right else None
    gaps = _gap(left, right), _gap(right, left)
    outcome: ServerOutcome = "other text"
    reason = "one ends where the other goes on"
    if lags := [place.lag for place in (left, right) if place and place.lag > bound]:
        outcome = "fault"
        reason = f"a server writes a token {max(lags):.3g} nats less likely than its own best"
    elif left and right:
        if all(gap is not None and gap <= bound for gap in gaps):
            outcome = "near-tie"
        shown = " and ".join("an unknown number of" if g is None else f"{g:.3g}" for g in gaps)
        reason = f"each prefers its token, by {shown} nats; rounding moves {bound:.3g}"
    return ServerComparison(index, outcome, at, tokens, gaps, bound, reason)


def _gap(place: ToldToken | None, other: ToldToken | None) -> float | None:
    """By how much a place's token is ahead of the other's; None where that is not known."""
    theirs = place.of(other.token) if place and other else None
    return None if place is None or theirs is None else place.logprob - theirs
