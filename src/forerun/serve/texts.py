"""Text to tokens and back, away from the event loop and from the engine's own tokenizer."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forerun import chat
from forerun.checks import encodable
from forerun.engine.text import UNREADABLE, Detokenizer, token_bytes
from forerun.errors import PromptError, SettingError
from forerun.serve.errors import bad, blaming

T = TypeVar("T")


class Texts:
    """A tokenizer of the server's own: fast ones must not encode in two threads.

    What encodes runs in a thread of this object (`run`) with a copy (72 MB of a vocabulary of
    262,144, and 1.8 s). What decodes has the model's, as its engine: that changes nothing in it,
    and may be called from any thread. Without a tokenizer prompts are token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self._decoder = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer else 1
        """Characters of a token, at most."""
        self.turns = chat.turns(tokenizer) if tokenizer else chat.Turns()
        self.calls = chat.call_format(tokenizer) if tokenizer else None
        self.added = {
            token.content: at
            for at, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        """Token ids of those beside the vocabulary proper, by their text."""
        self._tokens: dict[int, str] = {}  # text by id: scoring 1,000 tokens names 6,000
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="forerun-texts")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in this object's thread: the only one in which text is encoded."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def encode(self, text: str, special: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise bad("this model has no tokenizer; give token ids instead of text", "prompt")
        with blaming("prompt"):
            return chat.encode(self.tokenizer, encodable(text, "the text"), special)

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of tokens; ids the tokenizer does not know have none."""
        if self._decoder is None:
            return ""
        return str(self._decoder.decode(list(tokens), skip_special_tokens=skip_special))

    def pieces(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """The text each token adds, after other tokens."""
        detokenizer = Detokenizer.of(self._decoder, list(before))
        return [detokenizer.push(token) for token in tokens]

    def prompt(self, tokens: Sequence[int]) -> str:
        """The text of a prompt, up to an unfinished character, which its continuation completes."""
        unfinished = Detokenizer.of(self._decoder, tokens).flush()
        return self.decode(tokens, skip_special=False).removesuffix(unfinished)

    def token(self, token: int) -> str:
        """One token on its own, special ones by name."""
        if (text := self._tokens.get(token)) is None:
            text = self._tokens[token] = self.decode([token], skip_special=False)
        return text

    def bytes(self, token: int) -> bytes | None:
        """What a token stands for, which may be part of a character; None if that is not known."""
        text = self.token(token)
        if UNREADABLE not in text:
            return text.encode()
        known = token_bytes(self._decoder)
        return None if known is None else known[token]

    def names(self, tokens: Sequence[int]) -> list[str]:
        if self._decoder is None:
            return [str(token) for token in tokens]
        return [str(name) for name in self._decoder.convert_ids_to_tokens(list(tokens))]

    def special(self, token: int) -> bool:
        return token in self._special

    def info(self) -> dict[str, Any]:
        """Special tokens by name, and the chat template."""
        if self.tokenizer is None:
            raise bad("this model has no tokenizer")
        special = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items()}
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "vocab_size": len(self.tokenizer),
            "bos_token": None,
            "eos_token": None,
            **special,
            "chat_template": getattr(self.tokenizer, "chat_template", None),
        }

    @property
    def chats(self) -> bool:
        return chat.has_template(self.tokenizer)

    def chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
        """Token ids of a conversation, as `chat.render`."""
        try:
            return chat.render(self.tokenizer, messages, **how)
        except SettingError as error:
            raise bad(str(error), "chat_template_kwargs") from error
        except PromptError as error:
            raise bad(str(error), "messages") from error
