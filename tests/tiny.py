"""Tiny random models of every supported family."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

VOCAB, LIMIT = 97, 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LIMIT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LIMIT,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**_GATED),
    "mistral": lambda: hf.MistralConfig(**_GATED, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**_GATED),
    "qwen3": lambda: hf.Qwen3Config(**_GATED, head_dim=8),
    "gemma": lambda: hf.GemmaConfig(**{**_GATED, "num_key_value_heads": 1}, head_dim=8),
    "phi3": lambda: hf.Phi3Config(**_GATED),
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZES, intermediate_size=48),
}
_WINDOW = {"sliding_window": 8}
WINDOWED = {
    "mistral-windowed": lambda: hf.MistralConfig(**_GATED, **_WINDOW),
    "phi3-windowed": lambda: hf.Phi3Config(**_GATED, **_WINDOW),
    "qwen2-windowed": lambda: hf.Qwen2Config(
        **_GATED, **_WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "gemma2": lambda: hf.Gemma2Config(**_GATED, **_WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **{**_GATED, "num_key_value_heads": 1}, **_WINDOW, head_dim=8, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip
"""Of 8 tokens, in all or some of their layers."""


def build(family: str, seed: int = 0, scale: float = 0.3, **changes: Any) -> Any:
    """A random model with logits spread enough that greedy text is not constant."""
    torch.manual_seed(seed)
    config = {**CONFIGS, **WINDOWED}[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=scale)
    return model


def texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths (without special ids)."""
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=make).tolist() for n in lengths]
