"""What counts as a prompt: text or token ids, on their own or in a list."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.errors import PromptError

WANTED = "text, token ids (a list or a 1-D array of integers), or a list of either"


def split(prompts: Any) -> tuple[list[str | list[int]], bool]:
    """The prompts that were meant, and whether it is one on its own.

    Raises:
        PromptError: neither text nor token ids nor a list of these; says what was given.

    >>> split("Once"), split([3, 4]), split(["Once", [3, 4]])
    ((['Once'], True), ([[3, 4]], True), (['Once', [3, 4]], False))
    """
    if isinstance(prompts, str) or _is_array(prompts):
        return [read(prompts)], True
    if not _is_list(prompts):
        raise PromptError(f"a prompt must be {WANTED}; got {_shown(prompts)}")
    ids = [_is_id(item) for item in prompts]
    if not any(ids):
        return [read(item, f"prompt {i}") for i, item in enumerate(prompts)], False
    if not all(ids):
        wrong = ids.index(False)
        raise PromptError(
            f"a list holds either token ids or prompts; this one has token ids and, at place "
            f"{wrong}, {_shown(prompts[wrong])}"
        )
    return [read(prompts)], True


def read(prompt: Any, name: str = "a prompt") -> str | list[int]:
    """One prompt: text that can be encoded, or a list of plain integers.

    Raises:
        PromptError: it is neither; says what was given.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} holds half a character (a lone surrogate) at place {error.start}: "
                f"{prompt[error.start]!r}; decode its bytes with errors='replace'"
            ) from error
        return str(prompt)
    if _is_array(prompt):
        if prompt.ndim != 1:
            raise PromptError(
                f"{name} must be a 1-D array of token ids; got the shape {tuple(prompt.shape)}: "
                "give a list with an array per prompt, without padding"
            )
        items = prompt.tolist()
    elif _is_list(prompt):
        items = prompt
    else:
        raise PromptError(f"{name} must be text or token ids; got {_shown(prompt)}")
    for place, item in enumerate(items):
        if not _is_id(item):
            raise PromptError(
                f"token ids must be integers; {name} has {_shown(item)} at place {place}"
            )
    return [int(item) for item in items]


def _is_id(item: Any) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def _is_array(value: Any) -> bool:
    """An array of numpy, torch or the like."""
    return all(hasattr(value, name) for name in ("ndim", "shape", "tolist")) and not np.isscalar(
        value
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
