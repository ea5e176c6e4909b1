"""The engine behind transformers' `generate`, for one call or for all that calls it."""

import copy
import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache
from transformers.generation import StoppingCriteriaList, StopStringCriteria
from transformers.generation import utils as generation

from forerun.controllers import CONTROLLERS, Controller
from forerun.drafters.base import DrafterSpec
from forerun.drafters.model import ModelDrafter, check_encoders
from forerun.engine import Completion, Request, Sampling
from forerun.errors import GenerationError, SettingError
from forerun.hosts.processors import RowCallbacks, criteria_by_row, settings_of
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
LEAST_ROWS = 16  # texts that are decoded together, if a call has no more


class PreparedCall:
    """One call of `generate`, prepared by transformers: `(rows, n)` ids of the decoder, padded on
    the left, `(rows, n)` ids that an encoder reads, and what else it was `given`; refused by name
    if it is not served here."""

    def __init__(
        self, ids: torch.Tensor, source: torch.Tensor | None, given: dict[str, Any],
        stop: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.ids, self.source, self.given, self.stop = ids, source, given, tuple(stop)
        names = "logits_processor", "stopping_criteria", "generation_config"
        self.processors, self.criteria, self.config = map(given.pop, names)
        self.streamer = given.pop("streamer", None)
        coder = "" if source is None else "decoder_"
        self.kept = _kept(ids, given.get(f"{coder}attention_mask"))
        """Per row `(n,)` bool, which of its ids are none of padding."""
        caches = [given[k] for k in CACHE_ARGUMENTS if given.get(k) is not None]
        self.cache: Any = caches[0] if caches else None  # it was given, or made by `generate`
        self.pad = int(getattr(self.config, "_pad_token_tensor", None) or 0)
        """What rows that have ended are filled up with."""
        self.asked: list[RowCallbacks] = []
        self._check()

    def _check(self) -> None:
        config, mode = self.config, str(self.config.get_generation_mode().value)
        shown = [n for n in ("output_attentions", "output_hidden_states") if getattr(config, n)]
        odd = sorted(n for n in set(self.given) - READ if self.given[n] is not None)
        if mode not in ("greedy_search", "sample"):
            raise _refusal(f"generation mode {mode!r}")
        if shown and config.return_dict_in_generate:
            raise _refusal(" and ".join(shown))
        if odd or (self.source is not None and self.source.is_floating_point()):
            raise _refusal(f"{', '.join(odd) or 'what is no text'} as input")

    def _requests(
        self, copies: bool, controller: Controller, rule: AcceptanceRule
    ) -> Iterator[Request]:
        """One per row; who is asked for it is in `asked`. `copies` as of the target's executor."""
        config, ids, count = self.config, self.ids, len(self.ids)
        samples, answers = bool(config.do_sample), config.return_dict_in_generate
        keeps = bool(answers or getattr(self.cache, "_is_user_defined", False))
        eos, criteria = criteria_by_row(self.criteria, count)
        sources: list[Any] = [None] * count
        read: list[Any] = [None] * count
        if self.source is not None:
            copies, source = False, self.source.repeat_interleave(count // len(self.source), 0)
            kept = _kept(source, self.given.get("attention_mask"))
            sources = [row[keep].tolist() for row, keep in zip(source, kept, strict=True)]
        elif self.cache is not None and self.cache.get_seq_length():
            if not copies:
                raise SettingError("a draft that runs layers of its target continues no cache")
            read = columns_of(self.cache, self.kept)
        # Drawn from torch, so that torch.manual_seed repeats a text; greedy ones draw nothing.
        seeds = torch.randint(1 << 53, (count,)).tolist() if samples else [None] * count
        for row, own in enumerate(self.kept):
            settings, processors = settings_of(self.processors, not own.all(), samples)
            asked = RowCallbacks(processors, criteria[row], ids, row)
            self.asked.append(asked)
            sampling = Sampling(
                **settings, max_new_tokens=config.max_length - ids.shape[1], seed=seeds[row],
                eos=eos, ignore_eos=not eos, processor=asked.processor, stopping=asked.stopping,
                stop=self.stop,
            )  # fmt: skip
            yield Request(
                ids[row][own].tolist(), sampling, controller, rule, sources[row],
                stream=self.streamer is not None, keep_cache=keeps and copies, read=read[row],
                keep_logits=bool(answers and (config.output_logits or config.output_scores)),
            )  # fmt: skip

    def run(self, runner: Model, controller: Controller, rule: AcceptanceRule) -> list[Completion]:
        """Completions by row. A streamer gets the tokens of all rows place by place."""
        requests = [*self._requests(runner.target.executor.copies, controller, rule)]
        tokens: list[list[int]] = [[] for _ in requests]
        done, shown, streamer = dict[int, Completion](), 0, self.streamer
        for event in runner.run(requests, max(LEAST_ROWS, len(requests))):
            if event.completion is not None:
                done[event.request] = event.completion
            if streamer is not None:
                tokens[event.request] += [piece.token for piece in event.pieces]
                going = [len(text) for row, text in enumerate(tokens) if row not in done]
                ready = min(going, default=max(map(len, tokens)))
                for place in islice(zip_longest(*tokens, fillvalue=self.pad), shown, ready):
                    streamer.put(torch.tensor(place))
                shown = ready
        if streamer is not None:
            streamer.end()
        return [done[row] for row in range(len(requests))]

    def returned(self, done: list[Completion]) -> Any:
        """Ids, or the object that `return_dict_in_generate` asks for."""
        config, ids = self.config, self.ids
        places = [*zip_longest(*(completion.tokens for completion in done), fillvalue=self.pad)]
        sequences = torch.cat([ids, ids.new_tensor(places).T], 1)
        columns = [completion.columns for completion in done if completion.columns is not None]
        cache = cache_of(columns, self.kept, self.cache) if len(columns) == len(done) else None
        if not config.return_dict_in_generate:
            return sequences
        logits = scores = None
        if config.output_logits or config.output_scores:  # 0 where a row has ended
            known = [torch.stack(list(completion.logits or ())).float() for completion in done]
            logits = pad_sequence(known, batch_first=True).to(ids.device).unbind(1)
        if config.output_scores:
            beginnings = (sequences[:, :n] for n in range(ids.shape[1], sequences.shape[1]))
            scores = tuple(map(self.processors, beginnings, (raw.clone() for raw in logits or ())))
        coder = "DecoderOnly" if self.source is None else "EncoderDecoder"
        kind = getattr(generation, f"Generate{coder}Output")
        named = next(name for name in CACHE_ARGUMENTS if name in kind.__dataclass_fields__)
        logits = logits if config.output_logits else None
        out = kind(sequences=sequences, scores=scores, logits=logits, **{named: cache})
        out["forerun"] = [completion.stats for completion in done]
        return out


@dataclass(eq=False)
class Speculative:
    """Speculation as `model.generate(..., custom_generate=Speculative(...))`.

    It runs the live model, with no second copy of its weights, and serves calls from several
    threads together. transformers keeps streamers, `stop_strings` and the tokenizer to itself in
    this form; `attach` serves them, too, and says what the arguments are. `last` has the
    completions of the newest call that ended, with their statistics.
    """

    draft: Any = "suffix"
    controller: Any = None
    rule: Any = None
    tokenizer: Any = None
    last: list[Completion] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.controller = CONTROLLERS.make(self.controller or DEFAULT_CONTROLLER)
        self.rule = RULES.make(self.rule or DEFAULT_RULE)
        if not isinstance(self.draft, torch.nn.Module | Model):
            self.draft = drafter_spec(self.draft)
        self._signature = inspect.signature(self)
        self._lock, self._users = threading.Lock(), 0
        self._built: tuple[Any, Model] | None = None
        self._training: list[Any] = []

    def __reduce__(self) -> Any:  # copies and pickles of an attached model bring it along
        return Speculative, (self.draft, self.controller, self.rule, self.tokenizer)

    def __call__(
        self, model: Any, input_ids: torch.Tensor, inputs_tensor: torch.Tensor | None = None,
        controller: Any = None, rule: Any = None, stop: Sequence[str] = (), **prepared: Any,
    ) -> Any:  # fmt: skip
        """What `generate` calls once everything is prepared, and what it returns. Errors of
        processors and criteria come as they are, one of the model as `GenerationError`. `stop` has
        strings for the engine's own tokenizer, if it has one (of a `forerun.Model`)."""
        source = inputs_tensor if model.config.is_encoder_decoder else None
        call = PreparedCall(input_ids, source, prepared, stop)
        policies = CONTROLLERS.make(controller or self.controller), RULES.make(rule or self.rule)
        with self._running(model) as runner:
            done = call.run(runner, *policies)
        for asked, completion in zip(call.asked, done, strict=True):
            if asked.error is not None:
                raise asked.error
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
        self.last = done
        return call.returned(done)

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
        config, tokenizer = kwargs.get("generation_config"), kwargs.pop("tokenizer", None)
        strings = kwargs.pop("stop_strings", None) or (config and config.stop_strings)
        if strings:  # as criteria: transformers drops the tokenizer that they need
            if config is not None:
                kwargs["generation_config"] = config = copy.copy(config)
                config.stop_strings = None
            if (tokenizer := tokenizer or self.tokenizer) is None:
                raise SettingError("stop_strings need the model's tokenizer: generate(tokenizer=…)")
            own = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
            kwargs["stopping_criteria"] = StoppingCriteriaList(own)
        # transformers hands on what the signature names, but for the streamer, and asks for it
        # twice a call, which takes longer of an object.
        run = functools.partial(self, streamer=kwargs.get("streamer"))
        run.__signature__ = self._signature  # type: ignore[attr-defined]
        return plain(model, *args, custom_generate=run, **kwargs)

    @contextmanager
    def _running(self, model: Any) -> Iterator[Model]:
        """The engine's side of a model, which is without dropout while anybody generates; then
        every module's mode is as it was."""
        with self._lock:
            if not self._users:
                roots = (m for m in (model, self.draft) if isinstance(m, torch.nn.Module))
                self._training = [m for root in roots for m in root.modules() if m.training]
            self._users += 1
        try:
            with self._lock:
                for module in self._training:
                    module.training = False
                if self._built is None or self._built[0] is not model:
                    self._built = model, self._engine_of(model)
                _, runner = self._built
            yield runner
        finally:
            with self._lock:
                self._users -= 1
                for module in [] if self._users else self._training:
                    module.training = True

    def _engine_of(self, model: Any) -> Model:
        if isinstance(self.draft, Model):
            return self.draft
        target = torch_rows(model, own_settings=False)
        if isinstance(self.draft, DrafterSpec):
            drafter = self.draft.build(target, self.tokenizer)
        else:
            rows = torch_rows(self.draft, own_settings=False)
            check_encoders(target, rows, type(self.draft).__name__)
            drafter = ModelDrafter(rows, target.vocab_size)
        return Model(drafter.target or target, drafter)


def attach(
    model: Any, draft: Any = "suffix", controller: str | Controller | None = None,
    rule: str | AcceptanceRule | None = None, tokenizer: Any = None,
) -> Speculative:  # fmt: skip
    """Let `model.generate` speculate, and with it streamers, pipelines, chat loops and lm-eval.

    The method is set on the instance, and takes `controller` and `rule` for one call, too. What it
    cannot serve it refuses by name; `type(model).generate(model, ...)` is as before.

    Args:
        model: of transformers, in memory. Its weights, configuration and hooks stay as they are.
        draft: who runs ahead: a model, a folder, or a spec like ``"suffix"``. A `forerun.Model`
            brings its target, too: `model` is then no more than the form in which it is asked.
        controller: how far; None: `auto`.
        rule: what to keep; None: `gumbel`, which is lossless.
        tokenizer: of the model, for `stop_strings` of calls that bring none, and for drafters that
            compare it with theirs.

    Raises:
        SettingError: no model that generates, one with a `generate` of its own, or split over
            processes.
    """
    if not hasattr(type(model), "generate"):
        raise SettingError(f"a {type(model).__name__} does not generate; give a transformers model")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        why = "every process would decide for itself; use device_map, or vLLM"
        raise SettingError(f"a tensor-parallel model cannot speculate here: {why}")
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


def columns_of(cache: Any, kept: Sequence[torch.Tensor]) -> list[Columns | None]:
    """What a cache that `generate` was given holds of each row, None where that is nothing; `kept`
    is per row `(n,)` bool, which places of its padded prompt are none of padding. Raises
    `SettingError` unless it holds all tokens of all layers as they are."""
    count, layers = cache.get_seq_length(), getattr(cache, "layers", None) or ()
    whole = (c.keys is not None and c.keys.shape[2] == count for c in layers)
    if type(cache) is not DynamicCache or not all(whole):
        raise SettingError(
            f"a filled {type(cache).__name__} cannot be continued: it must be a DynamicCache that "
            "holds every token of every layer; leave past_key_values out to read the text again"
        )
    # The last token of the prompt is read in any case: what follows it is asked for.
    places = [keep[: min(count, len(keep) - 1)].nonzero()[:, 0] for keep in kept]
    states = [state for layer in layers for state in (layer.keys, layer.values)]
    return [
        Columns(tuple(s[row][:, at.to(s.device)] for s in states), len(at)) if len(at) else None
        for row, at in enumerate(places)
    ]


def cache_of(rows: Sequence[Columns], kept: Sequence[torch.Tensor], given: Any) -> Any:
    """A `DynamicCache` of rows behind their padding, all of one length, 0 where a shorter row
    ended; `given` itself, if it is one. `kept` as of `columns_of`."""
    pairs = [*zip((int((~keep).sum()) for keep in kept), rows, strict=True)]
    length = max(before + row.count for before, row in pairs)
    rooms = [(0, 0, before, length - before - row.count) for before, row in pairs]
    parts = zip(*(row.states for row in rows), strict=True)
    whole = [torch.stack([*map(pad, states, rooms)]) for states in parts]
    cache = DynamicCache(zip(whole[::2], whole[1::2], strict=True))
    if type(given) is not DynamicCache:
        return cache
    given.layers = cache.layers
    return given
