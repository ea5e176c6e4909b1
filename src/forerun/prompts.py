"""Prompts: what counts as one, and the one reader of them for every door."""

from __future__ import annotations

import json
import reprlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from forerun import chat
from forerun.checks import encodable
from forerun.errors import PromptError, SettingError, UnknownNameError, require
from forerun.requests import Sampling, check_length

BUILTIN, ALL = "builtin", "all"  # names of the shipped prompts, and of all their families
CONTENTS = "prompt", "source", "tokens", "messages", "turns"  # keys of what a line goes on from
WANTED = "text, token ids (a list or a 1-D array of integers), messages, or a list of such"

Message = dict[str, Any]  # of a conversation: a role and a content
Content = str | list[int] | list[Message]
"""Text, token ids, or a conversation, which a chat template is put around."""


@dataclass(frozen=True)
class Prompt:
    """Something to go on from: as it was read, and ready to run after `Reader.prepare`."""

    content: Content  # of a conversation whose answers are not known yet its first turn
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of `Sampling` of its own
    id: str | int | None = None  # its name; `id`, `family` and `meta` come back in the output
    family: str | None = None  # the kind of prompt: figures are reported per family
    meta: Any = None  # anything its owner wants to find beside the output
    where: str = ""  # its place in the file, for error messages
    later: tuple[str, ...] = ()  # what its user says after each answer
    source: bool = False  # whether it was called a source, which needs a model with an encoder
    index: int = 0  # its place among the prompts, from 0
    text: str = ""  # as it is shown
    chat: bool = False  # whether a chat template is around it
    ids: list[int] = field(default_factory=list)  # its tokens, after `Reader.prepare`, and
    sampling: Sampling = field(default_factory=Sampling)  # how its text is sampled

    def to_json(self) -> dict[str, Any]:
        """Fields that identify its completion."""
        return {name: getattr(self, name) for name in ("index", "id", "family", "meta")}


@contextmanager
def at(where: str) -> Iterator[None]:
    """Errors of prompts and settings begin with the place of a prompt in a file, if it has one."""
    try:
        yield
    except (PromptError, SettingError) as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from error


def split(prompts: Any) -> tuple[list[Content], bool]:
    """The contents that were meant, and whether it is one on its own.

    Raises:
        PromptError: neither text nor token ids nor a list of these; says what was given.

    >>> split("Once"), split([3, 4]), split(["Once", [3, 4]])
    ((['Once'], True), ([[3, 4]], True), (['Once', [3, 4]], False))
    """
    if isinstance(prompts, (str, Mapping)) or _is_array(prompts) or _is_conversation(prompts):
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


def read(prompt: Any, name: str = "a prompt") -> Content:
    """One content: text that can be encoded, a list of plain integers, or messages.

    What a tokenizer gives for one text (its ``input_ids``) is a list of integers, too.
    `PromptError` if it is none of these; says what was given."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = _only(prompt["input_ids"], name)
    if isinstance(prompt, str):
        return encodable(prompt, name)
    if _is_conversation(prompt):
        return list(chat.conversation(prompt))
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
        raise PromptError(f"{name} must be text, token ids or messages; got {_shown(prompt)}")
    for place, item in enumerate(items):
        if not _is_id(item):
            raise PromptError(
                f"token ids must be integers; {name} has {_shown(item)} at place {place}"
            )
    return [int(item) for item in items]


def encode(tokenizer: Any, content: Content) -> list[int]:
    """Token ids of a content; ids pass through."""
    if not isinstance(content, str) and not _is_conversation(content):
        return list(content)  # type: ignore[arg-type]
    if tokenizer is None:
        raise SettingError("this model has no tokenizer; give token ids instead of text")
    if isinstance(content, str):
        return chat.encode(tokenizer, content)
    return chat.render(tokenizer, content)  # type: ignore[arg-type]


def answering(tokenizer: Any, how: Sampling) -> Sampling:
    """Sampling of an answer: it ends where, by the chat template, another turn begins."""
    ends = [end for end in chat.turns(tokenizer).ends if end != tokenizer.eos_token]
    return replace(how, stop=(*how.stop, *ends))


def _is_conversation(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _only(ids: Any, name: str) -> Any:
    """The token ids of the one text that a tokenizer was given."""
    rows = ids if _is_list(ids) or getattr(ids, "ndim", 1) == 2 else [ids]
    if _is_list(rows) and (not len(rows) or _is_id(rows[0])):
        return rows
    if len(rows) != 1:
        raise PromptError(f"{name} holds {len(rows)} texts; give a list of their input_ids")
    return rows[0]


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


@dataclass(frozen=True)
class Reader:
    """Makes prompts ready to run: tokenises and checks them, before the first one runs."""

    tokenizer: Any
    limit: int  # tokens of the context, of which a prompt leaves at least one
    encodes: bool = False  # whether prompts are sources, for an encoder
    wrap: bool = False  # whether texts are what a user says in a chat; messages are, ids never
    system: str | None = None  # what the system says before

    @classmethod
    def of(cls, model: Any, wrap: bool | None = False, system: str | None = None) -> Reader:
        """For a loaded model; where `wrap` is None, its template says (`chat.is_instruct`)."""
        if wrap is None:
            wrap = chat.is_instruct(model.tokenizer, model.eos)
        encodes = model.target.facts.source_limit is not None
        return cls(model.tokenizer, model.prompt_limit + 1, encodes, wrap, system)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        common: Mapping[str, Any] | None = None,
        *,
        turns: bool = False,
        skip_long: bool = False,
    ) -> list[Prompt]:
        """Tokens and sampling of every prompt.

        Args:
            prompts: as they were read.
            common: sampling fields for all; a prompt's own come first.
            turns: take conversations, by their first turn; else they are refused.
            skip_long: leave out what does not fit the context.

        Raises:
            PromptError, SettingError: with the place of the prompt.
        """
        ready = []
        for index, prompt in enumerate(prompts):
            with at(prompt.where):
                if prompt.later and not turns:
                    raise PromptError("several turns are for forerun bench; give one")
                ids = self.encode([prompt.content])
                if not skip_long or len(ids) < self.limit:
                    ready.append(self._ready(prompt, index, ids, common or {}))
        if prompts and not ready:
            raise PromptError(f"no prompt is shorter than the context of {self.limit} tokens")
        return ready

    def _ready(
        self, prompt: Prompt, index: int, ids: list[int], common: Mapping[str, Any]
    ) -> Prompt:
        sampling = Sampling.of({**common, **prompt.settings})
        for turn in prompt.later:
            read(turn, "a turn")
        if prompt.source and not self.encodes:
            raise SettingError('"source" is for models with an encoder; write "prompt"')
        reads = "encoder reads" if self.encodes else "context holds"
        reason = f"{reads} {self.limit - self.encodes}"
        check_length("prompt", len(ids), self.limit - 1, reason)
        text: Any = prompt.content
        talk = self.wrap
        if not isinstance(text, str):
            talk = _is_conversation(text)
            if talk:
                text = str(text[-1]["content"])
            else:
                text = str(ids) if self.tokenizer is None else str(self.tokenizer.decode(ids))
        if self.encodes or talk:
            text = f"{text}\n"  # what is written does not go on from it
        if talk:
            sampling = answering(self.tokenizer, sampling)
        return replace(prompt, index=index, text=text, ids=ids, sampling=sampling, chat=talk)

    def encode(self, turns: Sequence[Content]) -> list[int]:
        """Token ids of what user and assistant said in turns, up to where the assistant answers.

        Without `wrap` the turns stand below each other. Token ids and messages are one turn.
        `SettingError` if the tokenizer has no chat template."""
        texts = [read(turn, "the prompt") for turn in turns]
        first = texts[0]
        if not isinstance(first, str):
            return encode(self.tokenizer, self._opened(first))
        if not self.wrap:
            return encode(self.tokenizer, "\n".join(map(str, texts)))
        if not chat.has_template(self.tokenizer):
            raise SettingError("`chat` needs a chat template, and this tokenizer has none")
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return encode(self.tokenizer, self._opened(messages))

    def _opened(self, content: Any) -> Any:
        """A conversation that begins with what the system says, unless it says something itself."""
        if self.system is None or not _is_conversation(content) or content[0]["role"] == "system":
            return content
        return [{"role": "system", "content": self.system}, *content]


def unroll(
    model: Any, reader: Reader, prompts: Sequence[Prompt], batch_size: int = 16
) -> list[Prompt]:
    """The prompts, and behind each those of its later turns, `ID.2` and so on. The answers in
    between are those of plain, greedy decoding, so that all methods get the same prompts. A
    conversation ends where it outgrows the context."""
    out = [[p] for p in prompts]
    spoken = [[p.content] for p in prompts]
    for turn in range(2, 2 + max((len(p.later) for p in prompts), default=0)):
        going = [i for i, p in enumerate(prompts) if len(p.later) >= turn - 1 == len(out[i])]
        answers = model.generate(
            [out[i][-1].ids for i in going], plain=True, batch_size=batch_size,
            sampling=[replace(out[i][-1].sampling, seed=None, temperature=0.0) for i in going],
        )  # fmt: skip
        for i, answer in zip(going, answers, strict=True):
            spoken[i] += [answer.text, prompts[i].later[turn - 2]]
            ids = reader.encode(spoken[i])
            if len(ids) < reader.limit:
                name, text = f"{prompts[i].id}.{turn}", prompts[i].later[turn - 2]
                out[i].append(replace(prompts[i], id=name, text=text, ids=ids))
    return [replace(p, later=()) for turns in out for p in turns]


def is_shipped(source: str) -> bool:
    """Whether prompts that ship are meant, and no file."""
    return source.partition(":")[0] == BUILTIN


def default_source(source: str | None, target: str | None, name: str = "prompts") -> str:
    """The source given, or for a target that ships the shipped prompts that it takes;
    `SettingError` asks for the argument `name` without a source, and for a target of one's own."""
    from forerun.zoo import SOURCES

    if source is None and target in SOURCES:
        return f"{BUILTIN}:{SOURCES[target]}"
    if source is None and target is not None:
        raise SettingError(
            f"no prompts; give `{name}` FILE with prompts of your task, or `{name}` {BUILTIN}:{ALL}"
        )
    return source or f"{BUILTIN}:{ALL}"


def find_prompts(
    source: str,
    split: str = "test",
    limit: int | None = None,
    cap: int | None = None,
    *,
    penalised: bool = True,
) -> list[Prompt]:
    """The prompts a user means by `source`, with family and id; nothing is tokenised.

    Args:
        source: a file as for `read_file` (``-`` reads stdin), ``builtin:FAMILY``, or
            ``builtin:all`` or ``builtin``. Of all families the prompts come in turns.
            ``builtin:sources`` is English sentences and ``builtin:digest`` passages, for models
            with an encoder.
        split: of the shipped prompts, ``"val"`` or ``"test"``.
        limit: only the first so many of each family; None takes all.
        cap: most new tokens of a prompt that asks for more or for no number. None takes the
            prompt's own, or 128.
        penalised: whether shipped prompts bring their repetition penalty, `zoo.PENALTY`.

    Raises:
        PromptError, SettingError: with the place of the prompt.
        OSError: the file cannot be read.
    """
    require(limit is None or limit >= 1, "limit", limit, "≥ 1")
    require(cap is None or cap >= 1, "max_new_tokens", cap, "≥ 1")
    require(split in ("val", "test"), "split", split, "val or test")
    if is_shipped(source):
        chosen = _shipped(source.partition(":")[2] or ALL, split, limit, penalised)
        return [_capped(p, cap) for p in chosen]
    stem = "stdin" if source == "-" else Path(source).stem
    kept: dict[tuple[str, str], Prompt] = {}
    counts: Counter[str] = Counter()
    for prompt in read_file(source):
        family, line = prompt.family or stem, prompt.where.rpartition(", ")[2]
        name = line if prompt.id is None else str(prompt.id)
        if (family, name) in kept:
            raise PromptError(f"{prompt.where}: another prompt of {family} has the id {name!r}")
        counts[family] += 1
        if limit is None or counts[family] <= limit:
            kept[family, name] = _capped(replace(prompt, family=family, id=name), cap)
    return list(kept.values())


def seeded(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The same prompts; number i, from 0 on, gets the seed `seed` + i unless it has its own."""
    return [
        p if p.settings.get("seed") is not None
        else replace(p, settings={**p.settings, "seed": seed + i})
        for i, p in enumerate(prompts)
    ]  # fmt: skip


def _shipped(family: str, split: str, limit: int | None, penalised: bool) -> list[Prompt]:
    from forerun.zoo import PENALTY, SOURCES, families, prompts, sources

    known = (ALL, *families(), *SOURCES.values())
    if family not in known:
        raise UnknownNameError.among("family of shipped prompts", family, known)
    encoded = family in SOURCES.values()
    if encoded:
        chosen = [sources(split, limit, family)]
    else:
        chosen = [prompts(n, split, limit) for n in (families() if family == ALL else (family,))]
    mixed = [p for p in chain(*zip_longest(*chosen)) if p is not None]
    if not mixed:
        raise PromptError("the shipped prompts are not in this copy; give a file")
    out = []
    for p in mixed:
        settings: dict[str, Any] = {"max_new_tokens": p.max_new_tokens}
        if penalised and p.family in PENALTY:
            settings["repetition_penalty"] = PENALTY[p.family]
        out.append(Prompt(p.prompt, settings, p.id, p.family, where=p.id, source=encoded))
    return out


def _capped(prompt: Prompt, cap: int | None) -> Prompt:
    own = prompt.settings.get("max_new_tokens", cap)
    if cap is None or type(own) is not int:  # a wrong kind is reported where all settings are read
        return prompt
    capped = {"max_new_tokens": min(own, cap)}
    least = prompt.settings.get("min_new_tokens")
    if type(least) is int:
        capped["min_new_tokens"] = min(least, cap)
    return replace(prompt, settings={**prompt.settings, **capped})


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file, without the mark that editors put before it; ``-`` reads stdin."""
    try:
        if path == "-":
            return sys.stdin.read().removeprefix("\ufeff")
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{_called(path)} is not UTF-8 text: {error}") from error


def _called(path: str | Path) -> str:
    return "stdin" if path == "-" else str(path)


def json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The values of a file, a line of JSON each, with their places for error messages."""
    # Not `splitlines`: JSON strings may hold other line separators.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{_called(path)}, line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                wrong = f"not JSON ({error.msg} at column {error.colno})"
                raise SettingError(f"{where}: {wrong}") from error
            except RecursionError as error:
                raise SettingError(
                    f"{where}: lists or objects too deep within each other"
                ) from error


def read_file(path: str) -> list[Prompt]:
    """The prompts of a file, a JSON string or object per line; ``-`` reads stdin.

    Raises:
        PromptError: there are none, or the file is no text.
        SettingError: a line that cannot be read; its number is named.
        OSError: the file cannot be read.
    """
    prompts = [_line(value, where) for where, value in json_lines(path)]
    if not prompts:
        raise PromptError(
            f"{_called(path)} holds no prompts; write one JSON string or object per line"
        )
    return prompts


def _line(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        return Prompt(value, where=where)
    if not isinstance(value, dict):
        raise SettingError(f"{where}: expected a string or an object, got {str(value)[:40]}")
    with at(where):
        return replace(_prompt(value), where=where)


def _prompt(value: dict[str, Any]) -> Prompt:
    """The prompt that an object holds; its other keys are settings."""
    given = {key: part for key in CONTENTS if (part := value.pop(key, None)) is not None}
    if len(given) != 1:
        raise SettingError(
            'give "prompt" (or "source": text), "tokens" (a list of ids), "messages" (a '
            f'conversation) or "turns" (a list of texts), one of them; got {[*given] or "none"}'
        )
    ((key, content),) = given.items()
    later: Sequence[str] = ()
    if key == "turns":
        good = isinstance(content, list) and all(isinstance(t, str) and t for t in content)
        require(good and bool(content), key, content, "a list of texts")
        content, *later = content
        value.pop("reference", None)  # the names of Spec-Bench
        for theirs, ours in (("question_id", "id"), ("category", "family")):
            if theirs in value:
                value.setdefault(ours, value.pop(theirs))
    elif key == "messages":
        content = list(chat.conversation(content))
    elif key == "tokens":
        good = isinstance(content, list) and all(type(t) is int for t in content)
        require(good, key, content, "a list of token ids")
    else:
        require(isinstance(content, str), key, content, "a string")
    name, family, meta = (value.pop(part, None) for part in ("id", "family", "meta"))
    good = name is None or type(name) is int or (isinstance(name, str) and bool(name))
    require(good, "id", name, "text or a whole number")
    # "all" is the name of all families together.
    good = family is None or (isinstance(family, str) and family not in ("", ALL))
    require(good, "family", family, f"text other than {ALL!r}")
    source = key == "source"
    return Prompt(content, value, name, family, meta, later=tuple(later), source=source)
