"""Texts that a target wrote: a line of JSON each, in gzip members that are appended whole."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forerun.errors import SettingError

SCHEMA = "forerun_texts"
"""Key of the first line, which says how the others were written."""


class Written(NamedTuple):
    """One text."""

    ids: list[int]
    given: int
    """How many of the first ids were its prompt."""


def read_written(path: str | Path) -> Iterator[Written]:
    """The texts of a file of `forerun write`, or of lines with `prompt_ids` and `answer_ids`.

    Raises:
        SettingError: a line that is none of these; its number is named.
        OSError: the file cannot be read.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rb") as file:  # what is no text fails in its line
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line)
                if SCHEMA not in text:
                    yield _written(text)
            except (ValueError, KeyError, TypeError) as error:
                raise SettingError(
                    f'{path}, line {number}: no text that a target wrote; it needs "ids" and "n", '
                    'or "prompt_ids" and "answer_ids"'
                ) from error


def _written(line: dict[str, Any]) -> Written:
    if "ids" in line:
        ids, given = line["ids"], line["n"]
    else:
        ids, given = line["prompt_ids"] + line["answer_ids"], len(line["prompt_ids"])
    if not all(type(token) is int and token >= 0 for token in (*ids, given)):
        raise TypeError
    return Written(ids, given)


class Archive:
    """A file of lines that grows; what an interrupted write left unfinished is cut off.

    Args:
        path: the file.
        how: how its lines are written.

    Raises:
        SettingError: there is a file that was not written so; says what differs.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, how: dict[str, Any]) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        """What is there."""
        self._read(path)
        if not self.lines:
            self.append([{SCHEMA: 1, **how}])
        before = self.lines.pop(0)
        if differing := sorted(key for key in how if before.get(key) != how[key]):
            raise SettingError(
                f"the texts in {path} were written with another {' and '.join(differing)}; name "
                "another file"
            )

    def _read(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        kept, magic = 0, b"\x1f\x8b"
        if data[:2] != magic[: len(data)]:
            raise SettingError(f"{path} is no file of forerun write; name another")
        while kept < len(data):
            member = zlib.decompressobj(wbits=31)
            text = member.decompress(data[kept:])
            if not member.eof:
                break
            self.lines += map(json.loads, text.splitlines())
            kept = len(data) - len(member.unused_data)
        if kept < len(data):
            with path.open("r+b") as file:
                file.truncate(kept)

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add lines, all or none."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with self._path.open("ab") as file:
            file.write(gzip.compress(text.encode()))
        self.lines += lines
