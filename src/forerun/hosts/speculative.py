"""The engine behind transformers' `generate`, for one call or for all that calls it."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache
from transformers.generation import utils as generation

from forerun.controllers import CONTROLLERS, Controller
from forerun.drafters.base import DrafterSpec
from forerun.drafters.model import ModelDrafter, check_encoders
from forerun.engine import Completion, Request, Sampling
from forerun.errors import GenerationError, SettingError
from forerun.hosts.processors import RowCallbacks, criteria_by_row, ends_of, settings_of
from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE, Model, drafter_spec
from forerun.rules import RULES, AcceptanceRule
from forerun.runtime.base import Columns
from forerun.runtime.cache import CACHE_ARGUMENTS
from forerun.runtime.torch_executor import torch_rows

READ = frozenset(
    {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "encoder_outputs"}
    | {"decoder_attention_mask", "return_dict", "cache_position", *CACHE_ARGUMENTS}
)
"""What `generate` hands on that is read, or makes no difference here."""
REFUSED = "assistant_model", "negative_prompt_ids", "inputs_embeds", "encoder_outputs"
"""Arguments of `generate` that ask for what is not served."""
CACHING = "generation_config", "use_cache", *CACHE_ARGUMENTS
"""Those that may say something of a cache."""
LEAST_ROWS = 16
"""Texts that are decoded together, if a call has no more."""


@dataclass(eq=False)
class PreparedCall:
    """One call of `generate`, prepared by transformers."""

    ids: torch.Tensor  # (rows, n) of the decoder, padded on the left
    processors: Any
    criteria: Sequence[Any]
    config: Any
    given: Mapping[str, Any]  # for the model's forward
    source: torch.Tensor | None  # (rows, n) that an encoder reads
    streamer: Any

    def __post_init__(self) -> None:
        name = "attention_mask" if self.source is None else "decoder_attention_mask"
        self.kept = _kept(self.ids, self.given.get(name))
        """Per row `(n,)` bool, which of its ids are none of padding."""
        self.padding = [int((~kept).sum()) for kept in self.kept]
        given = (self.given[k] for k in CACHE_ARGUMENTS if self.given.get(k) is not None)
        self.cache: Any = next(given, None)
        """It was given, or made by `generate`."""
        self.pad = int(getattr(self.config, "_pad_token_tensor", None) or 0)
        """What rows that have ended are filled up with."""

    def sources(self) -> list[list[int] | None]:
        """Per row what an encoder reads, without padding."""
        if self.source is None:
            return [None] * len(self.ids)
        source = self.source.repeat_interleave(len(self.ids) // len(self.source), 0)
        kept = _kept(source, self.given.get("attention_mask"))
        return [ids[keep].tolist() for ids, keep in zip(source, kept, strict=True)]

    def check(self) -> None:
        """Refuse by name what is not served here."""
        config, why = self.config, None
        mode = str(config.get_generation_mode().value)
        shown = [n for n in ("output_attentions", "output_hidden_states") if getattr(config, n)]
        if mode not in ("greedy_search", "sample"):
            why = f"generation mode {mode!r}"
        elif shown and config.return_dict_in_generate:
            why = " and ".join(shown)
        elif odd := sorted(n for n in set(self.given) - READ if self.given[n] is not None):
            why = f"{', '.join(odd)} as input"
        elif self.source is not None and self.source.is_floating_point():
            why = "a source that is no text"
        if why:
            raise _refusal(why)


class Speculative:
    """Speculation as `model.generate(..., custom_generate=Speculative(...))`.

    It runs the live model, with no second copy of its weights, and serves calls from several
    threads together. transformers keeps streamers, `stop_strings` and the tokenizer to itself in
    this form; `attach` serves them, too.

    Its arguments are those of `attach`. `last` has the completions of the newest call that ended,
    with their statistics.
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
        self._signature = inspect.signature(self)
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
        """What `generate` calls once everything is prepared, and what it returns. Errors of
        processors and criteria come as they are, one of the model as `GenerationError`."""
        call = PreparedCall(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs,
            source=inputs_tensor if model.config.is_encoder_decoder else None,
            streamer=model_kwargs.pop("streamer", None),
        )  # fmt: skip
        call.check()
        policies = CONTROLLERS.make(controller or self.controller), RULES.make(rule or self.rule)
        with self._evaluating(model):
            runner = self._built(model)
            requests, callbacks = _requests(call, runner, *policies)
            done = _run(call, runner, requests)
        for asked, completion in zip(callbacks, done, strict=True):
            if asked.error is not None:
                raise asked.error
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
        self.last = done
        return _returned(call, done)

    def generate(self, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, speculating; `attach` sets it on the model."""
        plain = type(model).generate
        if kwargs.get("custom_generate") is not None:
            return plain(model, *args, **kwargs)
        for name in REFUSED:
            if kwargs.get(name) is not None:
                raise _refusal(name)
        if all(kwargs.get(name) is None for name in CACHING):
            kwargs["use_cache"] = False  # one that nobody would read takes a tenth of a call
        # transformers hands on what the signature names, but for the streamer, and asks for it
        # twice a call, which takes longer of an object.
        run = functools.partial(self, streamer=kwargs.get("streamer"))
        run.__signature__ = self._signature  # type: ignore[attr-defined]
        return plain(model, *args, custom_generate=run, **self._stopped(kwargs))

    def _stopped(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Stop strings as criteria: transformers drops the tokenizer that they need."""
        tokenizer = kwargs.pop("tokenizer", None) or self.tokenizer
        config, strings = kwargs.get("generation_config"), kwargs.pop("stop_strings", None)
        if config is not None and config.stop_strings:
            kwargs["generation_config"] = copy.deepcopy(config)
            kwargs["generation_config"].stop_strings, strings = None, strings or config.stop_strings
        if not strings:
            return kwargs
        if tokenizer is None:
            raise SettingError("stop_strings need the model's tokenizer: generate(tokenizer=...)")
        from transformers.generation import StoppingCriteriaList, StopStringCriteria

        listed = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        return {**kwargs, "stopping_criteria": StoppingCriteriaList(listed)}

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


def attach(
    model: Any,
    draft: Any = "suffix",
    controller: str | Controller | None = None,
    rule: str | AcceptanceRule | None = None,
    tokenizer: Any = None,
) -> Speculative:
    """Let `model.generate` speculate, and with it streamers, pipelines, chat loops and lm-eval.

    The method is set on the instance, and takes `controller` and `rule` for one call, too. What it
    cannot serve it refuses by name; `type(model).generate(model, ...)` is as before.

    Args:
        model: of transformers, in memory. Its weights, configuration and hooks stay as they are.
        draft: who runs ahead: a model, a folder, or a spec like ``"suffix"``.
        controller: how far; None: `auto`.
        rule: what to keep; None: `gumbel`, which is lossless.
        tokenizer: of the model, for `stop_strings` of calls that bring none, and for drafters that
            compare it with theirs.

    Returns:
        What speculates; its `last` has the statistics of the newest call.

    Raises:
        SettingError: no model that generates, one with a `generate` of its own, or split over
            processes.
    """
    if not hasattr(type(model), "generate"):
        raise SettingError(f"a {type(model).__name__} does not generate; give a transformers model")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise SettingError(
            "a tensor-parallel model cannot speculate here: every process would decide for itself; "
            "use device_map, or vLLM"
        )
    detach(model)
    if "generate" in vars(model):
        raise SettingError("this model brings a generate of its own, which is not replaced")
    speculative = Speculative(draft, controller, rule, tokenizer)
    model.generate = functools.partial(speculative.generate, model)
    return speculative


def detach(model: Any) -> None:
    """Take what `attach` set away; of another model, nothing."""
    ours = getattr(vars(model).get("generate"), "func", None)
    if isinstance(getattr(ours, "__self__", None), Speculative):
        del model.generate


def _refusal(what: str) -> SettingError:
    return SettingError(
        f"{what} cannot be served by speculation: it decodes greedily or samples, from token ids; "
        "call type(model).generate(model, ...) for that"
    )


def _kept(ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.ones_like(ids).bool().cpu() if mask is None else (mask != 0).cpu())


def _requests(
    call: PreparedCall, runner: Model, controller: Controller, rule: AcceptanceRule
) -> tuple[list[Request], list[RowCallbacks]]:
    """A request per row, and whom it asks."""
    config, ids, rows = call.config, call.ids, range(len(call.ids))
    samples, answers = bool(config.do_sample), config.return_dict_in_generate
    shaped = [settings_of(call.processors, bool(n), samples) for n in call.padding]
    criteria = criteria_by_row(call.criteria, len(ids))
    asked = [RowCallbacks(shaped[row][1], criteria[row], ids, row) for row in rows]
    eos = ends_of(call.criteria)
    copies = runner.target.executor.copies and call.source is None
    read: list[Any] = [None] * len(ids)
    if call.cache is not None and call.source is None and call.cache.get_seq_length():
        if not copies:
            raise SettingError("a draft that runs layers of its target continues no filled cache")
        read = columns_of(call.cache, call.kept)
    # Drawn from torch, so that torch.manual_seed repeats a text; greedy ones draw nothing.
    seeds = torch.randint(1 << 53, (len(ids),)).tolist() if samples else [None] * len(ids)
    sources = call.sources()
    return [
        Request(
            ids[row][call.kept[row]].tolist(),
            Sampling(
                **shaped[row][0], max_new_tokens=config.max_length - ids.shape[1], seed=seeds[row],
                eos=eos, ignore_eos=not eos, processor=asked[row].processor,
                stopping=asked[row].stopping,
            ),
            controller, rule, sources[row],
            stream=call.streamer is not None,
            keep_logits=bool(answers and (config.output_logits or config.output_scores)),
            keep_cache=bool(answers or getattr(call.cache, "_is_user_defined", False)) and copies,
            read=read[row],
        )
        for row in rows
    ], asked  # fmt: skip


def _run(call: PreparedCall, runner: Model, requests: list[Request]) -> list[Completion]:
    """Completions by row. A streamer gets the tokens of all rows place by place."""
    done: dict[int, Completion] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    shown = 0
    for event in runner.run(requests, max(LEAST_ROWS, len(requests))):
        if event.completion is not None:
            done[event.request] = event.completion
        if call.streamer is None:
            continue
        tokens[event.request] += [piece.token for piece in event.pieces]
        going = [text for row, text in enumerate(tokens) if row not in done]
        ready = min(map(len, going)) if going else max(map(len, tokens))
        for place in range(shown, ready):
            column = [text[place] if place < len(text) else call.pad for text in tokens]
            call.streamer.put(torch.tensor(column))
        shown = max(shown, ready)
    if call.streamer is not None:
        call.streamer.end()
    return [done[row] for row in range(len(requests))]


def _returned(call: PreparedCall, done: list[Completion]) -> Any:
    """Ids, or the object that `return_dict_in_generate` asks for."""
    config, ids, tokens = call.config, call.ids, [completion.tokens for completion in done]
    longest = max(map(len, tokens))
    padded = [[*row, *[call.pad] * (longest - len(row))] for row in tokens]
    sequences = torch.cat([ids, ids.new_tensor(padded)], 1)
    columns = [completion.columns for completion in done if completion.columns is not None]
    cache = cache_of(columns, call.padding, call.cache) if len(columns) == len(done) else None
    if not config.return_dict_in_generate:
        return sequences
    logits = scores = None
    if config.output_logits or config.output_scores:  # 0 where a row has ended
        known = [torch.stack(list(completion.logits or ())).float() for completion in done]
        logits = pad_sequence(known, batch_first=True).to(ids.device).unbind(1)
    if config.output_scores:
        beginnings = (sequences[:, : ids.shape[1] + place] for place in range(longest))
        scores = tuple(map(call.processors, beginnings, (raw.clone() for raw in logits or ())))
    coder = "DecoderOnly" if call.source is None else "EncoderDecoder"
    kind = getattr(generation, f"Generate{coder}Output")
    named = next(name for name in CACHE_ARGUMENTS if name in kind.__dataclass_fields__)
    logits = logits if config.output_logits else None
    out = kind(sequences=sequences, scores=scores, logits=logits, **{named: cache})
    out["forerun"] = [completion.stats for completion in done]
    return out


def columns_of(cache: Any, kept: Sequence[torch.Tensor]) -> list[Columns | None]:
    """What a cache that `generate` was given holds of each row, None where that is nothing; `kept`
    is per row `(n,)` bool, which places of its padded prompt are none of padding. Raises
    `SettingError` unless it holds all tokens of all layers as they are."""
    count, layers = cache.get_seq_length(), getattr(cache, "layers", None) or ()
    if type(cache) is not DynamicCache or any(
        layer.keys is None or layer.keys.shape[2] != count for layer in layers
    ):
        raise SettingError(
            f"a filled {type(cache).__name__} cannot be continued: it must be a DynamicCache that "
            "holds every token of every layer; leave past_key_values out to read the text again"
        )
    out: list[Columns | None] = []
    for row, keep in enumerate(kept):
        # The last token of the prompt is read in any case: what follows it is asked for.
        places = keep[: min(count, len(keep) - 1)].nonzero()[:, 0]
        states = [s[row][:, places.to(s.device)] for c in layers for s in (c.keys, c.values)]
        out.append(Columns(tuple(states), len(places)) if len(places) else None)
    return out


def cache_of(rows: Sequence[Columns], padding: Sequence[int], given: Any) -> Any:
    """A `DynamicCache` of rows behind padding, all of one length, 0 where a shorter row ended;
    `given` itself, if it is one."""
    pairs = [*zip(padding, rows, strict=True)]
    length = max(before + row.count for before, row in pairs)
    rooms = [(0, 0, before, length - before - row.count) for before, row in pairs]
    cache, parts = DynamicCache(), zip(*(row.states for row in rows), strict=True)
    whole = [torch.stack([*map(pad, states, rooms)]) for states in parts]
    for layer, (keys, values) in enumerate(zip(whole[::2], whole[1::2], strict=True)):
        cache.update(keys, values, layer)
    if type(given) is DynamicCache:
        given.layers = cache.layers
        return given
    return cache
