"""`model.generate` that speculates, for all that calls it."""

from __future__ import annotations

import copy
import functools
import inspect
from types import MethodType
from typing import Any

from forerun.controllers import Controller
from forerun.errors import SettingError
from forerun.hosts.speculative import Speculative
from forerun.rules import AcceptanceRule
from forerun.runtime.cache import CACHE_ARGUMENTS

CACHING = "generation_config", "use_cache", *CACHE_ARGUMENTS
"""Arguments that may say something of a cache."""


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
    model.generate = Attached(model, speculative)
    return speculative


def detach(model: Any) -> None:
    """Take what `attach` set away; of another model, nothing."""
    if isinstance(vars(model).get("generate"), Attached):
        del model.generate


class Attached:
    """The method that `attach` sets."""

    def __init__(self, model: Any, speculative: Speculative) -> None:
        self._model, self._speculative = model, speculative
        self._signature = inspect.signature(speculative)
        functools.update_wrapper(self, MethodType(type(model).generate, model))

    def __reduce__(self) -> Any:  # a copy of the model has its own
        return Attached, (self._model, self._speculative)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `generate`, with `controller` and `rule` for this call."""
        plain = type(self._model).generate
        if kwargs.get("custom_generate") is not None:
            return plain(self._model, *args, **kwargs)
        refused = ("assistant_model", "negative_prompt_ids", "inputs_embeds", "encoder_outputs")
        for name in refused:
            if kwargs.get(name) is not None:
                raise SettingError(
                    f"{name} cannot be served by speculation; leave it out, or call "
                    "type(model).generate(model, ...)"
                )
        if all(kwargs.get(name) is None for name in CACHING):
            kwargs["use_cache"] = False  # one that nobody would read takes a tenth of a call
        # transformers hands on what the signature names, but for the streamer, and asks for it
        # twice a call, which takes longer of an object.
        run = functools.partial(self._speculative, streamer=kwargs.get("streamer"))
        run.__signature__ = self._signature  # type: ignore[attr-defined]
        return plain(self._model, *args, custom_generate=run, **self._stopped(kwargs))

    def _stopped(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Stop strings as criteria: transformers drops the tokenizer that they need."""
        tokenizer = kwargs.pop("tokenizer", None) or self._speculative.tokenizer
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
