"""`forerun write`: texts of a target, to make drafts of.

A line of JSON each, in gzip members that are appended whole.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import progress, remark
from forerun.cli.shared.models import Chat, Job, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.report import claim
from forerun.errors import GenerationError, SettingError, require

if TYPE_CHECKING:
    from forerun.engine import Completion
    from forerun.prompts import Prompt

GROUP = 64  # texts that are added to the file together
SCHEMA = "forerun_texts"  # key of the first line, which says how the others were written


@options.command
def write(
    models: Annotated[Models, Fields(Models, without=("draft",))],
    chat: Annotated[Chat, Fields(Chat)],
    prompts: Annotated[str, options.prompts()],
    output: Annotated[str, options.output("FILE.jsonl.gz", "Where the texts go.")],
    limit: Annotated[int | None, options.limit()] = None,
    max_new_tokens: Annotated[int, option("N", "Most tokens of an answer.")] = 128,
    temperature: Annotated[float, option("T")] = 0.0,
    seed: Annotated[int, option("S", "Of the first drawn answer; the next has the next one.")] = 0,
    top: Annotated[int, option("N")] = 16,
    batch_size: Annotated[int, option("B", "Texts written together.")] = 48,
) -> None:
    """Let a target answer prompts, and keep what it wrote: the base of drafts, tables and settings.

    Every line of the file is a JSON object: "ids", the prompt's tokens and the answer's; "n", how
    many are the prompt's; "id", "kind" and "answer"; and by place of the answer "top" and
    "logprobs", the likeliest tokens there. Interrupted, the same command goes on.

    Args:
        temperature: 0 is greedy; above, answers are drawn, each with a seed of its own.
        top: keep the N likeliest tokens at each place; 0 keeps none.
    """
    require(max_new_tokens >= 1, "max-new-tokens", max_new_tokens, "≥ 1")
    require(top >= 0, "top", top, "≥ 0")
    claim(output)

    from forerun.prompts import find_prompts, seeded
    from forerun.settings import Settings

    asked = seeded(find_prompts(prompts, "val", limit, max_new_tokens, penalised=False), seed)
    how = Settings(controller="fixed(0)", draft="none")
    job, rows = models.open(
        asked, {"temperature": temperature}, how, batch_size, chat=chat, skip_long=True
    )
    about = {"target": job.about["target"], "chat": chat.key, "temperature": temperature}
    texts = Archive(Path(output), about | {"top": top, "max_new_tokens": max_new_tokens})
    done = {line["id"] for line in texts.lines}
    left = [row for row in rows if f"{row.family}/{row.id}" not in done]
    began, tokens = time.perf_counter(), 0
    with progress("texts", len(rows), "texts") as tell:
        for group in _groups(job, left, top):
            texts.append([_line(row, completion) for row, completion in group])
            tokens += sum(len(completion.tokens) for _, completion in group)
            tell("texts", len(texts.lines))
    rate = tokens / (time.perf_counter() - began)
    wrote = f"{tokens:,} tokens of {len(left)} texts, {rate:,.0f} tokens/s" if left else "nothing"
    remark(f"wrote {wrote}; {output} holds {len(texts.lines)} of {len(rows)} texts")


def _groups(
    job: Job, rows: Sequence[Prompt], top: int
) -> Iterator[list[tuple[Prompt, Completion]]]:
    """Answers as they come, `GROUP` at a time."""
    group = []
    for event in job.model.stream(
        [row.ids for row in rows], sampling=[row.sampling for row in rows],
        batch_size=job.batch_size, plain=True, logprobs=top or None, first_token_soon=False,
    ) if rows else ():  # fmt: skip
        if (completion := event.completion) is not None:
            if completion.error is not None:
                raise GenerationError(completion.error, completion)
            group.append((rows[event.request], completion))
            if len(group) == GROUP:
                yield group
                group = []
    if group:
        yield group


def _line(row: Prompt, completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {"id": f"{row.family}/{row.id}", "kind": row.family, "n": len(row.ids),
            "ids": [*row.ids, *completion.tokens], "answer": completion.text}  # fmt: skip
    if completion.logprobs:
        line["top"] = [[token for token, _ in place.top] for place in completion.logprobs]
        line["logprobs"] = [[round(p, 3) for _, p in place.top] for place in completion.logprobs]
    return line


def read_written(path: str | Path) -> Iterator[tuple[list[int], int]]:
    """The texts of a file of `forerun write`, or of lines with `prompt_ids` and `answer_ids`: ids,
    and how many of the first were the prompt; `SettingError` names a line that is none of these."""
    for number, line in enumerate(_lines(path), 1):  # what is no text fails in its line
        try:
            text = json.loads(line)
            if SCHEMA in text:
                continue
            if "ids" in text:
                ids, given = text["ids"], text["n"]
            else:
                ids, given = text["prompt_ids"] + text["answer_ids"], len(text["prompt_ids"])
            if not all(type(token) is int and token >= 0 for token in (*ids, given)):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f'{path}, line {number}: no text that a target wrote; it needs "ids" and "n", '
                'or "prompt_ids" and "answer_ids"'
            ) from error
        yield ids, given


def _lines(path: str | Path) -> Iterator[bytes]:
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rb") as file:
        try:
            yield from file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SettingError(f"{path} is damaged: {error}") from error


class Archive:
    """A file of lines that grows; what an interrupted write left unfinished is cut off. One whose
    lines were written otherwise than `how` says is refused (`SettingError`)."""

    def __init__(self, path: Path, how: dict[str, Any]) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []  # what is there
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
