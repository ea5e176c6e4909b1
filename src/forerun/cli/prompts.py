"""Prompts of the lab's commands: a file, or the ones that ship with forerun.

`find_prompts` tells mistakes before a model is loaded, `tokenise` needs the model; `read_prompts`
is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import PromptError, UnknownNameError, require

if TYPE_CHECKING:
    from forerun import Model
    from forerun.cli.inputs import Request
    from forerun.engine import Sampling

BUILTIN = "builtin"
ALL = "all"
PENALTIES = {"stories": 1.2}
"""Decoded greedily without one, a small model's stories fall into loops that any draft predicts."""


@dataclass(frozen=True)
class Found:
    """A prompt as it was asked for."""

    family: str
    """The family of a shipped prompt, or the name of the file."""
    id: str
    request: Request


@dataclass(frozen=True)
class LabPrompt:
    """A prompt ready to run."""

    family: str
    id: str
    text: str
    ids: list[int]
    sampling: Sampling

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to write."""
        return self.sampling.max_new_tokens

    @property
    def repetition_penalty(self) -> float:
        """1 is off."""
        return self.sampling.repetition_penalty


def read_prompts(
    text: str, model: Model, split: str = "test", limit: int | None = None, cap: int | None = None
) -> list[LabPrompt]:
    """The prompts a user means by `text`, tokenised and checked.

    Args:
        text: a file as for `generate --prompt-file` (``-`` reads stdin), ``builtin:FAMILY`` or
            ``builtin:all``. Of all families the prompts come in turns, so that the first few are
            of every family.
        model: tokenises, and knows its context.
        split: of the shipped prompts, ``"val"`` or ``"test"``.
        limit: only the first so many; None takes all.
        cap: most new tokens of a prompt that asks for more or for no number. None takes the
            prompt's own, or 128.

    Raises:
        PromptError, SettingError: with the place of the prompt.
        OSError: the file cannot be read.
    """
    return tokenise(model, find_prompts(text, split, limit, cap))


def find_prompts(
    text: str, split: str = "test", limit: int | None = None, cap: int | None = None
) -> list[Found]:
    """`read_prompts` as far as it goes without a model."""
    require(limit is None or limit >= 1, "limit", limit, "≥ 1")
    require(cap is None or cap >= 1, "max_new_tokens", cap, "≥ 1")
    require(split in ("val", "test"), "split", split, "val or test")
    name, _, family = text.partition(":")
    if name == BUILTIN:
        return _shipped(family or ALL, split, cap)[:limit]

    from forerun.cli.inputs import read_requests

    stem = "stdin" if text == "-" else Path(text).stem
    return [
        Found(stem, request.where.rpartition(", ")[2], _capped(request, cap))
        for request in read_requests(None, text)[:limit]
    ]


def tokenise(model: Model, found: Sequence[Found]) -> list[LabPrompt]:
    """Tokenise and check every prompt before the first one runs."""
    from forerun.cli.inputs import prepare

    rows = prepare(model, [f.request for f in found], {})
    return [
        LabPrompt(f.family, f.id, row.text, row.ids, row.sampling)
        for f, row in zip(found, rows, strict=True)
    ]


def _shipped(family: str, split: str, cap: int | None) -> list[Found]:
    from forerun.cli.inputs import Request
    from forerun.zoo import families, prompts

    if family not in (ALL, *families()):
        raise UnknownNameError.among("family of shipped prompts", family, (ALL, *families()))
    chosen = [prompts(f, split) for f in (families() if family == ALL else [family])]
    mixed = [p for p in chain(*zip_longest(*chosen)) if p is not None]
    if not mixed:
        raise PromptError("the shipped prompts are not in this copy; give a file")
    return [
        Found(
            p.family,
            p.id,
            Request(
                p.prompt,
                {
                    "max_new_tokens": min(cap or p.max_new_tokens, p.max_new_tokens),
                    "repetition_penalty": PENALTIES.get(p.family, 1.0),
                },
                p.id,
            ),
        )
        for p in mixed
    ]


def _capped(request: Request, cap: int | None) -> Request:
    from forerun.cli.inputs import Request

    own = request.settings.get("max_new_tokens", cap)
    if cap is None or type(own) is not int:  # a wrong kind is told where all settings are read
        return request
    return Request(
        request.prompt, {**request.settings, "max_new_tokens": min(own, cap)}, request.where
    )
