"""Every number of the recipe: architectures, mixture, optimiser, schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """The sizes of one Llama model (head size = hidden / heads)."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int

    def build(self, vocab_size: int) -> Any:
        """A freshly initialised ``LlamaForCausalLM`` in float32, residual outputs at zero."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        model = LlamaForCausalLM(config)
        model.model.embed_tokens.padding_idx = None  # end-of-text is also padding: do train it
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        return model


@dataclass(frozen=True)
class Recipe:
    """Training settings; the defaults are what the shipped pair was trained with."""

    target: Architecture = Architecture(layers=12, hidden=320, heads=5, feed_forward=832)
    draft: Architecture = Architecture(layers=2, hidden=256, heads=4, feed_forward=512)
    vocab_size: int = 6144
    tokenizer_draws: int = 4000
    """Generated documents per family that the tokenizer is trained on, beside the books."""
    batch_tokens: int = 4096
    length: int = 512
    long_length: int = 1024
    long_from: float = 0.85
    """Share of the run after which sequences have ``long_length`` tokens."""
    story_rows: tuple[int, int] = (3, 8)
    """Of every 8 rows, 3 are one stretch of a book; the others are packed with tasks."""
    drill_rows: tuple[int, ...] = (4, 7)
    """Of every 8 rows, those that are plain sums of the arithmetic family, results scored."""
    task_weights: dict[str, float] = field(
        default_factory=lambda: {
            "translation": 0.30,
            "arithmetic": 0.18,
            "extraction": 0.15,
            "rewriting": 0.24,
            "chat": 0.13,
        }
    )
    """Shares of the tokens in task rows."""
    prompt_weights: dict[str, float] = field(
        default_factory=lambda: {
            "translation": 0.4,
            "arithmetic": 0.1,
            "extraction": 0.1,
            "rewriting": 0.3,
            "chat": 0.2,
        }
    )
    """Loss weight of prompt tokens (answers have weight 1)."""
    practice_until: tuple[float, float] = (0.5, 0.65)
    """Copying practice (random token strings and short texts to repeat) is given in full up to
    the first share of the run and fades out up to the second."""
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    warm_up: float = 0.02
    cool_down: float = 0.5
    """Share of the run over which the learning rate falls linearly to zero."""
    draft_cross_entropy: float = 0.1
    """Weight of the draft's own cross-entropy beside the divergence from the target."""

    distill_rate: float = 0.5
    """Peak learning rate of stage 2 as a share of stage 1's."""
    distill_practice: float = 0.3
    """Share of stage 2 over which copying practice fades from a quarter of the rows to none."""

    def practice(self, progress: float) -> float:
        """How much copying practice is given at ``progress``, in [0, 1]."""
        full, none = self.practice_until
        return max(0.0, min(1.0, (none - progress) / (none - full)))

    def rate(self, progress: float) -> float:
        """The learning-rate factor at ``progress`` in [0, 1]: up, flat, down to zero."""
        return max(0.0, min(1.0, progress / self.warm_up + 0.05, (1 - progress) / self.cool_down))
