"""Prompts: from the command line, stdin, or a file of JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import PromptError, SettingError, UnknownNameError

if TYPE_CHECKING:
    from forerun import Model
    from forerun.engine import Sampling


MARK = "\ufeff"
"""The byte-order mark that some editors put before UTF-8 text."""


@dataclass(frozen=True)
class Request:
    """One prompt as requested."""

    prompt: str | list[int]
    """Of a conversation its first turn."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields of its own."""
    where: str = ""
    """Its place in the file, for error messages."""
    id: str | int | None = None
    """Its own name; `id`, `family` and `meta` come back in the output."""
    family: str | None = None
    """The kind of prompt: figures are reported per family."""
    meta: Any = None
    """Anything else its owner wants to find beside the output."""
    later: tuple[str, ...] = ()
    """What its user says after each answer."""
    source: bool = False
    """Whether the prompt was called a source, which needs a model with an encoder."""


@dataclass(frozen=True)
class Row:
    """One prompt ready to run."""

    text: str
    ids: list[int]
    sampling: Sampling
    index: int = 0
    """Its place among the prompts, from 0."""
    id: str | int | None = None
    family: str | None = None
    meta: Any = None

    def to_json(self) -> dict[str, Any]:
        """Fields that identify the completion."""
        return {name: getattr(self, name) for name in ("index", "id", "family", "meta")}


@dataclass(frozen=True)
class Reader:
    """The parts of a model that read prompts."""

    tokenizer: Any
    limit: int
    """Most tokens of context."""
    encode: Callable[[str | list[int]], list[int]]
    encodes: bool = False
    """Whether prompts are sources, for an encoder, which has the limit then."""

    @classmethod
    def of(cls, model: Model) -> Reader:
        """That of a loaded model."""
        encodes = model.target.facts.source_limit is not None
        limit = model.prompt_limit + 1 if encodes else model.target.limit
        return cls(model.tokenizer, limit, model.encode, encodes)

    @classmethod
    def open(cls, target: str | Path, trust_remote_code: bool = False) -> Reader | None:
        """That of a model whose weights are not loaded; None where only loading them can tell."""
        from forerun import chat
        from forerun.errors import ForerunError
        from forerun.runtime.load import load_tokenizer, read_config
        from forerun.runtime.support import context_limit

        try:
            tokenizer = load_tokenizer(target, trust_remote_code)
            config = read_config(target, trust_remote_code)
            limit = context_limit(config)
        except (ForerunError, OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

        def encode(prompt: str | list[int]) -> list[int]:
            return chat.encode(tokenizer, prompt) if isinstance(prompt, str) else prompt

        encodes = bool(getattr(config, "is_encoder_decoder", False))
        return cls(tokenizer, limit + encodes, encode, encodes)


def read_requests(prompt: str | None, prompt_file: str | None) -> list[Request]:
    """The prompts the user means.

    Raises:
        SettingError: none or several sources, or a line that cannot be read (its number is named).
        OSError: the file cannot be read.
    """
    if prompt is not None and prompt_file is not None:
        raise SettingError("give a prompt or --prompt-file, not both")
    if prompt_file is not None:
        return _read_file(prompt_file)
    if prompt is None:
        raise SettingError('no prompt; write forerun generate "Once upon a time", or - for stdin')
    return [Request(_stdin().removesuffix("\n") if prompt == "-" else prompt)]


def _stdin() -> str:
    try:
        return sys.stdin.read().removeprefix(MARK)
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin is not UTF-8 text: {error}") from error


def _read_file(path: str) -> list[Request]:
    try:
        text = _stdin() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: {error}") from error
    # Not `splitlines`: JSON strings may hold other line separators.
    lines = enumerate(text.split("\n"), start=1)
    requests = [_request(line, f"{path}, line {n}") for n, line in lines if line.strip()]
    if not requests:
        raise PromptError(f"{path} holds no prompts; write one JSON string or object per line")
    return requests


def _request(line: str, where: str) -> Request:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise SettingError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if isinstance(value, str):
        return Request(value, where=where)
    if not isinstance(value, dict):
        raise SettingError(f"{where}: expected a string or an object, got {line.strip()[:40]}")
    turns: Any = value.pop("turns", None)
    later: tuple[str, ...] = ()
    if turns is not None:
        _as_spec_bench(value, turns, where)
        later = tuple(turns[1:])
    prompt: Any = value.pop("prompt", None)
    source: Any = value.pop("source", None)
    if source is not None and prompt is not None:
        raise SettingError(f'{where}: "source" is another name of "prompt"; give one of them')
    prompt = source if prompt is None else prompt
    tokens: Any = value.pop("tokens", None)
    if (prompt is None) == (tokens is None):
        raise SettingError(
            f'{where}: give "prompt" (text), "tokens" (a list of ids) or "turns" (a list of texts)'
        )
    if prompt is not None and not isinstance(prompt, str):
        raise SettingError(f"{where}: prompt must be a string, got {prompt!r}")
    if tokens is not None and not _ids(tokens):
        raise SettingError(f"{where}: tokens must be a list of token ids, got {tokens!r}")
    name, family, meta = (value.pop(key, None) for key in ("id", "family", "meta"))
    if not (name is None or type(name) is int or (isinstance(name, str) and name)):
        raise SettingError(f"{where}: id must be text or a whole number, got {name!r}")
    # "all" is the name of all families together.
    if not (family is None or (isinstance(family, str) and family not in ("", "all"))):
        raise SettingError(f"{where}: family must be text other than 'all', got {family!r}")
    return Request(
        tokens if prompt is None else prompt,
        value,
        where,
        name,
        family,
        meta,
        later,
        source is not None,
    )


def _as_spec_bench(value: dict[str, Any], turns: Any, where: str) -> None:
    """The first of the turns as the prompt, and Spec-Bench's names of fields as ours."""
    good = isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns)
    if not good or "prompt" in value or "tokens" in value:
        raise SettingError(
            f"{where}: turns must be a list of texts, instead of a prompt; got {turns!r}"
        )
    value["prompt"] = turns[0]
    value.pop("reference", None)
    for theirs, ours in (("question_id", "id"), ("category", "family")):
        if theirs in value:
            value.setdefault(ours, value.pop(theirs))


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(t) is int for t in value)


def prepare(
    reader: Reader, requests: Sequence[Request], common: Mapping[str, Any] | None = None
) -> list[Row]:
    """Tokenise and check every request before the first one runs.

    Args:
        reader: tokenises; has the context's size.
        requests: prompts and settings.
        common: sampling fields for all; a request's own come first.

    Raises:
        PromptError, SettingError: with the place of the request.
    """
    return [_prepare(reader, i, request, common or {}) for i, request in enumerate(requests)]


def _prepare(reader: Reader, index: int, request: Request, common: Mapping[str, Any]) -> Row:
    at = f"{request.where}: " if request.where else ""
    try:
        sampling = make_sampling({**common, **request.settings})
    except UnknownNameError as error:
        raise UnknownNameError(f"{at}{error}") from error
    except SettingError as error:
        raise SettingError(f"{at}{error}") from error
    if request.later:
        raise PromptError(f"{at}several turns are for forerun bench; give one")
    if isinstance(request.prompt, str) and not is_text(request.prompt):
        raise PromptError(f"{at}the prompt is not valid Unicode text")
    if request.source and not reader.encodes:
        raise SettingError(f'{at}"source" is for models with an encoder; write "prompt"')
    ids = reader.encode(request.prompt)
    if not ids:
        raise PromptError(f"{at}the prompt is empty; give at least one token of text")
    if len(ids) >= reader.limit:
        raise PromptError(
            f"{at}the prompt has {len(ids)} tokens and the "
            + (
                f"encoder reads {reader.limit - 1}"
                if reader.encodes
                else f"context holds {reader.limit}"
            )
            + "; shorten the prompt"
        )
    text = request.prompt
    if not isinstance(text, str):
        text = str(reader.tokenizer.decode(ids)) if reader.tokenizer is not None else str(ids)
    if reader.encodes:
        text = f"{text}\n"  # what is written does not go on from it
    return Row(text, ids, sampling, index, request.id, request.family, request.meta)


def is_text(prompt: str) -> bool:
    """Whether it can be encoded (no lone surrogates)."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


_NUMBER, _INTEGER, _FLAG = "a number", "an integer", "true or false"
_KINDS = {
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "seed": _INTEGER,
    "max_new_tokens": _INTEGER,
    "min_new_tokens": _INTEGER,
    "ignore_eos": _FLAG,
}


def make_sampling(values: Mapping[str, Any]) -> Sampling:
    """`Sampling` from JSON values, with every wrong name or kind named."""
    from forerun.engine import Sampling

    names = [f.name for f in fields(Sampling)]
    settings = dict(values)
    for name, value in values.items():
        if name not in names:
            raise UnknownNameError.among("setting", name, names)
        kind = _KINDS.get(name)
        if name == "seed" and value is None:
            continue
        if (
            (kind == _NUMBER and (isinstance(value, bool) or not isinstance(value, (int, float))))
            or (kind == _INTEGER and type(value) is not int)
            or (kind == _FLAG and not isinstance(value, bool))
        ):
            raise SettingError(f"{name} must be {kind}, got {value!r}")
        if name == "stop":
            settings[name] = _strings(value)
        elif name == "eos" and value is not None and not _ids(value):
            raise SettingError(f"eos must be a list of token ids, got {value!r}")
        elif name == "logit_bias":
            settings[name] = _bias(value)
    return Sampling(**settings)


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise SettingError(f"stop must be a string or a list of strings, got {value!r}")
    return tuple(values)


def _bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in dict(value).items()}
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"logit_bias must map token ids to numbers, like {{12: -5}}, got {value!r}"
        ) from error


def parse_bias(pairs: list[str]) -> dict[int, float]:
    """`ID=VALUE` options, e.g. ``["12=-5", "7=-inf"]``."""
    bias = {}
    for pair in pairs:
        token, equals, value = pair.partition("=")
        try:
            if not equals:
                raise ValueError
            bias[int(token)] = float(value)
        except ValueError as error:
            raise SettingError(f"--logit-bias wants ID=VALUE like 12=-5, got {pair!r}") from error
    return bias
