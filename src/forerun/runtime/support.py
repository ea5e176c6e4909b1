"""Which architectures a row cache can serve, and why the others cannot."""

from __future__ import annotations

from typing import Any

import torch

from forerun.errors import ModelError, UnsupportedModelError
from forerun.runtime.base import Rows

PROVEN = frozenset({"gemma", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Model types whose rows are tested against the model run alone; others are probed when loaded."""

PROBE_TOLERANCE = 2e-3
"""Largest difference of logits, relative to their range, that a probe forgives in fp32."""


def check_supported(model: Any) -> None:
    """Raise `UnsupportedModelError` with the reason if the configuration rules rows out."""
    config = model.config
    if reason := refusal(config):
        raise UnsupportedModelError(f"{config.model_type} models cannot run here: {reason}")
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{config.model_type}: no language-model head; load a causal language model"
        )


def refusal(config: Any, windows: bool = False) -> str | None:
    """The reason a configuration cannot be served, or None.

    Args:
        config: of the whole model.
        windows: whether the executor only hides what lies outside a sliding window.
    """
    for part in ("vision", "audio"):
        if hasattr(config, f"{part}_config"):
            return f"{part}-language models are not supported; use a model of text alone"
    whole, config = config, config.get_text_config(decoder=True)
    if getattr(whole, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported yet; use a decoder-only model"
    if config.model_type in ("bert", "roberta", "electra", "distilbert", "albert", "deberta-v2"):
        return "encoder-only models do not generate text; use a decoder-only model"
    layers = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(layers - {"full_attention", "sliding_attention"}):
        return f"layers of type {', '.join(odd)} keep a state that cannot be rolled back"
    window = getattr(config, "sliding_window", None)
    sliding = (
        "sliding_attention" in layers
        if layers
        else window is not None and getattr(config, "use_sliding_window", True)
    )
    if sliding and not windows:
        return f"its sliding window ({window} tokens) drops keys that a rollback would need"
    for sign in ("mamba_d_state", "ssm_state_size", "state_size", "linear_conv_kernel_dim"):
        if hasattr(config, sign):
            return "its recurrent state cannot be rolled back"
    if getattr(config, "alibi", False):
        return "its attention biases (ALiBi) do not take positions per row"
    if getattr(config, "model_type", "") in ("rwkv", "reformer", "xlnet", "mpt", "bloom"):
        return "its attention does not take positions per row"
    return None


def context_limit(config: Any) -> int:
    """Most tokens of context the model can serve with rows that do not influence each other."""
    config = config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or 1 << 20
    if not isinstance(limit, int) or limit < 2:
        raise ModelError(f"max_position_embeddings must be a whole number above 1, got {limit!r}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
    if kind in ("dynamic", "longrope"):
        # These change every row's rotations once any row passes the original length.
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = min(limit, original or limit)
    return int(limit)


@torch.inference_mode()
def probe(rows: Rows, model: Any) -> None:
    """Prove a model type outside `PROVEN`: two ragged rows against the model run alone.

    Args:
        rows: the runtime around the model, without rows.
        model: the model itself.

    Raises:
        UnsupportedModelError: they differ, or the model cannot be stepped at all.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    failed = f"{kind} models are not proven here, and a probe of this one failed"
    texts = [[(7 * i + 3) % rows.vocab_size for i in range(n)] for n in (9, 4)]
    try:
        rows.read(texts)
        got = rows.feed([t[-1:] for t in texts])[:, 0]
        alone = [
            model(input_ids=torch.tensor([t], device=rows.device)).logits[0, -1] for t in texts
        ]
        rows.keep([])
    except Exception as error:  # whatever it is, this model cannot be stepped
        line = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(f"{failed}: {line}") from error
    wanted = torch.stack(alone)
    worst = float(((got - wanted).abs().max() / (wanted.abs().max() + 1e-6)).float())
    if not worst <= (PROBE_TOLERANCE if model.dtype == torch.float32 else 0.1):
        raise UnsupportedModelError(
            f"{failed}: a row in a batch differs from the row alone by {worst:.1e} (relative)"
        )
