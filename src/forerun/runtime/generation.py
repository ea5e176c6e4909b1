"""What a model's own files say about how its texts are sampled."""

from __future__ import annotations

from typing import Any

from forerun.errors import ModelError
from forerun.runtime import gguf
from forerun.runtime.base import Rows

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling settings that a model's generation_config may have an opinion on."""


def generation_config(target: Rows) -> Any:
    """The generation_config of a loaded model, or the one beside its weights; None if neither."""
    config = getattr(target.executor.module(), "generation_config", None)
    return saved_generation_config(target.facts.name) if config is None else config


def saved_generation_config(name: str) -> Any:
    """The generation_config that lies beside a model's weights, or what a GGUF file says instead;
    None if there is neither."""
    from transformers import GenerationConfig

    try:
        if name and (path := gguf.locate(name)):
            own = gguf.read(path).sampling
            return GenerationConfig(do_sample=True, **own) if own else None
        return GenerationConfig.from_pretrained(name, local_files_only=True) if name else None
    except (OSError, ValueError, ModelError):
        return None


def sampling_settings(config: Any) -> dict[str, float]:
    """What a generation_config says, as fields of `Sampling`; greedy where it says so."""
    values = {name: getattr(config, name, None) for name in SETTINGS}
    settings = {name: value for name, value in values.items() if value is not None}
    if getattr(config, "do_sample", None) is False:
        settings["temperature"] = 0.0
    return settings
