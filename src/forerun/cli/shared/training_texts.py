"""Training texts of drafts: given ones, and the target's own; pairs for those on an encoder."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.shared.written import Archive, read_written, written
from forerun.errors import PromptError, SettingError
from forerun.prompts import Prompt, find_prompts, is_shipped, json_lines, read_text
from forerun.requests import Sampling
from forerun.runtime.drafts import fingerprint
from forerun.training.fit import Document
from forerun.training.grafts import TextPair

if TYPE_CHECKING:
    from forerun import Model
    from forerun.cli.shared.models import Job

WINDOW = 512  # most tokens of a stretch of text


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
    data: str, job: Job, folder: Path, *, tokens: int, seed: int, tell: Callable[[int], None]
) -> list[Document]:
    """Documents with about `tokens` positions, or as many as there are: at least two."""
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
        lines = written(job, rows, Archive(folder / "texts.jsonl.gz", how))
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
    job: Job, texts: Sequence[TextPair], most: int, path: Path, tell: Callable[[int], None]
) -> list[TextPair]:
    """The texts with the target's own greedy output of at most `most` tokens instead of theirs.
    They are kept at `path`: an interrupted run goes on there, and the same texts are not written
    twice. `tell` is called with how many there are."""
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
    for text, line in zip(texts, written(job, rows, Archive(path, how)), strict=True):
        tell(len(pairs))
        pairs.append(TextPair(text.source, text.opening, line["ids"][line["n"] :]))
    return [pair for pair in pairs if pair.output]
