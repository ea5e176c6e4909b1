"""What a model's own files say about how its texts are sampled."""

from __future__ import annotations

from typing import Any

from forerun.runtime.base import Rows

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling settings that a model's generation_config may have an opinion on."""


def generation_config(target: Rows) -> Any:
    """The generation_config of a loaded model, or the one beside its weights; None if neither."""
    config = getattr(target.executor.module(), "generation_config", None)
    return saved_generation_config(target.facts.name) if config is None else config


def saved_generation_config(name: str) -> Any:
    """The generation_config that lies beside a model's weights; None if none does."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(name, local_files_only=True) if name else None
    except (OSError, ValueError):
        return None


def sampling_settings(config: Any) -> dict[str, float]:
    """What a generation_config says, as fields of `Sampling`; greedy where it says so."""
    values = {name: getattr(config, name, None) for name in SETTINGS}
    settings = {name: value for name, value in values.items() if value is not None}
    if getattr(config, "do_sample", None) is False:
        settings["temperature"] = 0.0
    return settings
