"""Texts that a target wrote, in a file: a line of JSON each, in gzip members appended whole."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import GenerationError, SettingError
from forerun.training.fit import Document

if TYPE_CHECKING:
    from forerun.cli.shared.models import Job
    from forerun.engine import Completion
    from forerun.prompts import Prompt

SCHEMA = "forerun_texts"  # key of the first line, which says how the others were written
GROUP = 64  # texts that are added to the file together
SECONDS = 30.0  # after which as many are added as there are


def read_written(path: str | Path) -> Iterator[Document]:
    """The texts of a file of `forerun write`, or of lines with `prompt_ids` and `answer_ids`;
    `SettingError` names a line that is none of these."""
    opened = gzip.open if str(path).endswith(".gz") else open
    try:
        with opened(path, "rb") as file:  # what is no text fails in its line
            for number, line in enumerate(file, 1):
                if (text := _text(line, f"{path}, line {number}")) is not None:
                    yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SettingError(f"{path} is damaged: {error}") from error


def _text(line: bytes, where: str) -> Document | None:
    """The text of a line; None of the one that says how others were written."""
    try:
        text = json.loads(line)
        if SCHEMA in text:
            return None
        if "ids" in text:
            ids, given = text["ids"], text["n"]
        else:
            ids, given = text["prompt_ids"] + text["answer_ids"], len(text["prompt_ids"])
        if not all(type(token) is int and token >= 0 for token in (*ids, given)):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f'{where}: no text that a target wrote; it needs "ids" and "n", or "prompt_ids" and '
            '"answer_ids"'
        ) from error
    return Document(ids, max(given - 1, 0), str(text.get("kind") or ""))


class Archive:
    """A file of lines that grows; what an interrupted write left unfinished is cut off. One whose
    lines were written otherwise than `how` says is refused (`SettingError`)."""

    def __init__(self, path: Path, how: dict[str, Any]) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []  # what is there
        self._read(path)
        if not self.lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.append([{SCHEMA: 1, **how}])
        before = self.lines.pop(0)
        if differing := sorted(key for key in how if before.get(key) != how[key]):
            raise SettingError(
                f"the texts in {path} were written with another {' and '.join(differing)}; name "
                "another place, or delete them"
            )

    def _read(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        kept, magic = 0, b"\x1f\x8b"
        try:
            if data[:2] != magic[: len(data)]:
                raise ValueError
            while kept < len(data):
                member = zlib.decompressobj(wbits=31)
                text = member.decompress(data[kept:])
                if not member.eof:
                    break
                self.lines += map(dict, map(json.loads, text.splitlines()))
                kept = len(data) - len(member.unused_data)
        except (zlib.error, ValueError, TypeError) as error:
            raise SettingError(f"{path} is no file of forerun write; name another") from error
        if kept < len(data):
            with path.open("r+b") as file:
                file.truncate(kept)

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add lines, all or none."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with self._path.open("ab") as file:
            file.write(gzip.compress(text.encode()))
        self.lines += lines


def written(
    job: Job, prompts: Sequence[Prompt], kept: Archive, top: int | None = None
) -> Iterator[dict[str, Any]]:
    """The line of every prompt, each with a family and an id of its own, and of what the target
    writes on it, with the `top` likeliest tokens at each place: first those that are kept, then, in
    the order of the prompts, the others, which are added. `GenerationError` if a text fails.
    """
    known = {line.get("id"): line for line in kept.lines}
    names = {f"{prompt.family}/{prompt.id}": prompt for prompt in prompts}
    yield from (known[name] for name in names if name in known)
    left = [(name, prompt) for name, prompt in names.items() if name not in known]
    stream = job.model.stream(
        [prompt.ids for _, prompt in left], sampling=[prompt.sampling for _, prompt in left],
        batch_size=job.batch_size, plain=True, logprobs=top, first_token_soon=False,
    ) if left else ()  # fmt: skip
    done: dict[int, Completion] = {}
    group: list[dict[str, Any]] = []
    at, added = 0, time.monotonic()  # texts that are in the file or the group
    for event in stream:
        if event.completion is not None:
            if event.completion.error is not None:
                raise GenerationError(event.completion.error, event.completion)
            done[event.request] = event.completion
        while at in done:
            group.append(_line(*left[at], done.pop(at)))
            at += 1
            late = time.monotonic() - added >= SECONDS
            if late or len(group) == GROUP or at == len(left):
                kept.append(group)
                yield from group
                group, added = [], time.monotonic()


def _line(name: str, prompt: Prompt, completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": name, "kind": prompt.family, "n": len(prompt.ids),
        "ids": [*prompt.ids, *completion.tokens], "answer": completion.text,
    }  # fmt: skip
    if completion.logprobs:
        line["top"] = [[token for token, _ in place.top] for place in completion.logprobs]
        line["logprobs"] = [[round(p, 3) for _, p in place.top] for place in completion.logprobs]
    return line
