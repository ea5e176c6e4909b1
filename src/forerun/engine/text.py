"""Turning tokens into text one at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

HELD = 3  # bytes of an unfinished character, at most: UTF-8 has four
UNREADABLE = "\ufffd"
_ERRORS = "forerun-bytes"
codecs.register_error(_ERRORS, lambda e: (UNREADABLE * (e.end - e.start), e.end))  # type: ignore[attr-defined]


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(rest))]
    return dict(zip(letters, [*plain, *rest], strict=True))


BYTE_LETTERS = _byte_letters()


class TokenBytes(dict[int, bytes]):
    """The bytes each token stands for, in tokenizers where those around it do not matter.

    Special tokens, and ids the tokenizer does not know, stand for none. Made by `token_bytes`, of a
    decoder's steps; `ValueError` for others than it follows, or in another order than it knows.
    `errors` is how the decoder writes bytes that are no character, as `codecs` takes it.
    """

    def __init__(self, backend: Any, steps: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token for token, about in added.items() if about.special}
        self._letters = self._falls_back = joined = False
        self._replaced: list[tuple[str, str]] = []
        self._dropped, self._most_dropped = b"", 0
        for at, step in enumerate(steps):
            kind, good = step["type"], not joined
            if kind == "ByteLevel":
                good = at == 0
                self._letters = joined = True
            elif kind == "Metaspace":
                good = at == 0
                self._replaced.append((step["replacement"], " "))
                if step.get("prepend_scheme") != "never":
                    self._dropped, self._most_dropped = b" ", -1
            elif kind == "Replace":
                good &= not self._falls_back and "String" in step["pattern"]
                self._replaced.append((step["pattern"].get("String", ""), step["content"]))
            elif kind == "ByteFallback":
                self._falls_back = True
            elif kind == "Strip":
                good = joined and (step["start"], step["stop"]) == (1, 0) and at == len(steps) - 1
                self._dropped, self._most_dropped = step["content"].encode(), 1
            else:
                good = joined = kind == "Fuse"
            if not good:
                raise ValueError(kind)
        if not steps:
            raise ValueError("no decoder")
        self.errors = _ERRORS if self._falls_back else "replace"
        self._sorted: tuple[int, list[tuple[bytes, int]]] = 0, []

    def __missing__(self, token: int) -> bytes:
        name = None if token in self._special else self._backend.id_to_token(token)
        self[token] = data = b"" if name is None else self._bytes(name)
        return data

    def _bytes(self, name: str) -> bytes:
        if self._letters:
            values = [BYTE_LETTERS.get(letter) for letter in name]
            return name.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        for old, new in self._replaced:
            name = name.replace(old, new)
        if self._falls_back and len(name) == 6 and name.startswith("<0x") and name[-1] == ">":
            return bytes.fromhex(name[3:5])
        return name.encode()

    def begin(self, token: int) -> bytes:
        """The bytes of a token at the beginning of a text, whose first space may be dropped."""
        if self._most_dropped < 0:
            return self[token].replace(self._dropped, b"")
        return self[token].removeprefix(self._dropped)

    def sorted(self, count: int) -> list[tuple[bytes, int]]:
        """The first `count` tokens that stand for something, in the order of their bytes."""
        if self._sorted[0] != count:
            pairs = ((self[token], token) for token in range(count))
            self._sorted = count, sorted(pair for pair in pairs if pair[0])
        return self._sorted[1]


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The bytes of a tokenizer's tokens, if its decoder is byte-level, byte-fallback or Metaspace.
    Others (None) make the text of a token depend on its neighbours, or are not known in detail."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    try:
        return TokenBytes(backend, state.get("decoders", [state]))
    except ValueError:
        return None


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """A tokenizer's special tokens by what they are called; they never show as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        added = backend.get_added_tokens_decoder()
        return {about.content: token for token, about in added.items() if about.special}
    names = getattr(tokenizer, "all_special_tokens", ())
    return dict(zip(map(str, names), getattr(tokenizer, "all_special_ids", ()), strict=True))


class Detokenizer:
    """Incremental decoding: a token may complete a character begun by the tokens before it.

    The prompt's text without an unfinished character at its end, followed by all pieces, is the
    text of all tokens. At most three bytes are held back, and the time is linear. This one is of a
    model without a tokenizer, and there is no text.
    """

    @staticmethod
    def of(tokenizer: Any, context: Sequence[int]) -> Detokenizer:
        """Of what is written behind the tokens of a context."""
        if (known := token_bytes(tokenizer)) is not None:
            return _Bytes(known, context)
        return Detokenizer() if tokenizer is None else _Window(tokenizer, context)

    def push(self, token: int) -> str:
        """The text this token adds; empty while a character is unfinished."""
        return ""

    @property
    def holds(self) -> bool:
        """Whether the newest token left a character unfinished."""
        return False

    def flush(self) -> str:
        """Whatever an unfinished character at the very end decodes to."""
        return ""


class _Bytes(Detokenizer):
    """By the bytes of each token."""

    def __init__(self, known: TokenBytes, context: Sequence[int]) -> None:
        self._known = known
        self._utf8 = codecs.getincrementaldecoder("utf-8")(known.errors)
        tail = b""
        for token in reversed(context):
            tail = known[token] + tail
            if len(tail) >= HELD:
                break
        self._begun = bool(tail)
        self._utf8.decode(tail)

    def push(self, token: int) -> str:
        data = self._known[token]
        if not self._begun and data:
            self._begun, data = True, self._known.begin(token)
        return self._utf8.decode(data)

    @property
    def holds(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window(Detokenizer):
    """By decoding the last few tokens anew with each one: the difference is its text."""

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        # The Rust tokenizer itself, where there is one: this runs for every token.
        self._tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._options: dict[str, bool] = {"skip_special_tokens": True}
        if self._tokenizer is None:
            self._tokenizer = tokenizer
            self._options["clean_up_tokenization_spaces"] = False
        self._tokens = list(context[-4:])
        self._read = len(self._tokens)  # tokens whose text was already returned
        self._shown: str | None = None

    def push(self, token: int) -> str:
        if self._shown is None:
            self._shown = self._decode().rstrip(UNREADABLE)
        self._tokens.append(token)
        new = self._decode()[len(self._shown) :]
        waiting = len(self._tokens) - self._read
        if waiting <= HELD and (not new or new.endswith(UNREADABLE)):
            new = new.rstrip(UNREADABLE)
            self._shown += new
            return new
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        self._shown = self._decode()
        return new

    @property
    def holds(self) -> bool:
        return len(self._tokens) > self._read

    def flush(self) -> str:
        return "" if self._shown is None else self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        if not self._tokens:
            return ""
        return str(self._tokenizer.decode(self._tokens, **self._options))


class StopStrings:
    """Finds stop strings in streamed text, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.met: str | None = None  # the stop string met (and cut off, with all that follows)

    def push(self, text: str, ends: bool = True) -> str:
        """Text that is safe to show; unless it `ends`, a stop string completed now is text."""
        if not self._stops:
            return text
        text = self._held + text
        places = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places and ends:
            at, self.met = min(places)
            self._held = ""
            return text[:at]
        held = begun(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self, text: str = "") -> str:
        """What was held back: the text ended without a stop string."""
        held, self._held = self._held + text, ""
        return held


def begun(text: str, wholes: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of these.

    >>> begun("so<|en", ["<|end|>", "n!"])
    4
    """
    ends = (n for whole in wholes for n in range(1, len(whole)) if text.endswith(whole[:n]))
    return max(ends, default=0)


def common(one: Sequence[object], other: Sequence[object]) -> int:
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
