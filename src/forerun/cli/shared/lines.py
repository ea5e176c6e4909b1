"""`generate --jsonl`: a line per completion, as soon as it is complete."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from forerun.cli.shared.console import note, stderr
from forerun.cli.shared.play import note_interrupted
from forerun.cli.shared.report import SCHEMA, finite
from forerun.cli.shared.run import Job, play_through
from forerun.cli.shared.show import RoundView, Tally, progress, show_lossy, show_summary
from forerun.errors import SettingError

if TYPE_CHECKING:
    from forerun.cli.shared.inputs import Row
    from forerun.engine import Completion, Event


HEAD = b'{"schema": 1, "index": '
"""The beginning of every line."""


def play_lines(job: Job, rows: Sequence[Row], output: str | None, rounds: bool = False) -> None:
    """Run every request and write its completion as a line of JSON.

    Args:
        job: models and policies.
        rows: the requests.
        output: a file; prompts whose completions it holds are left out. None is stdout.
        rounds: also print a line per round on stderr.

    Raises:
        SettingError: the file holds something else, or completions of other requests.
    """
    keys = [_key(job, row) for row in rows]
    completed = set() if output is None else _completed(Path(output), keys)
    todo = [row for row in rows if row.index not in completed]
    if completed:
        note(stderr(), f"{output} holds {len(completed):,} of {len(rows):,} prompts; going on")
    tally, lines = Tally(), RoundView(job.model.tokenizer) if rounds else None
    try:
        with progress(len(rows), len(completed)) as bar, _open(output) as file:

            def on_event(index: int, event: Event) -> None:
                row = todo[index]
                if lines is not None:
                    lines.add(event, row.index)
                if event.completion is not None:
                    print(_line(row, keys[row.index], event.completion), file=file, flush=True)
                    tally.add(event.completion)
                    bar.advance(event.completion.stats.tokens_per_second)

            took = play_through(job, todo, on_event) if todo else 0.0
    except KeyboardInterrupt:
        hint = "" if output is None else "; the same command goes on from here"
        note_interrupted(len(completed) + tally.prompts, len(rows), hint)
        raise
    show_summary(tally, took)
    if not job.rule.lossless:
        show_lossy(job.about.get("rule", ""))


def _open(output: str | None) -> AbstractContextManager[TextIO]:
    """The file to add to, or stdout, which stays open."""
    return nullcontext(sys.stdout) if output is None else open(output, "a", encoding="utf-8")


def _line(row: Row, key: str, completion: Completion) -> str:
    value = {"schema": SCHEMA, **row.to_json(), "key": key, **completion.to_json()}
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def _key(job: Job, row: Row) -> str:
    """A hash that identifies a request: its tokens and the settings its text depends on."""
    names = ("target", "draft", "controller", "rule", "dtype")
    settings = {name: job.about.get(name) for name in names}
    value = [row.ids, finite(asdict(row.sampling)), settings]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _completed(path: Path, keys: Sequence[str]) -> set[int]:
    """Indices of the requests whose completions a file holds; a line cut off at its end is removed.

    Raises:
        SettingError: it holds something else, or completions of other requests.
    """
    if not path.exists():
        return set()
    completed, size = set(), 0
    with path.open("r+b") as file:
        for line in file:
            if not (line.startswith(HEAD) or HEAD.startswith(line.rstrip(b"\n"))):
                raise SettingError(f"{path} holds something else; name another file")
            if not line.endswith(b"\n"):  # cut off in the middle of writing
                file.truncate(size)
                break
            size += len(line)
            completed.add(_index(path, line, keys))
    return completed


def _index(path: Path, line: bytes, keys: Sequence[str]) -> int:
    """Which of the requests with these keys a line is of."""
    try:
        value = json.loads(line)
        index, key = value["index"], value["key"]
    except (ValueError, KeyError) as error:
        raise SettingError(f"{path} is damaged: {error!r}; name another file") from error
    if not (type(index) is int and index < len(keys) and keys[index] == key):
        raise SettingError(
            f"{path} holds completions of other prompts, settings or models; name another file"
        )
    return index
