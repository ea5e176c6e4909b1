"""Tiny random encoder-decoder models of every proven family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from forerun.runtime.base import Pieces, Rows
from recipes.export import export_model
from recipes.marian import MarianArchitecture, train_tokenizer, wrap
from tiny import LIMIT, VOCAB
from tiny import build as build_decoder

_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "max_position_embeddings": LIMIT, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "init_std": 0.25,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_MARIAN = {
    **_BART, "pad_token_id": 96, "decoder_start_token_id": 96, "eos_token_id": 0,
    "bos_token_id": None, "scale_embedding": True,
}  # fmt: skip
_PEGASUS = {**_BART, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}

FAMILIES: dict[str, Any] = {
    "t5": lambda: hf.T5Config(**_T5),
    "flan-t5": lambda: hf.T5Config(**_T5, **_GATED),
    "mt5": lambda: hf.MT5Config(**_T5, **_GATED),
    "umt5": lambda: hf.UMT5Config(**_T5),
    "marian": lambda: hf.MarianConfig(**_MARIAN),
    "bart": lambda: hf.BartConfig(**_BART),
    "mbart": lambda: hf.MBartConfig(**_BART, scale_embedding=True),
    "plbart": lambda: hf.PLBartConfig(**_BART),
    "m2m_100": lambda: hf.M2M100Config(**_BART, scale_embedding=True),
    "pegasus": lambda: hf.PegasusConfig(**_PEGASUS),
    "blenderbot": lambda: hf.BlenderbotConfig(**_BART),
    "blenderbot-small": lambda: hf.BlenderbotSmallConfig(**_BART),
}
"""Flan-T5 is a T5 with gated layers and a head of its own; NLLB without experts is an M2M100."""


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose positions matter."""
    config = FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = hf.AutoModelForSeq2SeqLM.from_config(config).eval()
    for name, weight in model.named_parameters():  # T5's own bias hardly matters
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weight, std=2.0)
        elif name.endswith((".q.weight", ".k.weight")):
            weight.data.mul_(3.0)
    model.generation_config.forced_eos_token_id = None
    model.generation_config.encoder_no_repeat_ngram_size = 0  # Blenderbot's is 3
    model.generation_config.forced_bos_token_id = 0 if family == "bart" else None
    return model


def alone(model: Any, source: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """`(n, V)` logits after every token of a text, without a cache."""
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor([list(source)]),
            decoder_input_ids=torch.tensor([list(tokens)]),
            use_cache=False,
        ).logits[0]


class OneSource(Rows):
    """Rows that all join with the same source, for tests that know none."""

    SOURCE = (5, 17, 40, 8, 23, 11, 60)

    def join(self, count: int, room: int = 0, sources: Pieces | None = None) -> None:
        super().join(count, room, [self.SOURCE] * count)


WORDS = "the cat sat on a mat and saw five dogs in the old town by the green sea".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
SOURCES = ["the cat sat on a mat", "five dogs", "a green town by the old sea and the mat"]


@dataclass(frozen=True)
class Folders:
    """Models of one tokenizer on disk."""

    target: str
    draft: str
    decoder: str
    """A decoder-only model."""


def save_folders(path: Path) -> Folders:
    """Two tiny Marian models and a Llama."""
    tokenizer = wrap(train_tokenizer(TEXTS, 330))
    for seed, (name, layers) in enumerate([("target", 2), ("draft", 1)]):
        torch.manual_seed(seed)
        model = MarianArchitecture(layers, 32, 2, 48).build(len(tokenizer)).eval()
        for weight in model.parameters():
            if weight.dim() > 1 and weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.25)
        export_model(model.float(), tokenizer, path / name)
    other = build_decoder("llama", vocab_size=len(tokenizer))
    other.generation_config.eos_token_id = other.config.eos_token_id = tokenizer.eos_token_id
    export_model(other, tokenizer, path / "decoder")
    return Folders(*(str(path / name) for name in ("target", "draft", "decoder")))
