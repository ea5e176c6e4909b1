"""`memory`: continue as this text or earlier ones most often did; no model."""

import hashlib
import json
import re
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from filelock import FileLock

from forerun.cache import cache_folder
from forerun.checks import Count, Named, Share
from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.ngrams import ORDER, NGrams
from forerun.drafters.suffix import SuffixDrafter
from forerun.errors import ModelError
from forerun.runtime.base import Rows

TABLES = Path(__file__).parent / "tables"  # tables that ship
MOST_GROWN = 1 << 17  # most entries of a table that grows: 1 MiB
SAVED_EVERY = 4096  # tokens learned between two writes of its file


class GrowingTable:
    """N-grams of what a target writes from now on, in a file that several processes share.

    A write adds what was learned since the last one to whatever the file holds by then, so that
    processes add up. A file that cannot be read or written costs only speed.

    Args:
        path: the file; its folder is made when something is written.
        tokenizer: fingerprint of the tokenizer.
        vocab_size: of the target.
        most: entries that stay, ≥ 1; the rarest and oldest go.
    """

    def __init__(self, path: Path, tokenizer: str, vocab_size: int, most: int = MOST_GROWN) -> None:
        self._path, self._about, self._most = path, (tokenizer, vocab_size), most
        self._new: list[tuple[list[int], int]] = []
        self.table = self._read()

    def learn(self, text: Sequence[int], prompt: int) -> None:
        """Count the tokens of a text behind its prompt; now and then, write the file."""
        self.table.learn(text, prompt)
        before = min(prompt, ORDER)
        self._new.append(([*text[prompt - before :]], before))
        if sum(len(tokens) - before for tokens, before in self._new) >= SAVED_EVERY:
            self.save()

    def save(self) -> None:
        """Write what was learned last, if anything was."""
        if not self._new:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._path.with_suffix(".lock")):
                table = self._read()
                for text, before in self._new:
                    table.learn(text, before)
                table.trim(self._most)
                table.save(self._path, self._about[0])
            self.table.entries = table.entries
        self.table.trim(self._most)  # also where nothing can be written
        self._new.clear()

    def _read(self) -> NGrams:
        with suppress(ModelError):
            return NGrams.load(self._path, *self._about)
        return NGrams()


def fingerprint(tokenizer: Any) -> str:
    """A name for what a tokenizer's ids mean."""
    with suppress(TypeError):  # one without a length or weak references
        size, name = _FINGERPRINTS.get(tokenizer, (0, ""))
        if size == len(tokenizer):
            return name
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    name = hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
    with suppress(TypeError):
        _FINGERPRINTS[tokenizer] = len(tokenizer), name
    return name


_FINGERPRINTS: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()
"""By tokenizer: how many tokens it had, and the name; a vocabulary takes 0.15 s."""


def grown_file(name: str, tokenizer: str) -> Path:
    """Where the table of a target of this name and tokenizer grows."""
    stem = re.sub(r"[^\w.-]+", "-", Path(name).name)
    return cache_folder("memory") / f"{stem}-{tokenizer}.safetensors"


@dataclass(frozen=True)
class MemoryDraft(DrafterSpec):
    """Continue as this text, or what the target wrote for other prompts, most often did. No model.

    Args:
        table: a file of `forerun build-memory`; None is the one that ships for the target's
            tokenizer, if there is one.
        grow: whether what the target writes is learned and kept for later requests, also of other
            processes.
        n: most tokens of a match in this text that count, ≥ 1 (ours).
        least: a draft ends before the probability that all of it is kept falls below this, in
            [0, 1] (ours).

    Reference: ours. Pruning of tables: Stolcke 1998, Entropy-based Pruning of Backoff Language
    Models.
    """

    table: Annotated[str, Named("a file of forerun build-memory, or none")] | None = None
    grow: bool = False
    n: Count = 16
    least: Share = 0.05

    def remembering(self) -> DrafterSpec:
        return replace(self, grow=True)

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        known = hasattr(target_tokenizer, "get_vocab")
        tokenizer = fingerprint(target_tokenizer) if known else None
        paths = TABLES.glob(f"{tokenizer}.*") if self.table is None else [Path(self.table)]
        tables = [NGrams.load(path, tokenizer, target.vocab_size) for path in paths]
        if not self.grow or tokenizer is None:
            return SuffixDrafter(self.n, self.least, tables)
        path = grown_file(target.facts.name, tokenizer)
        growing = GrowingTable(path, tokenizer, target.vocab_size)
        drafter = SuffixDrafter(self.n, self.least, [*tables, growing.table], growing.learn)
        weakref.finalize(drafter, growing.save)  # also when the process ends
        return drafter
