"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.engine import Logprob
from forerun.serve.texts import Texts

FLOOR = -9999.0
"""What stands for minus infinity, which JSON does not have."""

Entry = tuple[int, Logprob | None]
"""A token and what the target said of it; None of a text's first."""


class TokenNamer:
    """Tokens as text, or by number where two of one text must not collide."""

    def __init__(self, texts: Texts, numbers: bool) -> None:
        self._texts, self._numbers = texts, numbers

    def __call__(self, token: int) -> str:
        """The name of a token."""
        return f"token_id:{token}" if self._numbers else self._texts.token(token)

    def bytes(self, token: int) -> bytes | None:
        """Those of a token; several together may make one character."""
        return self._texts.bytes(token)


def completion(
    entries: Sequence[Entry], top: int, name: TokenNamer, offset: int = 0
) -> dict[str, Any]:
    """Of a completion.

    Args:
        entries: tokens with theirs.
        top: alternatives per token.
        name: writes a token.
        offset: characters of the text before.
    """
    out: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    for token, score in entries:
        text = name(token)
        out["tokens"].append(text)
        out["text_offset"].append(offset)
        offset += len(text)
        chosen = best = None
        if score is not None:
            chosen = _finite(score.logprob)
            if top:
                best = {text: chosen} | {name(other): _finite(v) for other, v in score.top[:top]}
        out["token_logprobs"].append(chosen)
        out["top_logprobs"].append(best)
    return out


def chat(entries: Sequence[Entry], top: int, name: TokenNamer) -> dict[str, Any]:
    """Of a chat answer, none of whose tokens is the first of a text; see `completion`."""
    content = [
        {
            **_entry(name, token, score.logprob),
            "top_logprobs": [_entry(name, other, value) for other, value in score.top[:top]],
        }
        for token, score in entries
        if score is not None
    ]
    return {"content": content, "refusal": None}


def _entry(name: TokenNamer, token: int, value: float) -> dict[str, Any]:
    data = name.bytes(token)
    return {
        "token": name(token),
        "logprob": _finite(value),
        "bytes": None if data is None else list(data),
    }


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # also what is no number
