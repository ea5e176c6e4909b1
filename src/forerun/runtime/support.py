"""Which architectures a row cache can serve, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError, SettingError, UnsupportedModelError
from forerun.runtime.attention import windows_of

if TYPE_CHECKING:
    from forerun.runtime.base import Rows

PROVEN = frozenset({
    "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "phi3",
    "qwen2", "qwen3",
})  # fmt: skip
"""Model types whose rows are tested against the model run alone; others are probed when loaded."""

PROVEN_ENCODER_DECODER = frozenset({
    "bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "pegasus",
    "plbart", "t5", "umt5",
})  # fmt: skip
"""Types of encoder-decoder models that are tested so."""

REFUSED_ENCODER_DECODER = {
    kind: reason
    for reason, kinds in {
        "its experts have a capacity that all rows share, so that rows influence each other":
            ("switch_transformers", "nllb-moe"),
        "its encoder attends in windows padded to a fixed size":
            ("led", "longt5", "bigbird_pegasus", "pegasus_x"),
        "its decoder predicts several tokens with streams of their own":
            ("prophetnet", "xlm-prophetnet"),
        "its source is sound, not text":
            ("whisper", "speech_to_text", "speecht5", "moonshine", "seamless_m4t",
             "seamless_m4t_v2"),
    }.items()
    for kind in kinds
}  # fmt: skip

PROBE_TOLERANCE = 2e-3  # largest difference by their range of what is computed twice in fp32


def check_supported(model: Any, encoders: bool = False) -> None:
    """Raise `UnsupportedModelError` with the reason if the configuration rules rows out."""
    config = model.config
    if reason := refusal(config, encoders=encoders):
        raise UnsupportedModelError(f"{config.model_type} models cannot run here: {reason}")
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{config.model_type}: no language-model head; load a causal language model"
        )


def refusal(config: Any, encoders: bool = False) -> str | None:
    """The reason a configuration cannot be served, or None."""
    for part in ("vision", "audio"):
        if hasattr(config, f"{part}_config"):
            return f"{part}-language models are not supported; use a model of text alone"
    whole, config = config, config.get_text_config(decoder=True)
    if getattr(whole, "is_encoder_decoder", False):
        if not encoders:
            return "this executor serves no encoder-decoder models; use runtime torch"
        if windows_of(config) is not None:
            return "sliding windows of decoders with an encoder are not served"
        return REFUSED_ENCODER_DECODER.get(whole.model_type)
    if config.model_type in ("bert", "roberta", "electra", "distilbert", "albert", "deberta-v2"):
        return "encoder-only models do not generate text; use a decoder-only model"
    layers = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(layers - {"full_attention", "sliding_attention"}):
        return f"layers of type {', '.join(odd)} keep a state that cannot be rolled back"
    for sign in ("mamba_d_state", "ssm_state_size", "state_size", "linear_conv_kernel_dim"):
        if hasattr(config, sign) and not layers:
            return "its recurrent state cannot be rolled back"
    if getattr(config, "alibi", False):
        return "its attention biases (ALiBi) do not take positions per row"
    if getattr(config, "model_type", "") in ("rwkv", "reformer", "xlnet", "mpt", "bloom"):
        return "its attention does not take positions per row"
    return None


def context_limit(config: Any) -> int:
    """Most tokens of context the model can serve with rows that do not influence each other."""
    config = config.get_text_config(decoder=True)
    limit = decoder_limit(config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
    if kind in ("dynamic", "longrope"):
        # These change every row's rotations once any row passes the original length.
        name = "original_max_position_embeddings"
        limit = min(limit, rope.get(name) or getattr(config, name, None) or limit)
    return int(limit)


def decoder_limit(config: Any) -> int:
    """Most tokens of a decoder's context by its configuration; T5's has no end."""
    limit = getattr(config, "max_position_embeddings", None) or 1 << 20
    if not isinstance(limit, int) or limit < 2:
        raise ModelError(f"max_position_embeddings must be a whole number above 1, got {limit!r}")
    return limit


def end_of_text(settings: Any) -> frozenset[int] | None:
    """Ids that end texts by a configuration or generation settings; None if these name none."""
    ends = getattr(settings, "eos_token_id", None)
    return None if ends is None else frozenset(ends if isinstance(ends, (list, tuple)) else [ends])


def check_decoder_only(target: Rows, drafter: str) -> None:
    """Raise `SettingError` if a target has an encoder."""
    if target.facts.source_limit is not None:
        raise SettingError(
            f"{drafter} is for decoder-only targets, and this one has an encoder; use lookup, or "
            "what forerun train-draft makes for it (shared, block)"
        )


def model_on_torch(target: Rows, drafter: str) -> Any:
    """The model of a decoder-only target that torch runs as it is; else raises `SettingError`."""
    check_decoder_only(target, drafter)
    model = target.executor.module()
    if model is None or target.facts.executor != "torch":
        raise SettingError(
            f"{drafter} runs on torch, and this target on {target.facts.executor or 'none'}; use "
            "the runtime torch, or a draft that does not read the target (lookup, a draft model)"
        )
    return model
