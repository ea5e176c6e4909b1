"""Prompts of the lab's commands: a file, or the ones that ship with forerun.

`find_prompts` reports mistakes before a model is loaded, `tokenise` needs the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import PromptError, SettingError, UnknownNameError, require

if TYPE_CHECKING:
    from forerun.cli.shared.inputs import Reader, Request
    from forerun.engine import Sampling
    from forerun.model import Model

BUILTIN, ALL = "builtin", "all"
"""Names of the shipped prompts, and of all their families."""


@dataclass(frozen=True)
class PromptRequest:
    """A prompt as requested, before it is tokenised."""

    family: str
    """Its own, or the name of the file."""
    id: str
    """Its own, or its line in the file."""
    request: Request


@dataclass(frozen=True)
class Talk:
    """Conversations: how their texts become one prompt.

    Args:
        chat: whether the tokenizer's chat template is put around them, and around single prompts;
            else they stand below each other.
        skip_long: whether prompts that do not fit the context are left out.
    """

    chat: bool = False
    skip_long: bool = False

    def ids(self, reader: Reader, turns: Sequence[str]) -> list[int]:
        """Token ids of what user and assistant said in turns, up to where the assistant answers.

        Raises:
            SettingError: the tokenizer has no chat template.
        """
        if not self.chat:
            return reader.encode("\n".join(turns))
        tokenizer = reader.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise SettingError("--chat needs a chat template, and this tokenizer has none")
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class LabPrompt:
    """A prompt ready to run."""

    family: str
    id: str
    text: str
    ids: list[int]
    sampling: Sampling
    later: tuple[str, ...] = ()
    """What its user says after each answer."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to write."""
        return self.sampling.max_new_tokens

    @property
    def repetition_penalty(self) -> float:
        """1 is off."""
        return self.sampling.repetition_penalty


def is_shipped(text: str) -> bool:
    """Whether prompts that ship are meant, and no file."""
    return text.partition(":")[0] == BUILTIN


def prompt_source(text: str | None, target: str | None, option: str = "--prompts") -> str:
    """The source named, or for what ships the shipped prompts that it takes."""
    from forerun.zoo import SOURCES

    if text is None and target in SOURCES:
        return f"{BUILTIN}:{SOURCES[target]}"
    if text is None and target is not None:
        raise SettingError(
            f"no prompts; give {option} FILE with prompts of your task, or {option} {BUILTIN}:{ALL}"
        )
    return text or f"{BUILTIN}:{ALL}"


def find_prompts(
    text: str,
    split: str = "test",
    limit: int | None = None,
    cap: int | None = None,
    *,
    penalised: bool = True,
) -> list[PromptRequest]:
    """The prompts a user means by `text`.

    Args:
        text: a file as for `generate --prompt-file` (``-`` reads stdin), ``builtin:FAMILY``, or
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
    if is_shipped(text):
        return _shipped(text.partition(":")[2] or ALL, split, limit, cap, penalised)

    from forerun.cli.shared.inputs import read_requests

    stem = "stdin" if text == "-" else Path(text).stem
    requested: dict[tuple[str, str], PromptRequest] = {}
    counts: Counter[str] = Counter()
    for request in read_requests(None, text):
        family, line = request.family or stem, request.where.rpartition(", ")[2]
        name = line if request.id is None else str(request.id)
        if (family, name) in requested:
            raise PromptError(f"{request.where}: another prompt of {family} has the id {name!r}")
        counts[family] += 1
        if limit is None or counts[family] <= limit:
            requested[family, name] = PromptRequest(family, name, _capped(request, cap))
    return list(requested.values())


def seeded(requested: Sequence[PromptRequest], seed: int) -> list[PromptRequest]:
    """The same prompts; number i, from 0 on, gets the seed `seed` + i unless it has its own."""
    out = []
    for i, f in enumerate(requested):
        settings = f.request.settings
        if settings.get("seed") is None:
            settings = {**settings, "seed": seed + i}
        out.append(replace(f, request=replace(f.request, settings=settings)))
    return out


def tokenise(
    reader: Reader, requested: Sequence[PromptRequest], common: Mapping[str, Any] | None = None
) -> list[LabPrompt]:
    """Tokenise and check every prompt before the first one runs.

    Args:
        reader: tokenises; has the context's size.
        requested: the prompts.
        common: sampling fields for all; a prompt's own come first.
    """
    from forerun.cli.shared.inputs import prepare

    rows = prepare(reader, [f.request for f in requested], common)
    return [
        LabPrompt(f.family, f.id, row.text, row.ids, row.sampling)
        for f, row in zip(requested, rows, strict=True)
    ]


def first_turns(reader: Reader, requested: Sequence[PromptRequest], talk: Talk) -> list[LabPrompt]:
    """As `tokenise`, conversations by their first turn; too long ones left out if so wanted."""
    from forerun.cli.shared.inputs import is_text

    kept, rendered = [], []
    for f in requested:
        request = f.request
        if isinstance(request.prompt, str) and (request.later or talk != Talk()):
            for text in (request.prompt, *request.later):
                if not is_text(text):
                    raise PromptError(f"{request.where}: a turn is not valid Unicode text")
            request = replace(request, prompt=talk.ids(reader, [request.prompt]), later=())
        if not talk.skip_long or len(request.prompt) < reader.limit:
            kept.append(f)
            rendered.append(replace(f, request=request))
    if not kept:
        raise PromptError(f"no prompt is shorter than the context of {reader.limit} tokens")
    prompts = tokenise(reader, rendered)
    return [
        replace(p, text=f.request.prompt, later=f.request.later)
        if isinstance(f.request.prompt, str)
        else p
        for f, p in zip(kept, prompts, strict=True)
    ]


def all_turns(
    model: Model, prompts: Sequence[LabPrompt], talk: Talk, batch_size: int = 16
) -> list[LabPrompt]:
    """The prompts, and behind each those of its later turns, `ID.2` and so on.

    The answers in between are those of plain, greedy decoding, so that all methods get the same
    prompts. A conversation ends where it outgrows the context.
    """
    from forerun.cli.shared.inputs import Reader

    reader, out = Reader.of(model), [[p] for p in prompts]
    texts = [[p.text] for p in prompts]
    for turn in range(2, 2 + max((len(p.later) for p in prompts), default=0)):
        going = [i for i, p in enumerate(prompts) if len(p.later) >= turn - 1 == len(out[i])]
        answers = model.generate(
            [out[i][-1].ids for i in going], plain=True, batch_size=batch_size,
            sampling=[replace(out[i][-1].sampling, seed=None, temperature=0.0) for i in going],
        )  # fmt: skip
        for i, answer in zip(going, answers, strict=True):
            texts[i] += [answer.text, prompts[i].later[turn - 2]]
            ids = talk.ids(reader, texts[i])
            if len(ids) < reader.limit:
                last = replace(prompts[i], id=f"{prompts[i].id}.{turn}", text=texts[i][-1], ids=ids)
                out[i].append(last)
    return [replace(p, later=()) for turns in out for p in turns]


def _shipped(
    family: str, split: str, limit: int | None, cap: int | None, penalised: bool
) -> list[PromptRequest]:
    from forerun.cli.shared.inputs import Request
    from forerun.zoo import PENALTY, SOURCES, families, prompts, sources

    known = (ALL, *families(), *SOURCES.values())
    if family not in known:
        raise UnknownNameError.among("family of shipped prompts", family, known)
    every = families() if family == ALL else (family,)
    encoded = family in SOURCES.values()
    if encoded:
        chosen = [sources(split, limit, family)]
    else:
        chosen = [prompts(name, split, limit) for name in every]
    mixed = [p for p in chain(*zip_longest(*chosen)) if p is not None]
    if not mixed:
        raise PromptError("the shipped prompts are not in this copy; give a file")
    requested = []
    for p in mixed:
        settings = {"max_new_tokens": min(cap or p.max_new_tokens, p.max_new_tokens)}
        penalty = {"repetition_penalty": PENALTY[p.family]} if p.family in PENALTY else {}
        own = {**settings, **(penalty if penalised else {})}
        requested.append(
            PromptRequest(p.family, p.id, Request(p.prompt, own, p.id, source=encoded))
        )
    return requested


def _capped(request: Request, cap: int | None) -> Request:
    own = request.settings.get("max_new_tokens", cap)
    if cap is None or type(own) is not int:  # a wrong kind is reported where all settings are read
        return request
    capped = {"max_new_tokens": min(own, cap)}
    least = request.settings.get("min_new_tokens")
    if type(least) is int:
        capped["min_new_tokens"] = min(least, cap)
    return replace(request, settings={**request.settings, **capped})
