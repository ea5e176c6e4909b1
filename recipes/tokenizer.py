"""The pair's tokenizer: byte-level BPE, one token per digit, spaces and newlines apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

END = "<|endoftext|>"
MAX_LENGTH = 1024

# Like GPT-2's split, but a number is cut into digits. A word carries the space before it, and
# ":" never joins what follows, so a prompt's tokens are a prefix of prompt + answer.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Trains the BPE vocabulary; returns a ``tokenizers.Tokenizer`` with end-of-text as id 0."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap(tokenizer: Any) -> Any:
    """The tokenizer as ``transformers`` sees it: eos and pad are end-of-text, chat template set."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
