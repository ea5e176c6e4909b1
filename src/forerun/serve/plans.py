"""From a request to jobs for the engine: its policy, and what is remembered to answer it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

from forerun.controllers import CONTROLLERS, Controller
from forerun.engine import Request, Sampling
from forerun.model import Model
from forerun.registry import Registry, papers_of, summary_of
from forerun.requests import Constraint
from forerun.rules import RULES, AcceptanceRule
from forerun.runtime.load import SAMPLED, generation_config, sampling_settings
from forerun.serve.config import ALL_RULES, Config
from forerun.serve.errors import ApiError, bad, blaming
from forerun.serve.protocol import ChatRequest, CompletionRequest, Generation, SpeculativeFields
from forerun.serve.texts import Texts
from forerun.serve.tools import Calling

COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` for completions
LONGEST_WORDS = 4096  # characters of banned words, together


@dataclass(frozen=True)
class AnswerPlan:
    """A request that was read: `jobs[i]` writes choice `i`, from prompt `i // copies`."""

    prompts: Sequence[Sequence[int]]
    jobs: Sequence[Request]
    copies: int
    policy: Policy
    ends: frozenset[str | int]  # stop strings and end-of-text ids of its own
    ignored: Sequence[str]
    request: Generation
    writes: bool  # whether anything is written: with `max_tokens` 0 a prompt is only scored
    top: int | None  # alternatives wanted beside the chosen token; None: no log-probabilities
    calling: Calling | None = None  # functions that the answer may call

    @property
    def chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    @property
    def echo(self) -> bool:
        return bool(getattr(self.request, "echo", None))

    @property
    def opens_turn(self) -> bool:
        request = self.request
        return (
            isinstance(request, ChatRequest)
            and request.add_generation_prompt is not False
            and not request.continue_final_message
        )


class Planner:
    """Makes plans of requests. Its methods run in the thread of `texts`."""

    def __init__(self, config: Config, model: Model, texts: Texts) -> None:
        self._config, self._model, self._texts = config, model, texts
        self.default_policy = Policy(CONTROLLERS.make(config.controller), RULES.make(config.rule))
        """Of requests that do not say."""
        for name in config.allowed_rules - {ALL_RULES}:
            RULES.load(name)
        self.limit, self._reads = model.target.limit, model.target.facts.source_limit
        self.defaults = {"temperature": 1.0, **sampling_settings(generation_config(model.target))}
        """Sampling settings of requests that do not say."""

    def completion(self, request: CompletionRequest, constraint: Constraint | None) -> AnswerPlan:
        ignored = request.ignored()
        given: Sequence[Any] = request.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        self._check_count(len(given) * (request.n or 1))
        special = request.add_special_tokens is not False
        for text in given:
            if isinstance(text, str):
                self._check_length(text, "prompt")
        encode = self._texts.encode
        prompts = [encode(p, special) if isinstance(p, str) else list(p) for p in given]
        wanted = request.max_tokens
        if wanted is None:
            wanted = min(COMPLETION_TOKENS, self._config.max_tokens or COMPLETION_TOKENS)
        return self._plan(request, prompts, wanted, request.logprobs, ignored, constraint)

    def chat(
        self, request: ChatRequest, constraint: Constraint | None, calling: Calling | None = None
    ) -> AnswerPlan:
        """Read a chat request, whose `constraint` is that of its tools if there are some."""
        ignored = request.ignored()
        if request.top_logprobs and not request.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        if self._reads is not None:
            raise bad("this model has an encoder and no chat; use /v1/completions", "messages")
        self._check_count(request.n or 1)
        messages = [message.plain() for message in request.messages]
        self._check_length("".join(message["content"] for message in messages), "messages")
        options = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            options.setdefault("reasoning_effort", request.reasoning_effort)
        ids = self._texts.chat(
            messages,
            answer=request.add_generation_prompt is not False,
            resume=bool(request.continue_final_message),
            options=options,
            tools=calling.listed if calling else None,
        )
        top = (request.top_logprobs or 0) if request.logprobs else None
        wanted = request.max_completion_tokens
        wanted = request.max_tokens if wanted is None else wanted
        plan = self._plan(request, [ids], wanted, top, ignored, constraint)
        return replace(plan, calling=calling)

    def _check_count(self, count: int) -> None:
        """Refuse more texts than could ever wait, before any of them is read."""
        if count > (most := self._config.max_rows + self._config.queue):
            raise bad(f"{count} texts in one request; this server takes at most {most}", "n")

    def _check_length(self, text: str, field: str) -> None:
        """Refuse a text that cannot fit, however long its tokens are, before it is read."""
        limit = self._reads or self.limit
        if len(text) > limit * self._texts.longest:
            raise bad(
                f"{field}: {len(text)} characters are more than the context's {limit} tokens",
                field,
                "context_length_exceeded",
            )

    def _plan(
        self,
        request: Generation,
        prompts: list[list[int]],
        wanted: int | None,
        top: int | None,
        ignored: list[str],
        constraint: Constraint | None,
    ) -> AnswerPlan:
        most = self._config.max_tokens
        wanted = None if wanted == -1 else wanted
        if wanted is not None and most is not None and wanted > most:
            raise bad(f"{wanted} tokens were asked for; at most {most} here", "max_tokens")
        policy = self.policy(request)
        copies, eos, more = request.n or 1, self._model.eos, request.stop_token_ids or ()
        ends = frozenset({*_stops(request), *more} - eos)
        prediction: Sequence[int] = ()
        predicted, plain = request.prediction, request.speculative is False
        if predicted is not None and not plain and policy.rule.lossless:
            self._check_length(predicted.text, "prediction")
            prediction = tuple(self._texts.encode(predicted.text, special=False)[: self.limit])
        self._check_ids(request, prompts)
        jobs = []
        for prompt in prompts:
            given, source = self._model.context(prompt)
            room = self.limit - len(given)
            if room < (wanted != 0):  # what writes nothing needs no room
                raise bad(
                    f"the prompt has {len(prompt)} tokens and the context holds {self.limit}; "
                    "shorten it",
                    "prompt",
                    "context_length_exceeded",
                )
            tokens = 1 if wanted == 0 else min(wanted or most or room, room)
            for copy in range(copies):
                sampling = self._sampling(request, tokens, copy, constraint)
                # A seed gives the same text streamed or not.
                tossed = not (sampling.greedy or policy.rule.gumbel_max)
                soon = bool(request.stream) or (request.seed is not None and tossed)
                jobs.append(
                    Request(
                        tuple(given), sampling, policy.controller, policy.rule, source,
                        stream=soon, logprobs=top, prediction=prediction,
                    )
                )  # fmt: skip
        return AnswerPlan(prompts, jobs, copies, policy, ends, ignored, request, wanted != 0, top)

    def _check_ids(self, request: Generation, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse token ids outside the vocabulary, by the field that has them."""
        fields: dict[str, Iterable[int]] = {
            "prompt": chain.from_iterable(prompts),
            "logit_bias": request.logit_bias or (),
            "stop_token_ids": request.stop_token_ids or (),
            "allowed_token_ids": request.allowed_token_ids or (),
        }
        size = self._model.target.vocab_size
        for field, tokens in fields.items():
            for token in tokens:
                if not 0 <= token < size:
                    outside = f"token id {token} in {field} is outside the vocabulary of {size}"
                    raise bad(outside, field)

    def _sampling(
        self, request: Generation, tokens: int, copy: int, constraint: Constraint | None
    ) -> Sampling:
        more, allowed = tuple(request.stop_token_ids or ()), request.allowed_token_ids
        eos = more if request.ignore_eos or not more else (*self._model.eos, *more)
        given: dict[str, Any] = dict(self.defaults)
        for name in (*SAMPLED, "presence_penalty", "frequency_penalty"):
            if (value := getattr(request, name)) is not None:
                given[name] = value
        given["top_k"] = max(given.get("top_k", 0), 0)
        if request.seed is not None:
            given["seed"] = request.seed + copy
        given["logit_bias"] = request.logit_bias or {}
        least = request.min_tokens or 0
        if least > tokens:
            raise bad(f"min_tokens is {least} and at most {tokens} can be written", "min_tokens")
        if sum(map(len, request.bad_words or ())) > LONGEST_WORDS:
            raise bad(f"at most {LONGEST_WORDS} characters of bad_words", "bad_words")
        chats = isinstance(request, ChatRequest) and not request.ignore_eos
        stops, ends = _stops(request), self._texts.turns.ends if chats else ()
        with blaming(None):
            return Sampling(
                **given,
                max_new_tokens=tokens,
                min_new_tokens=least,
                stop=(*stops, *(end for end in ends if end not in stops)),
                eos=eos or None,
                ignore_eos=bool(request.ignore_eos) and not more,
                constraint=constraint,
                bad_words=tuple(filter(None, request.bad_words or ())),
                allowed_tokens=None if allowed is None else tuple(allowed),
            )

    def policy(self, request: Generation) -> Policy:
        """The policy of a request; `ApiError` for a spec that cannot be made, or a lossy rule that
        the operator does not allow."""
        asked, field = _asked(request)
        if asked is False:
            return Policy(CONTROLLERS.make(PLAIN), RULES.make("gumbel"))
        own = self.default_policy
        if asked is None or asked is True:
            return own
        with blaming(field):
            name, kept = asked.controller, asked.rule
            controller = CONTROLLERS.make(own.controller if name is None else name)
            rule = RULES.make(own.rule if kept is None else kept)
        for name in () if rule.lossless or rule == own.rule else _names(rule):
            if not self._allows(name):
                raise ApiError(
                    403,
                    f"rule {name!r} is lossy and this server does not allow it; use a lossless "
                    f"one, or have the operator start it with --allow-rule {name}",
                    field,
                    "rule_not_allowed",
                )
        return Policy(controller, rule, asked.report or own.report)

    def _allows(self, rule: str) -> bool:
        cls = RULES.load(rule)
        return cls.lossless or bool({rule, ALL_RULES} & self._config.allowed_rules)

    def parts(self) -> dict[str, Any]:
        """Controllers and rules that requests may name, and what is taken where they name none."""
        rules = _listed(RULES)
        for part in rules:
            name = part["name"]
            part |= {"lossless": RULES.load(name).lossless, "allowed": self._allows(name)}
        controllers, own = _listed(CONTROLLERS), self.default_policy.to_json()
        return {"default": own, "controllers": controllers, "rules": rules}


def _stops(request: Generation) -> tuple[str, ...]:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    stops = [stop for stop in stops if stop]
    if len(stops) > 32 or sum(map(len, stops)) > 4096:
        raise bad("at most 32 stop strings of 4096 characters together", "stop")
    return tuple(stops)


PLAIN = "fixed(0)"
"""The controller of `"speculative": false`."""


@dataclass(frozen=True)
class Policy:
    """How one request runs ahead, and how much it is told of that."""

    controller: Controller
    rule: AcceptanceRule
    report: str = "none"

    def to_json(self) -> dict[str, Any]:
        return {
            "controller": CONTROLLERS.text(self.controller),
            "rule": RULES.text(self.rule),
            "lossless": self.rule.lossless,
        }


def _listed(registry: Registry) -> list[dict[str, Any]]:
    made = [(name, registry.load(name)) for name in registry.names()]
    return [
        {"name": name, "summary": summary_of(cls), "paper": "; ".join(papers_of(cls).values())}
        for name, cls in made
    ]


def _names(rule: AcceptanceRule) -> Iterator[str]:
    yield RULES.text(rule).partition("(")[0]
    if is_dataclass(rule):
        for f in fields(rule):
            inner = getattr(rule, f.name)
            if isinstance(inner, AcceptanceRule):
                yield from _names(inner)


def _asked(request: Generation) -> tuple[bool | SpeculativeFields | None, str]:
    """`speculative`, or vLLM's flat spelling of it, and the field it stood in."""
    flat = request.vllm_xargs
    if flat is None or not flat.model_fields_set:
        return request.speculative, "speculative"
    if request.speculative is not None:
        raise bad("give speculative or vllm_xargs, not both", "vllm_xargs")
    return flat, "vllm_xargs"
