"""Tiny GGUF files, and the `transformers` models whose weights they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LIMIT, BLOCK = 128, 256
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "h e", "th e", "Ġ the", "1 2", "i n")
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in MERGES)]
_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": LIMIT, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = {
    "llama": hf.LlamaConfig,
    "qwen2": hf.Qwen2Config,
    "qwen3": hf.Qwen3Config,
    "gemma3": hf.Gemma3TextConfig,
    "phi3": hf.Phi3Config,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    # One layer of six sees all tokens, the others the window.
    "gemma3": {
        "num_hidden_layers": 6, "sliding_window": 8, "head_dim": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"pad_token_id": 0, "tie_word_embeddings": False, "sliding_window": None},
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_NAMES_OF_GEMMA = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of a block where float16 begin


def write(
    path: Path,
    family: str = "llama",
    kind: str = "Q4_1",
    metadata: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Write a random model.

    Args:
        path: of the file.
        family: of `CONFIGS`.
        kind: type of its matrices; vectors are F32.
        metadata: more of it.
        changes: to the configuration.

    Returns:
        The model, its weights those of the file.
    """
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    sizes = {**_SIZES, **_OWN.get(family, {}), **changes}
    names = _NAMES_OF_GEMMA if family == "gemma3" else NAMES
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family](**sizes)).eval()
    writer = GGUFWriter(path, family)
    _describe(writer, model.config)
    for key, value in (metadata or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    for name, weight in model.named_parameters():
        stem, _, what = name.rpartition(".")
        layer = stem.split(".")[2] if ".layers." in stem else None
        stem = stem.removeprefix(f"model.layers.{layer}.")
        called = f"blk.{layer}.{names[stem]}.{what}" if layer else f"{names[stem]}.{what}"
        heads = {"attn_q": 4, "attn_k": 2}.get(names[stem]) if family == "llama" else None
        if weight.dim() == 1:
            held = torch.randn(weight.shape).mul_(0.2).add_(1.0 if "norm" in name else 0.0)
            writer.add_tensor(called, held.numpy())
            weight.copy_(held - 1.0 if family == "gemma3" else held)  # which adds it again
            continue
        torch.nn.init.normal_(weight, std=0.06 if stem != "model.embed_tokens" else 0.3)
        packed = _packed(_turned(weight.numpy(), heads), kind, rng)
        wide = gguf.dequantize(packed, GGMLQuantizationType[kind]).reshape(weight.shape)
        weight.copy_(torch.from_numpy(_turned_back(wide, heads)))
        writer.add_tensor(called, packed, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _describe(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    width = int(width * (config.rope_parameters.get("partial_rotary_factor") or 1))
    writer.add_rope_dimension_count(width)
    _rotate(writer, config, width)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _rotate(writer: GGUFWriter, config: Any, width: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)  # the others' base is the architecture's
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":  # as llama.cpp's converter has it: factors of wavelengths
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
        plain = rope["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    elif rope["rope_type"] == "longrope":
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")[1])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if original := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(original)


def _packed(weight: NDArray[np.float32], kind: str, rng: Any) -> NDArray[Any]:
    """In blocks of this type; random ones where `gguf` reads the type and does not write it."""
    if kind == "F16":
        return weight.astype(np.float16)
    if kind not in _SCALES:
        return gguf.quantize(weight, GGMLQuantizationType[kind])
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    count = weight.size // BLOCK
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    if kind != "Q6_K":
        blocks[:, 4:12] |= 0x60  # scales of half their range and more, as real ones are
    for at, scale in zip(_SCALES[kind], (1e-4, 5e-4), strict=False):
        blocks[:, at : at + 2] = np.full((count, 1), scale, np.float16).view(np.uint8)
    return blocks.reshape(len(weight), -1)


def _turned(weight: NDArray[np.float32], heads: int | None) -> NDArray[np.float32]:
    """Rows of a head as llama.cpp rotates them: pairs of neighbours."""
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _turned_back(weight: NDArray[np.float32], heads: int | None) -> NDArray[np.float32]:
    if heads is None:
        return weight
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
