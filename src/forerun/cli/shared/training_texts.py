"""Texts for training: given ones, those a target wrote, kept in a file, and pairs for drafts on an
encoder.

A file of written texts holds a line of JSON each, in gzip members appended whole.
"""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import GenerationError, PromptError, SettingError
from forerun.prompts import Prompt, find_prompts, is_shipped, json_lines, read_text
from forerun.requests import Sampling
from forerun.runtime.drafts import fingerprint
from forerun.training.fit import Document
from forerun.training.grafts import TextPair

if TYPE_CHECKING:
    from forerun import Model
    from forerun.cli.shared.models import Job
    from forerun.engine import Completion

WINDOW = 512  # most tokens of a stretch of text
SCHEMA = "forerun_texts"  # key of the first line, which says how the others were written
GROUP = 64  # texts that are added to the file together
SECONDS = 30.0  # after which as many are added as there are


def read_texts(data: str) -> list[str] | None:
    """The texts of a text file, a folder of them, or lines with "text"; None of what holds prompts
    for a target, or what it wrote."""
    path = Path(data).expanduser()
    if is_shipped(data) or path.suffix == ".gz":
        return None
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise SettingError(f"no .txt files in {data}; give a text file, a folder of them, or "
                               "a .jsonl file of prompts")  # fmt: skip
        return [read_text(file) for file in files]
    return _json_texts(path) if path.suffix.lower() in (".jsonl", ".json") else [read_text(path)]


def _json_texts(path: Path) -> list[str] | None:
    """The texts of a file whose lines are objects with "text"; None if they are prompts."""
    texts: list[str] = []
    for where, value in json_lines(path):
        if not isinstance(value, dict) or "text" not in value:
            if texts:
                raise SettingError(f'{where}: no "text"; lines before it have it')
            return None
        if not isinstance(value["text"], str):
            raise SettingError(f"{where}: text must be a string")
        texts.append(value["text"])
    return texts or None


def read_documents(
    data: str, job: Job, folder: Path, writer: Callable[[], Model], *,
    tokens: int, seed: int, tell: Callable[[int], None],
) -> list[Document]:  # fmt: skip
    """Documents with about `tokens` positions, or as many as there are: at least two. Prompts are
    answered by the `writer`."""
    path = Path(data).expanduser()
    if path.suffix == ".gz":
        documents = _checked(list(read_written(path)), job)
    elif (texts := read_texts(data)) is not None:
        documents = _cut(texts, job, seed)
    else:
        prompts = find_prompts(data if is_shipped(data) else str(path), "val", penalised=False)
        rows = job.reader.prepare([_drawn(p, i, seed) for i, p in enumerate(prompts)])
        identity = f"{fingerprint(job.model.target.executor.module())} {data}"
        how = {"target": identity, "seed": seed, "chat": job.chat.key}
        lines = written(rows, Archive(folder / "texts.jsonl.gz", how), writer)
        documents = (Document(line["ids"], line["n"] - 1, line["kind"]) for line in lines)
    chosen: list[Document] = []
    count = 0
    for document in documents:
        if document.positions:
            chosen.append(document)
            count += document.positions
            tell(count)
        if count >= tokens:
            break
    if len(chosen) < 2:
        raise SettingError(
            f"too little text: {count} positions in {len(chosen)} document(s); give more --data"
        )
    return chosen


def _drawn(prompt: Prompt, number: int, seed: int) -> Prompt:
    """A prompt that the target goes on from: half are continued greedily, half sampled. In use a
    draft only reads text that the target is writing."""
    rng = random.Random(f"{seed}/{number}")
    sampling = {"temperature": float(rng.random() < 0.5), "seed": rng.randrange(1 << 31)}
    return replace(prompt, settings={**sampling, **prompt.settings})


def _cut(texts: list[str], job: Job, seed: int) -> Iterator[Document]:
    """Stretches of the texts in random order, tokenised as they are needed."""
    total = sum(map(len, texts))
    size = max(64, min(4 * WINDOW, total // 32))
    parts = [text[at : at + size] for text in texts for at in range(0, len(text), size)]
    stretches = list(filter(str.strip, parts))
    random.Random(f"exits/{seed}").shuffle(stretches)
    most = min(WINDOW, job.model.target.limit)
    for stretch in stretches:
        yield Document(job.model.encode(stretch)[:most])


def _checked(texts: Sequence[Document], job: Job) -> Iterator[Document]:
    """What the target has written, by `forerun write`."""
    facts = job.model.target.facts
    if any(max(text.ids, default=0) >= facts.vocab_size for text in texts):
        raise SettingError(
            f"a text has token ids above the target's {facts.vocab_size}; give texts that this "
            "target wrote"
        )
    return (text._replace(ids=text.ids[: facts.limit]) for text in texts)


def read_pairs(path: Path, model: Model) -> list[TextPair]:
    """Pairs of texts: lines SOURCE TAB TARGET, or JSON objects with "source" and "target"; those
    that do not fit the model are left out. `PromptError` if a line is neither, or nothing is left.
    """
    if model.tokenizer is None:
        raise SettingError("training reads text, and this model has no tokenizer")
    texts = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        source, target = _pair(line, f"{path}, line {number}")
        prompt, ids = model.context(model.encode(source))
        output = model.tokenizer(text_target=target, add_special_tokens=False)["input_ids"]
        output = [*output, *sorted(model.eos)[:1]]
        if ids and len(ids) <= (model.target.facts.source_limit or 0) and output:
            texts.append(TextPair(ids, prompt, output[: model.target.limit - len(prompt)]))
    if len(texts) < 2:
        raise PromptError(f"{path} holds {len(texts)} usable pairs; give at least 2")
    return texts


def _pair(line: str, where: str) -> tuple[str, str]:
    if line.lstrip().startswith("{"):
        try:
            value = json.loads(line)
            pair = value["source"], value["target"]
        except (ValueError, KeyError) as error:
            raise PromptError(f'{where}: give "source" and "target" ({error})') from error
    else:
        pair = tuple(line.rstrip("\r").split("\t")[:2])  # type: ignore[assignment]
    if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
        raise PromptError(f"{where}: expected SOURCE, a tab, TARGET; got {line[:40]!r}")
    return pair


def own_texts(
    job: Job, texts: Sequence[TextPair], most: int, path: Path, writer: Callable[[], Model],
    tell: Callable[[int], None],
) -> list[TextPair]:  # fmt: skip
    """The texts with the target's own greedy output of at most `most` tokens instead of theirs, by
    the `writer`. They are kept at `path`: an interrupted run goes on there, and the same texts are
    not written twice. `tell` is called with how many there are."""
    model = job.model
    how = {
        "target": fingerprint(model.target.executor.module()),
        "sources": zlib.crc32(json.dumps([text.source for text in texts]).encode()),
        "max_new_tokens": most,
    }
    opened = len(model.opening.source)  # the model puts that before sources itself
    sampling = Sampling(max_new_tokens=most)
    rows = [
        Prompt("", id=place, family="source", ids=text.source[opened:], sampling=sampling)
        for place, text in enumerate(texts)
    ]
    pairs: list[TextPair] = []
    for text, line in zip(texts, written(rows, Archive(path, how), writer), strict=True):
        tell(len(pairs))
        pairs.append(TextPair(text.source, text.opening, line["ids"][line["n"] :]))
    return [pair for pair in pairs if pair.output]


def read_written(path: str | Path) -> Iterator[Document]:
    """The texts of a file of `forerun write`; `SettingError` names a line that is none."""
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
        ids, given = text["ids"], text["n"]
        if not all(type(token) is int and token >= 0 for token in (*ids, given)):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f'{where}: no text that a target wrote; it needs "ids" and "n"'
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
    prompts: Sequence[Prompt], kept: Archive, target: Callable[[], Model], batch_size: int = 48,
    top: int | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The line of every prompt, each with a family and an id of its own, and of what the target
    writes on it, with the `top` likeliest tokens at each place: first those that are kept, then, in
    the order of the prompts, the others, which are added, `batch_size` at a time. The target is
    asked for where any are missing. `GenerationError` if a text fails.
    """
    known = {line.get("id"): line for line in kept.lines}
    names = {f"{prompt.family}/{prompt.id}": prompt for prompt in prompts}
    yield from (known[name] for name in names if name in known)
    left = [(name, prompt) for name, prompt in names.items() if name not in known]
    stream = target().stream(
        [prompt.ids for _, prompt in left], sampling=[prompt.sampling for _, prompt in left],
        batch_size=batch_size, plain=True, logprobs=top, first_token_soon=False,
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
