"""The engine behind transformers' `generate`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import utils as generation

from forerun.controllers import CONTROLLERS, Controller
from forerun.drafters.base import DrafterSpec
from forerun.drafters.model import ModelDrafter, check_encoders
from forerun.engine import Completion, Request, Sampling
from forerun.errors import GenerationError, SettingError
from forerun.hosts.key_values import cache_of, columns_of
from forerun.hosts.processors import Stopping, ends_of, sampling_of, stopping_of
from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, Model, drafter_spec
from forerun.rules import RULES, AcceptanceRule
from forerun.runtime.cache import CACHE_ARGUMENTS
from forerun.runtime.torch_executor import torch_rows

SERVED = ("greedy_search", "sample")
"""Modes of generation, by transformers' names."""
READ = frozenset(
    {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "encoder_outputs"}
    | {"decoder_attention_mask", "return_dict", "cache_position", *CACHE_ARGUMENTS}
)
"""What `generate` hands on that is read, or makes no difference here."""
LEAST_ROWS = 16
"""Texts that are decoded together, if a call has no more."""


@dataclass(eq=False)
class PreparedCall:
    """One call of `generate`, prepared by transformers."""

    ids: torch.Tensor
    """`(rows, n)` of the decoder, padded on the left."""
    processors: Any
    """A list that is called."""
    criteria: Sequence[Any]
    config: Any
    given: Mapping[str, Any]
    """For the model's forward."""
    source: torch.Tensor | None
    """`(rows, n)` that an encoder reads."""
    streamer: Any
    controller: Controller
    rule: AcceptanceRule

    @property
    def cache(self) -> Any:
        """The cache it was given, or made by `generate`; None without one."""
        return next((self.given[k] for k in CACHE_ARGUMENTS if self.given.get(k) is not None), None)

    def kept(self, row: int, encoded: bool = False) -> torch.Tensor:
        """`(n,)` bool: which of a row's ids, or of its source's, are none of padding."""
        ids = self.source if encoded else self.ids
        assert ids is not None
        masked = encoded or self.source is None
        mask = self.given.get("attention_mask" if masked else "decoder_attention_mask")
        if mask is None:
            return torch.ones(ids.shape[1], dtype=torch.bool)
        return (mask[row] != 0).cpu()

    def check(self) -> None:
        """Refuse by name what is not served here."""
        config, odd = self.config, sorted(set(self.given) - READ)
        mode = str(config.get_generation_mode().value)
        shown = [n for n in ("output_attentions", "output_hidden_states") if getattr(config, n)]
        why = None
        if mode not in SERVED:
            why = f"generation mode {mode!r}"
        elif shown and config.return_dict_in_generate:
            why = " and ".join(shown)
        elif odd := [name for name in odd if self.given[name] is not None]:
            why = f"{', '.join(odd)} as input"
        elif self.source is not None and self.source.is_floating_point():
            why = "a source that is no text"
        if why:
            raise SettingError(
                f"{why} cannot be served by speculation: it decodes greedily or samples, from "
                "token ids; call type(model).generate(model, ...) for that"
            )


class Speculative:
    """Speculation as `model.generate(..., custom_generate=Speculative(...))`.

    It runs the live model, with no second copy of its weights, and serves calls from several
    threads together. transformers keeps streamers, `stop_strings` and the tokenizer to itself in
    this form; `attach` serves them, too.

    Args:
        draft: who runs ahead: a model, a folder, or a spec like ``"suffix"``.
        controller: how far, a spec or an object; None: `auto`.
        rule: what to keep, likewise; None: `gumbel`, which is lossless.
        tokenizer: of the model; needed by drafters that compare tokenizers, None: not compared.

    Attributes:
        last: the completions of the newest call that ended, with their statistics.
    """

    def __init__(
        self,
        draft: Any = "suffix",
        controller: str | Controller | None = None,
        rule: str | AcceptanceRule | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.controller: Controller = CONTROLLERS.make(controller or DEFAULT_CONTROLLER)
        self.rule: AcceptanceRule = RULES.make(rule or DEFAULT_RULE)
        self.draft = draft if isinstance(draft, torch.nn.Module) else drafter_spec(draft)
        self.tokenizer = tokenizer
        self.last: list[Completion] = []
        self._lock = threading.Lock()
        self._model: Any = None
        self._runner: Model | None = None
        self._users = 0
        self._training: list[Any] = []

    def __reduce__(self) -> Any:  # copies and pickles of an attached model bring it along
        return Speculative, (self.draft, self.controller, self.rule, self.tokenizer)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: torch.Tensor | None = None,
        controller: Any = None,
        rule: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls once everything is prepared, and what it returns.

        Raises:
            SettingError, PromptError: it cannot be served.
            GenerationError: the model failed; errors of processors and criteria come as they are.
        """
        source = inputs_tensor if model.config.is_encoder_decoder else None
        call = PreparedCall(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, source,
            model_kwargs.pop("streamer", None), CONTROLLERS.make(controller or self.controller),
            RULES.make(rule or self.rule),
        )  # fmt: skip
        call.check()
        with self._evaluating(model):
            runner = self._built(model)
            requests, stopping = _requests(call, runner)
            done = self._run(runner, call, requests)
        for asked, completion in zip(stopping, done, strict=True):
            if asked is not None and asked.error is not None:
                raise asked.error
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
        self.last = done
        return _returned(call, done, model.config.is_encoder_decoder)

    @contextmanager
    def _evaluating(self, model: Any) -> Iterator[None]:
        """Without dropout while anybody generates; then every module's mode is as it was."""
        with self._lock:
            if not self._users:
                roots = [m for m in (model, self.draft) if isinstance(m, torch.nn.Module)]
                self._training = [m for root in roots for m in root.modules() if m.training]
            self._users += 1
            for module in self._training:
                module.training = False
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                for module in [] if self._users else self._training:
                    module.training = True

    def _built(self, model: Any) -> Model:
        """The engine's side of a model; made when it first generates."""
        with self._lock:
            if self._runner is None or self._model is not model:
                target = torch_rows(model, own_settings=False)
                if isinstance(self.draft, DrafterSpec):
                    drafter = self.draft.build(target, self.tokenizer)
                else:
                    rows = torch_rows(self.draft, own_settings=False)
                    check_encoders(target, rows, type(self.draft).__name__)
                    drafter = ModelDrafter(rows, target.vocab_size)
                self._model, self._runner = model, Model(drafter.target or target, drafter)
            return self._runner

    def _run(self, runner: Model, call: PreparedCall, requests: list[Request]) -> list[Completion]:
        done: dict[int, Completion] = {}
        columns = _InStep(call, len(requests)) if call.streamer is not None else None
        for event in runner.run(requests, max(LEAST_ROWS, len(requests))):
            if event.completion is not None:
                done[event.request] = event.completion
            if columns is not None:
                columns.add(event.request, [p.token for p in event.pieces], bool(event.completion))
        if columns is not None:
            call.streamer.end()
        return [done[row] for row in range(len(requests))]


class _InStep:
    """Shows a streamer the tokens of all rows place by place, as `generate` does."""

    def __init__(self, call: PreparedCall, rows: int) -> None:
        self._streamer, self._pad, self._shown = call.streamer, _pad(call.config), 0
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._done = [False] * rows

    def add(self, row: int, tokens: list[int], done: bool) -> None:
        """A row has got on."""
        self._tokens[row] += tokens
        self._done[row] |= done
        lengths = [len(t) for t, over in zip(self._tokens, self._done, strict=True) if not over]
        ready = min(lengths) if lengths else max(map(len, self._tokens))
        for place in range(self._shown, ready):
            column = [t[place] if place < len(t) else self._pad for t in self._tokens]
            self._streamer.put(torch.tensor(column))
        self._shown = max(self._shown, ready)


def _pad(config: Any) -> int:
    """What rows that have ended are filled up with."""
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)


def _requests(call: PreparedCall, runner: Model) -> tuple[list[Request], list[Stopping | None]]:
    """A request per row, and who says where each ends."""
    config, ids = call.config, call.ids
    rows, samples = range(len(ids)), bool(config.do_sample)
    kept = [call.kept(row) for row in rows]
    shaped = [
        sampling_of(call.processors, ids, row, int((~kept[row]).sum()), samples) for row in rows
    ]
    stopping = stopping_of(call.criteria, ids, [processing for _, processing in shaped])
    eos, room = ends_of(call.criteria), config.max_length - ids.shape[1]
    copies = runner.target.executor.copies and call.source is None
    read: list[Any] = [None] * len(ids)
    if call.cache is not None and call.source is None and call.cache.get_seq_length():
        if not copies:
            raise SettingError("a draft that runs layers of its target continues no filled cache")
        read = columns_of(call.cache, kept)
    # Drawn from torch, so that torch.manual_seed repeats a text; greedy ones draw nothing.
    seeds = torch.randint(1 << 53, (len(ids),)).tolist() if samples else [None] * len(ids)
    sources: list[Any] = [None] * len(ids)
    if call.source is not None:
        source = call.source.repeat_interleave(len(ids) // len(call.source), 0)
        sources = [source[row][call.kept(row, True)].tolist() for row in rows]
    answers = config.return_dict_in_generate
    return [
        Request(
            ids[row][kept[row]].tolist(),
            Sampling(
                **shaped[row][0], max_new_tokens=room, seed=seeds[row], eos=eos,
                ignore_eos=not eos, processor=shaped[row][1], stopping=stopping[row],
            ),
            call.controller, call.rule, sources[row],
            stream=call.streamer is not None,
            keep_logits=bool(answers and (config.output_logits or config.output_scores)),
            keep_cache=bool(answers or getattr(call.cache, "_is_user_defined", False)) and copies,
            read=read[row],
        )
        for row in rows
    ], stopping  # fmt: skip


def _returned(call: PreparedCall, done: list[Completion], encodes: bool) -> Any:
    """Ids, or the object that `return_dict_in_generate` asks for."""
    config, ids, tokens = call.config, call.ids, [completion.tokens for completion in done]
    longest, pad = max(map(len, tokens)), _pad(config)
    padded = [[*row, *[pad] * (longest - len(row))] for row in tokens]
    sequences = torch.cat([ids, torch.tensor(padded, dtype=ids.dtype, device=ids.device)], 1)
    cache = None
    if all(completion.columns is not None for completion in done):
        padding = [int((~call.kept(row)).sum()) for row in range(len(ids))]
        cache = cache_of([c.columns for c in done if c.columns], padding, call.cache)
    if not config.return_dict_in_generate:
        return sequences
    logits = scores = None
    if config.output_logits or config.output_scores:
        logits = tuple(_logits(done, place, ids.device) for place in range(longest))
        scores = tuple(
            call.processors(sequences[:, : ids.shape[1] + place], raw.clone())
            for place, raw in enumerate(logits if config.output_scores else ())
        )
    kind: Any = generation.GenerateDecoderOnlyOutput
    if encodes:
        kind = generation.GenerateEncoderDecoderOutput
    named = next(name for name in CACHE_ARGUMENTS if name in kind.__dataclass_fields__)
    out = kind(
        sequences=sequences,
        scores=scores if config.output_scores else None,
        logits=logits if config.output_logits else None,
        **{named: cache},
    )
    out["forerun"] = [completion.stats for completion in done]
    return out


def _logits(done: Sequence[Completion], place: int, device: torch.device) -> torch.Tensor:
    """`(rows, V)` float32 of a place of the output; 0 where a row has ended."""
    known = [c.logits[place] if c.logits and place < len(c.logits) else None for c in done]
    like = next(logits for logits in known if logits is not None)
    out = torch.zeros(len(known), len(like), device=device)
    for row, logits in enumerate(known):
        if logits is not None:
            out[row] = logits
    return out
