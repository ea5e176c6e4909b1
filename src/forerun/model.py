"""Models to generate with: `load` one, then `generate` or `stream`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from forerun import chat, zoo
from forerun.checks import flag, size, whole
from forerun.controllers import CONTROLLERS, Controller
from forerun.drafters import DRAFTERS, Drafter
from forerun.drafters.base import DrafterSpec
from forerun.drafters.chain import Chain
from forerun.drafters.model import ModelDraft
from forerun.drafters.none import NoDraft
from forerun.engine import Completion, Engine, Event, Logprob, Request, Sampling
from forerun.engine.lengths import Memory
from forerun.engine.meter import Meter
from forerun.engine.prefixes import Prefixes, Reuse
from forerun.engine.shared import SharedEngine
from forerun.errors import ForerunWarning, GenerationError, SettingError, UnknownNameError, require
from forerun.languages import DecoderOpening, opening
from forerun.lazy import torch
from forerun.prompts import Reader, answering, encode, read, split
from forerun.rules import RULES, AcceptanceRule
from forerun.runtime import Executor, Rows, gguf, load_tokenizer
from forerun.runtime.drafts import own_draft
from forerun.runtime.load import resolve_device
from forerun.runtime.runtimes import RUNTIMES, RuntimeSpec, Source, default_runtime
from forerun.settings import Settings, resolve

DEFAULT_CONTROLLER = "auto"
DEFAULT_RULE = "gumbel"
MANY = 1_000_000_000
"""Weights of a file from which SmolLM2 is worth its place, a sixth of the time of 1.5 billion."""
CHAIN = re.compile(r"\s*(\w+)((?:\([^()]*\))?)\s*\+\s*(.+)", re.DOTALL)
"""Name and settings of the first drafter of a chain, and the second."""

PromptLike: TypeAlias = (
    "str | Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor | Mapping[str, Any]"
    " | Sequence[Mapping[str, Any]]"
)
"""Text, token ids in a list or a 1-D array, what a tokenizer made of one text, or messages."""


class Model:
    """A target with a drafter, ready to generate. Made by `load`. It may be used from many threads:
    requests that run at the same time share rounds."""

    def __init__(
        self,
        target: Rows | Executor,
        drafter: Drafter,
        tokenizer: Any = None,
        settings: Settings | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.target = target if isinstance(target, Rows) else Rows(target)
        self.drafter, self.tokenizer = drafter, tokenizer
        self.settings = settings or Settings()
        self.eos = _end_of_text(self.target, tokenizer)
        self.opening = DecoderOpening(self.target.facts.start)
        """With an encoder: what its texts begin with, where a call asks for nothing else."""
        self._memory: Memory = {}
        self.meter = Meter.of(self.target, drafter)
        """What rounds cost; put `Meter.given(costs)` here to decide by costs of your own."""
        Reuse(prefixes, (self.target, *drafter.caches))  # refuses what keeps none
        self.prefixes = prefixes  # texts read before; None reads every text
        self._plain = NoDraft().build(None, None)
        self._shared = SharedEngine(self._engine)

    @overload
    def generate(self, prompt: str, **settings: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[PromptLike], **settings: Any) -> list[Completion]: ...
    def generate(
        self, prompt: PromptLike | Sequence[PromptLike], **settings: Any
    ) -> Completion | list[Completion]:
        """Generate for one prompt or a list of prompts (decoded as one ragged batch).

        Takes the settings of `stream`. A prompt is text or token ids (a list or a 1-D array of
        integers), what a tokenizer made of one text, or a conversation (messages); a list of ids or
        messages on its own is one prompt. An encoder-decoder model's prompt is its
        source: the text to translate or to sum up.

        Raises:
            GenerationError: the only prompt ended with an error in the middle of its text; of
                several, that prompt's `finish_reason` is "error".

        >>> model = load()
        >>> done = model.generate("English: I like apples.\\nGerman:", max_new_tokens=8)
        >>> done.stats.tokens == len(done.tokens) <= 8
        True
        """
        prompts, one = split(prompt)
        stream = self.stream(prompts, **{"first_token_soon": False, **settings})
        done = {e.request: e.completion for e in stream if e.completion}
        results = [done[i] for i in range(len(prompts))]
        if one and (error := results[0].error) is not None:
            raise GenerationError(error, results[0])
        return results[0] if one else results

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        system: str | None = None,
        **settings: Any,
    ) -> Completion:
        """Answer a conversation, by the model's own chat template.

        Args:
            messages: each with "role" and "content"; a text is what a user says first.
            system: what the system says before; None leaves that to template and messages.
            settings: as for `generate`. The answer also ends where another turn begins; its text is
                without what the template puts between turn and answer, like a space.

        Raises:
            PromptError: no chat template, or one that refuses the messages.
            GenerationError: an error in the middle of the answer.

        >>> load().chat("Who are you?", max_new_tokens=3).stats.tokens
        3
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        reader = Reader(self.tokenizer, self.prompt_limit + 1, system=system)
        fields = {k: settings.pop(k) for k in list(settings) if k in Sampling.__dataclass_fields__}
        [how] = _samplings(settings.pop("sampling", None), fields, 1)
        with self._shared.turns:
            ids = reader.encode([[dict(turn) for turn in turns]])
        [done] = self.generate([ids], sampling=answering(self.tokenizer, how), **settings)
        return replace(done, text=done.text.removeprefix(chat.turns(self.tokenizer).lead))

    def stream(
        self,
        prompt: PromptLike | Sequence[PromptLike],
        *,
        controller: str | Controller | None = None,
        rule: str | AcceptanceRule | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        batch_size: int = 16,
        plain: bool = False,
        logprobs: int | None = None,
        first_token_soon: bool = True,
        **settings: Any,
    ) -> Generator[Event]:
        """Generate, yielding an `Event` per request and round; a request's id is its place.

        Args:
            prompt: text, token ids, messages, or a list of such.
            controller: how far to run ahead: a spec like ``"gammatune(eta=0.3)"`` or an object.
                None is that of the settings the model was loaded with, or else `auto`.
            rule: what to keep, likewise; None is that of the settings, or else `gumbel`.
            sampling: one for all prompts or one per prompt; or give its fields as keywords
                (`temperature`, `max_new_tokens`, `seed`, `stop`, ...).
            batch_size: prompts decoded together.
            plain: leave the drafter out and decode one token at a time.
            logprobs: report log-probabilities; see `Request`.
            first_token_soon: take the first token from the pass that reads the prompt, as soon as
                plainly. Otherwise (in `generate`) the first draft rides along in that pass.
            settings: fields of `Sampling`, and for encoder-decoder models those of `open`:
                `language`, and `decoder_prompt`.

        Raises:
            PromptError: a prompt that is none, is empty, or does not fit the context.
            SettingError: a setting that is unknown or out of range.

        >>> model = load()
        >>> for event in model.stream("Once upon a time", max_new_tokens=4):
        ...     assert event.round.committed == len(event.pieces)
        """
        prompts, _ = split(prompt)
        whole("batch_size", batch_size, 1)
        flag("plain", plain)
        opened = {k: settings.pop(k) for k in ("language", "decoder_prompt") if k in settings}
        samplings = _samplings(sampling, settings, len(prompts))
        if controller is None:
            controller = self.settings.controller or DEFAULT_CONTROLLER
        if rule is None:
            rule = (None if plain else self.settings.rule) or DEFAULT_RULE
        length, keep = CONTROLLERS.make(controller), RULES.make(rule)
        drafter = self.drafter
        if plain:
            drafter, length = self._plain, CONTROLLERS.make("fixed(0)")
        with self._shared.turns:  # tokenizers are not made for several threads
            ids = [self.encode(text) for text in prompts]
            begin = self.open(**opened)
        contexts = [self.context(tokens, begin) for tokens in ids]
        requests = [
            Request(given, how, length, keep, source, first_token_soon, logprobs)
            for (given, source), how in zip(contexts, samplings, strict=True)
        ]
        yield from self.run(requests, batch_size, drafter)

    def run(
        self, requests: Sequence[Request], batch_size: int = 16, drafter: Drafter | None = None
    ) -> Generator[Event]:
        """Run requests as they are, together with those of other threads.

        Args:
            requests: an event's request is a place in this list.
            batch_size: of them decoded together.
            drafter: None: that of the model.
        """
        return self._shared.stream(drafter or self.drafter, batch_size, requests)

    def open(
        self, language: str | None = None, decoder_prompt: str | Sequence[int] | None = None
    ) -> DecoderOpening:
        """What an encoder-decoder model's texts begin with; without arguments, `opening`.

        Args:
            language: the one to write in, as the model's tokenizer names it.
            decoder_prompt: what the text shall begin with; not part of what comes back.

        Raises:
            SettingError: the model has no encoder, or no such language.
        """
        if language is None and decoder_prompt is None:
            return self.opening
        if self.target.facts.source_limit is None:
            raise SettingError(
                "language and decoder_prompt are for encoder-decoder models; this one has no "
                "encoder: write both into the prompt"
            )
        return opening(self.target.facts.start, self.tokenizer, language, decoder_prompt)

    def context(
        self, ids: Sequence[int], begin: DecoderOpening | None = None
    ) -> tuple[list[int], list[int] | None]:
        """A prompt's tokens as `Request` takes them: prompt, and source if there is an encoder."""
        if self.target.facts.source_limit is None:
            return list(ids), None
        begin = begin or self.opening
        return list(begin.prompt), [*begin.source, *ids]

    def contexts(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """`context` of several prompts, as `Rows.read` takes them; no sources without encoder."""
        pairs = [self.context(ids) for ids in prompts]
        sources = [source for _, source in pairs if source is not None]
        return [prompt for prompt, _ in pairs], sources if sources else None

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt: the context less one to write, or what the encoder reads."""
        limit = self.target.facts.source_limit
        return self.target.limit - 1 if limit is None else limit - len(self.opening.source)

    def _engine(self, drafter: Drafter, batch_size: int) -> Engine:
        if self.target.lengths:
            raise SettingError(
                "another engine is running on this model's target; finish or close it first"
            )
        return Engine(
            self.target, drafter, self.tokenizer, self.eos, batch_size,
            self._memory, self.meter, self.prefixes,
        )  # fmt: skip

    def score(self, text: PromptLike, top: int = 0) -> list[Logprob]:
        """Log-probabilities of a given text under the target, in plain passes.

        Args:
            text: text or token ids, at least two tokens that fit the context.
            top: how many of the likeliest tokens to report at each place, ≥ 0.

        Returns:
            One `Logprob` per token but the first, natural logarithms, before any sampling.

        Raises:
            PromptError: fewer than two tokens, or more than the context holds.
        """
        with self._shared.turns:
            ids = self.encode(text)
        [done] = [e.completion for e in self.run([Request.to_score(ids, top)]) if e.completion]
        if done.error is not None:
            raise GenerationError(done.error, done)
        assert done.scores is not None, "it was scored"
        return done.scores

    def forget(self) -> None:
        """Start the next request as if it were the first; what rounds cost stays known."""
        self._memory.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def encode(self, prompt: PromptLike) -> list[int]:
        """Token ids of a prompt (ids pass through); `PromptError` if it is none."""
        return encode(self.tokenizer, read(prompt))


def load(
    target: str | Path | None = None,
    draft: str | Path | DrafterSpec | None = None,
    *,
    settings: str | Path | Settings | None = None,
    runtime: str | RuntimeSpec | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    prefix_cache: int | str = 0,
) -> Model:
    """Load a target and who runs ahead of it.

    Args:
        target: a folder or Hugging Face id; None loads the pair that ships with forerun,
            "translator" and "digest" the encoder-decoder models that do.
        draft: a folder or Hugging Face id of a draft model, or a drafter spec (``"lookup(n=3)"``,
            ``"none"``), or two as a chain (``"memory+eagle"``). None uses that of `settings`, or
            else what `default_draft` says.
        settings: a file of `forerun tune` or `sweep`, or what was read from one: draft, controller
            and rule where no argument gives them.
        runtime: what runs the models: "torch", "openvino", "cudagraphs", a spec like
            ``"openvino(precision='int8')"``, or "auto" (the default, but "torch" for drafters that
            read the target from within, like `specbound`); see docs/runtimes.md.
        device: "cpu", "cuda", ...; None uses a GPU if there is one.
        dtype: "auto" (as saved), "float32", "bfloat16" or "float16". None is "auto", but float32
            for what ships on a CPU: there it is faster, and speculative output is exactly
            plain output.
        trust_remote_code: run modelling code that comes with the checkpoint.
        prefix_cache: bytes, or text like "512MB", that copies of read texts may take: what begins
            like one of them is not read again. 0 keeps none.

    Raises:
        ModelError: a missing, corrupt or unsupported model, or a draft with another tokenizer.
        SettingError: a device, dtype or drafter that does not exist; unreadable settings.

    >>> load().generate("Once upon a time", max_new_tokens=5).finish_reason
    'length'
    """
    chosen = _chosen(target, settings)
    spec = drafter_spec(draft or chosen.draft or default_draft(target))
    runs = RUNTIMES.make(runtime or ("torch" if spec.on_torch else default_runtime()))
    spec = _running(spec, runs, trust_remote_code)
    where = zoo.locate(target)
    spec.check_target(where)
    if zoo.is_shipped(target) and dtype is None and resolve_device(device) == "cpu":
        dtype = "float32"
    rows = runs.load(Source(where, device, dtype, trust_remote_code, depths=spec.depths(where)))
    tokenizer = load_tokenizer(where, trust_remote_code)
    drafter = spec.build(rows, tokenizer)
    model = Model(drafter.target or rows, drafter, tokenizer, chosen, _prefixes(prefix_cache))
    model = _warmed(model) if spec != NoDraft() else model
    gguf.forget()
    rows.executor.settle()
    return model


def _warmed(model: Model) -> Model:
    """The model, what its passes take known."""
    model.meter.warm()
    return model


def _prefixes(cache: int | str) -> Prefixes | None:
    """What keeps so many bytes of texts that were read."""
    count = size(cache) if isinstance(cache, str) else cache
    whole("prefix_cache", count)
    return Prefixes(count) if count else None


def _chosen(target: str | Path | None, settings: str | Path | Settings | None) -> Settings:
    """What a settings file says; refuses a target that is no path."""
    good = target is None or isinstance(target, (str, Path))
    require(good, "target", target, "a folder or an id")
    try:
        return resolve(settings)
    except OSError as error:
        raise SettingError(f"cannot read the settings {str(settings)!r}: {error}") from error


def default_draft(target: str | Path | None) -> str | Path:
    """Who drafts for a target where nobody says.

    The shipped draft for the shipped target, a draft decoder in the target's own folder (`shared`
    before `block`), `memory` with a head behind it where one is in that folder (`eagle`) or ships
    for the target's GGUF file, SmolLM2 where it is installed for files of at least `MANY` weights,
    whatever their tokenizer, else `memory`.
    """
    if target is None:
        return zoo.DRAFT
    where = zoo.locate(target)
    if kind := next((kind for kind in ("shared", "block") if own_draft(where, kind)), None):
        return kind
    from forerun.drafters.eagle import known_head

    if known_head(where):
        return "memory+eagle"
    file, small = gguf.locate(where), zoo.smollm2()
    return small if file and small and gguf.read(file).facts().weights >= MANY else "memory"


def drafter_spec(draft: str | Path | DrafterSpec) -> DrafterSpec:
    """The drafter a user means: a registered name with settings, or else a model."""
    if isinstance(draft, DrafterSpec):
        return draft
    good = isinstance(draft, (str, Path))
    require(good, "draft", draft, "a folder, a Hugging Face id, or a drafter like 'lookup(n=3)'")
    text = str(draft)
    chain = CHAIN.match(text)
    if chain and chain[1] in DRAFTERS and not _exists(text):
        return Chain(drafter_spec(chain[1] + chain[2]), drafter_spec(chain[3]))
    named = isinstance(draft, str) and text in DRAFTERS  # a folder of such a name is ./NAME
    if _exists(text) and not named:
        from forerun.drafters.folders import contents_of

        return contents_of(text).spec
    if isinstance(draft, str):
        name = text.partition("(")[0].strip()
        if name in DRAFTERS:
            return DRAFTERS.make(text)
        if "(" in text or ("/" not in text and name.isalpha() and len(name) < 12):
            raise UnknownNameError.among("drafter (nor a model folder)", name, DRAFTERS.names())
    return ModelDraft(text)


def _running(spec: DrafterSpec, runtime: RuntimeSpec, trust_remote_code: bool) -> DrafterSpec:
    """The spec, its model run as the target is."""
    if isinstance(spec, Chain):
        return replace(spec, then=_running(spec.then, runtime, trust_remote_code))
    if isinstance(spec, ModelDraft):
        trusted = spec.trust_remote_code or trust_remote_code
        return replace(spec, trust_remote_code=trusted, runtime=runtime)
    return spec


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # no name of a file
        return False


def _samplings(
    sampling: Sampling | Sequence[Sampling] | None, settings: dict[str, Any], count: int
) -> list[Sampling]:
    own = Sampling.of(settings)
    if sampling is not None and settings:
        raise SettingError(f"give sampling=... or {sorted(settings)}, not both")
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or own] * count
    good = isinstance(sampling, Sequence) and all(isinstance(s, Sampling) for s in sampling)
    require(good, "sampling", sampling, "a Sampling, or a list with one per prompt")
    if len(sampling) != count:
        raise SettingError(f"{len(sampling)} samplings for {count} prompts; give one per prompt")
    return list(sampling)


def _end_of_text(target: Rows | Executor, tokenizer: Any) -> frozenset[int]:
    """Whatever ends texts by the model's config or by its tokenizer: checkpoints may differ there.
    Warns if they do."""
    configured = target.facts.eos or frozenset()
    own = getattr(tokenizer, "eos_token_id", None)
    if own is None or own in configured or not 0 <= own < target.facts.vocab_size:
        return configured
    if configured:
        warnings.warn(
            f"the config ends texts with token {', '.join(map(str, sorted(configured)))} and the "
            f"tokenizer with {own} ({tokenizer.eos_token!r}): all of these end a text",
            ForerunWarning,
            stacklevel=4,
        )
    return configured | {own}
