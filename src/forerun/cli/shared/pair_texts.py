"""Pairs of texts that draft decoders learn from."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.shared.exit_texts import saved_lines
from forerun.errors import PromptError, SettingError
from forerun.runtime.fingerprints import fingerprint
from forerun.training.drafts import Text

if TYPE_CHECKING:
    from forerun import Model

GROUP = 512
"""Texts that the target writes before they are kept."""
BATCH = 64
"""Of these, side by side."""


def read_pairs(path: Path, model: Model) -> list[Text]:
    """Pairs of texts: lines SOURCE TAB TARGET, or JSON objects with "source" and "target".

    Pairs that do not fit the model are left out.

    Raises:
        PromptError: a line is neither, or nothing is left.
    """
    if model.tokenizer is None:
        raise SettingError("training reads text, and this model has no tokenizer")
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        source, target = _pair(line, f"{path}, line {number}")
        prompt, ids = model.context(model.encode(source))
        output = model.tokenizer(text_target=target, add_special_tokens=False)["input_ids"]
        output = [*output, *sorted(model.eos)[:1]]
        if ids and len(ids) <= (model.target.facts.source_limit or 0) and output:
            texts.append(Text(ids, prompt, output[: model.target.limit - len(prompt)]))
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
    model: Model, texts: Sequence[Text], most: int, path: Path, tell: Callable[[int], None]
) -> list[Text]:
    """The texts with the target's own greedy output of at most `most` tokens instead of theirs.

    They are kept at `path`: an interrupted run goes on there, and the same texts are not written
    twice. `tell` is called with how many there are.
    """
    sources = [text.source for text in texts]
    known = zlib.crc32(json.dumps([sources, most]).encode())
    outputs = saved_lines(path, f"{fingerprint(model.target.executor.module())} {known}", GROUP)
    while len(outputs) < len(texts):
        tell(len(outputs))
        # Their source as it was given, without what the model opens it with.
        group = [ids[len(model.opening.source) :] for ids in sources[len(outputs) :][:GROUP]]
        done = model.generate(group, plain=True, batch_size=BATCH, max_new_tokens=most)
        fresh = [completion.tokens for completion in done]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(ids) + "\n" for ids in fresh))
        outputs.extend(fresh)
    pairs = zip(texts, outputs, strict=True)
    return [Text(text.source, text.opening, ids) for text, ids in pairs if ids]
