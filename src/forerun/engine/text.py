"""Turning tokens into text one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Incremental decoding: a token may complete a character begun by the tokens before it.

    Args:
        tokenizer: a Hugging Face tokenizer, or None (no text).
        context: the prompt; its last tokens matter to the first piece (leading spaces).
    """

    def __init__(self, tokenizer: Any, context: list[int]) -> None:
        # The Rust tokenizer itself, where there is one: this runs for every token.
        self._tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._options: dict[str, bool] = {"skip_special_tokens": True}
        if self._tokenizer is None and tokenizer is not None:
            self._tokenizer = tokenizer
            self._options["clean_up_tokenization_spaces"] = False
        self._tokens = list(context[-4:])
        self._start = 0  # of the window being decoded
        self._read = len(self._tokens)  # tokens whose text was already returned
        self._shown = ""

    def push(self, token: int) -> str:
        """The text this token adds; empty while a character is incomplete."""
        if self._tokenizer is None:
            return ""
        if not self._shown and self._read > self._start:
            self._shown = self._decode(self._tokens[self._start : self._read])
        self._tokens.append(token)
        text = self._decode(self._tokens[self._start :])
        if text.endswith("�"):
            return ""
        new = text[len(self._shown) :]
        self._start = self._read
        self._read = len(self._tokens)
        self._shown = self._decode(self._tokens[self._start : self._read])
        return new

    def flush(self) -> str:
        """Whatever an incomplete character at the very end decodes to."""
        if self._tokenizer is None:
            return ""
        return self._decode(self._tokens[self._start :])[len(self._shown) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, **self._options))


class StopStrings:
    """Finds stop strings in streamed text, holding back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.met = False
        """Whether a stop string was met (and cut off, with all that follows)."""

    def push(self, text: str) -> str:
        """Text that is safe to show."""
        if not self._stops:
            return text
        text = self._held + text
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self._held, self.met = "", True
            return text[: min(places)]
        held = max(
            (
                n
                for stop in self._stops
                for n in range(min(len(stop) - 1, len(text)), 0, -1)
                if text.endswith(stop[:n])
            ),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self, text: str = "") -> str:
        """What was held back: the text ended without a stop string."""
        held, self._held = self._held + text, ""
        return held


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> common([3, 4, 5], [3, 4, 6, 7])
    2
    """
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
