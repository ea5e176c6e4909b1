"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.serve.texts import Texts
from forerun.serve.worker import Scores

FLOOR = -9999.0
"""What stands for minus infinity, which JSON does not have."""


class Namer:
    """Tokens as text, or by number where two of one text must not collide."""

    def __init__(self, texts: Texts, numbers: bool) -> None:
        self._texts, self._numbers = texts, numbers

    def __call__(self, token: int) -> str:
        """The name of a token."""
        return f"token_id:{token}" if self._numbers else self._texts.token(token)


def completion(
    tokens: Sequence[int], scores: Scores, first: int, top: int, name: Namer
) -> dict[str, Any]:
    """Of a completion.

    Args:
        tokens: the whole text, prompt included.
        scores: of all but the first token.
        first: where the shown text begins; 0 with echo, and its first token has no score.
        top: alternatives per token.
        name: writes a token.
    """
    out: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
    }  # fmt: skip
    offset = 0
    for place in range(first, len(tokens)):
        text = name(tokens[place])
        out["tokens"].append(text)
        out["text_offset"].append(offset)
        offset += len(text)
        if place == 0:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        chosen = _finite(scores.chosen[place - 1])
        best = {name(token): _finite(value) for token, value in scores.top[place - 1][:top]}
        out["token_logprobs"].append(chosen)
        out["top_logprobs"].append({text: chosen} | best if top else None)
    return out


def chat(
    tokens: Sequence[int], scores: Scores, first: int, top: int, name: Namer
) -> dict[str, Any]:
    """Of a chat answer; arguments as for `completion`."""
    content = []
    for place in range(first, len(tokens)):
        best = scores.top[place - 1][:top]
        content.append(
            {
                **_entry(name(tokens[place]), scores.chosen[place - 1]),
                "top_logprobs": [_entry(name(token), value) for token, value in best],
            }
        )
    return {"content": content, "refusal": None}


def _entry(text: str, value: float) -> dict[str, Any]:
    whole = "�" not in text  # part of a character has no text of its own
    return {
        "token": text,
        "logprob": _finite(value),
        "bytes": list(text.encode()) if whole else None,
    }


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # also what is no number
