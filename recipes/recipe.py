"""Every number of the recipe: architectures, mixture, optimiser, schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
class Part:
    """One micro-batch of a step: ``rows`` rows of ``length`` tokens, filled in one way."""

    kind: str
    """``books``: stretches of books; ``tasks``: packed documents of the short families and
    drills; ``long``: the first half of the rows are books, the others documents of the long
    families."""
    rows: int
    length: int


@dataclass(frozen=True)
class Exits:
    """The early-exit loss: what a layer's state says through the shared last norm and head."""

    weight: float = 0.8
    """Weight of the exits together beside the final loss (1); 0 leaves them out."""
    first: int = 2
    """The shallowest layer (1 = after the first) that is trained to predict."""
    drawn: int = 3
    """How many of the layers from ``first`` to the last but one are drawn per micro-batch."""
    share: int = 8
    """One position of so many is scored."""

    def weights(self, layers: int) -> dict[int, float]:
        """Per candidate layer its weight when it is drawn: proportional to its depth.

        The drawn weights sum to ``weight`` in expectation.
        """
        candidates = range(self.first, layers)
        if not self.weight or not candidates:
            return {}
        mean = sum(candidates) / len(candidates)
        return {layer: self.weight * layer / mean / self.count(layers) for layer in candidates}

    def count(self, layers: int) -> int:
        """How many layers are drawn of a model with ``layers`` layers."""
        return min(self.drawn, max(0, layers - self.first))


@dataclass(frozen=True)
class Guide:
    """Shows one head where to look, and the layers after it what follows from that.

    Some ways of looking are hardly found out from answers alone. To answer with what stands before
    the word that a question names, a token has to find that word again and read there what
    belongs to it: after 38 million tokens the right name was still one of four at random.
    """

    depth: int
    """How many layers stand before that of the head."""
    head: int
    answers: tuple[int, ...]
    """The layers (1 = after the first) whose states are to say what follows."""
    attention: float
    """Weight of where the head looks, beside the final loss (1)."""
    answer: float
    """Weight of what these layers say."""

    def fits(self, model: Architecture) -> bool:
        """Whether a model has such layers and heads."""
        return max(self.answers) <= model.layers and self.head < model.heads


@dataclass(frozen=True)
class Unlikely:
    """Unlearning of what the target repeats when it continues books by itself.

    Read what it writes, for the losses do not show it: after 1,283 more steps with this, in the
    sixth sitting, greedy stories were a salad of words; 80 steps without it brought them back.
    """

    weight: float = 1.0
    """Beside the final loss (1); 0 leaves it out."""
    every: int = 4
    """Once in so many steps."""
    rows: int = 16
    prompt: int = 48
    """Tokens of a book that a row begins with."""
    length: int = 144
    """Tokens of a row: its prompt and what the target writes, greedily."""


@dataclass(frozen=True)
class Recipe:
    """Training settings; the defaults are those of the newest sitting."""

    target: Architecture = Architecture(layers=12, hidden=320, heads=5, feed_forward=832)
    draft: Architecture = Architecture(layers=2, hidden=256, heads=4, feed_forward=512)
    vocab_size: int = 6144
    tokenizer_draws: int = 4000
    """Generated documents per family that the tokenizer is trained on, beside the books."""
    parts: tuple[Part, ...] = (
        Part("books", 4, 512),
        Part("tasks", 4, 512),
        Part("tasks", 4, 512),
        Part("long", 2, 1024),
    )
    """The micro-batches of one step."""
    task_weights: dict[str, float] = field(
        default_factory=lambda: {
            "translation": 0.25,
            "arithmetic": 0.07,
            "extraction": 0.12,
            "rewriting": 0.20,
            "chat": 0.05,
        }
    )
    """Shares of the tokens in task rows, together with ``lesson_weights``."""
    lesson_weights: dict[str, float] = field(
        default_factory=lambda: {
            "drills": 0.02,
            "copies": 0.01,
            "tours": 0.02,
            "quiz": 0.12,
            "edits": 0.14,
        }
    )
    """Shares of what else is in task rows: ``drills`` are single sums with their carries,
    ``quiz`` many questions about a passage, ``edits`` words replaced in short texts, ``copies``
    strings given twice (the decay's second half leaves these out), ``tours`` long chat."""
    long_weights: dict[str, float] = field(
        default_factory=lambda: {"tales": 0.35, "revision": 0.5, "tours": 0.15}
    )
    """Shares of the tokens in long rows."""
    prompt_weights: dict[str, float] = field(
        default_factory=lambda: {
            "translation": 0.4,
            "arithmetic": 0.1,
            "drills": 0.05,
            "quiz": 0.05,
            "edits": 0.2,
            "extraction": 0.1,
            "rewriting": 0.3,
            "chat": 0.2,
            "copies": 0.0,
            "tales": 0.3,
            "tours": 0.2,
            "revision": 0.3,
        }
    )
    """Loss weight of prompt tokens (answers have weight 1)."""
    exits: Exits = Exits()
    guides: dict[str, Guide] = field(
        default_factory=lambda: {
            "questions": Guide(depth=5, head=1, answers=(6, 8), attention=0.1, answer=1.0),
            "copies": Guide(depth=2, head=2, answers=(3,), attention=0.2, answer=0.4),
            "changes": Guide(depth=6, head=4, answers=(9, 10), attention=0.3, answer=0.8),
        }
    )
    """``questions`` about a passage: at the word that the question ends with. ``copies`` of what
    stood before: at the next token there, as early as a draft from shallow layers needs it.
    ``changes`` of a text: at the old word, where it would come next."""
    unlikely: Unlikely = Unlikely()
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    warm_up: int = 100
    """Steps over which the learning rate rises; then it stays until a decay is begun."""

    distill_tokens: int = 4096
    """Tokens of a step of the draft's training, in rows of ``distill_length``."""
    distill_length: int = 512
    distill_rate: float = 0.5
    """Peak learning rate of the draft's training as a share of the target's."""
    practice_steps: int = 360
    """The draft's first steps: three quarters of the rows are copies, one quarter is data."""
    distill_practice: float = 0.3
    """Share of the distillation over which copies fade from a quarter of the rows to none."""

    def rate(self, step: int, decay: tuple[int, int] | None = None) -> float:
        """The learning-rate factor of ``step``, in [0, 1]: up, flat, and down once begun.

        ``decay``: the step at which the decay begins and how many steps it takes. It falls as
        one minus the square root of the time gone by (Hägele et al., 2024).
        """
        factor = min(1.0, (step + 1) / self.warm_up)
        if decay is not None and step >= decay[0]:
            factor *= max(0.0, 1 - ((step - decay[0] + 1) / decay[1]) ** 0.5)
        return factor


def variant(
    shape: str | None = None,
    exit_weight: float | None = None,
    draft_shape: str | None = None,
    rate: float = 1.0,
) -> Recipe:
    """The recipe with a target of another ``shape`` ("8x160"), exit weight, or draft's shape.

    Heads have 32 elements there, the feed-forward size is 2.6 times the hidden size. The warm-up
    takes 20 steps, as such runs are short. ``rate`` times the peak learning rates.
    """
    if not rate > 0:
        raise ValueError(f"the rate must be above 0, got {rate}")
    recipe = Recipe()
    recipe = replace(recipe, muon_lr=rate * recipe.muon_lr, adam_lr=rate * recipe.adam_lr)
    if shape is not None:
        recipe = replace(recipe, target=_shaped(shape), warm_up=20)
    if draft_shape is not None:
        recipe = replace(recipe, draft=_shaped(draft_shape))
    if exit_weight is not None:
        if not exit_weight >= 0:
            raise ValueError(f"the exit weight must be at least 0, got {exit_weight}")
        recipe = replace(recipe, exits=replace(recipe.exits, weight=exit_weight))
    return recipe


def _shaped(shape: str) -> Architecture:
    layers, _, hidden = shape.partition("x")
    if not (layers.isdigit() and hidden.isdigit() and int(layers) and int(hidden)):
        raise ValueError(f"shape must be like 8x160 (layers x hidden size), got {shape!r}")
    if int(hidden) % 32:
        raise ValueError(f"the hidden size must be a multiple of 32, got {hidden}")
    return Architecture(int(layers), int(hidden), int(hidden) // 32, int(hidden) * 13 // 5)
