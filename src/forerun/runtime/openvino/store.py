"""Exported graphs on disk, so that the next start neither loads torch weights nor exports.

An entry is a folder named after a hash of the weights, the configuration, the versions and the
form of the weights; it appears whole or not at all. What cannot be read is deleted and made again.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import openvino as ov

from forerun.cache import cache_folder
from forerun.lazy import torch
from forerun.runtime.base import Facts
from forerun.runtime.openvino.core import core
from forerun.runtime.probe import Logits

FORMAT = 10  # goes up when graphs of old versions of this package must not be used
LARGEST_BYTES = 16 << 30
"""The store's size; beyond it the entries that were not used for longest are deleted."""
_HUGE = 2 << 20  # bytes of a huge page, at a multiple of that
_USED = 7 / 8  # share of a huge page that must be in use, as all of it is taken then
_COLLAPSE = 25  # MADV_COLLAPSE, which `mmap` does not name
_GRAPH, _FACTS, _REFERENCE = "graph.xml", "facts.json", "reference.npy"


@dataclass(frozen=True)
class Stored:
    """An exported model: all that is needed to run it without its torch weights."""

    graph: ov.Model
    facts: Facts
    reference: Logits | None  # None: made from no torch model, so it is compared with itself
    memory: Any = None  # what owns the memory of the graph's weights; None: the graph does


def folder() -> Path:
    """Where entries are."""
    return cache_folder("openvino")


def key(weights: str, form: str) -> str:
    """The name of an entry, by the hash of weights and configuration (`of_model`, `of_files`) and
    the form of the weights: "f32", "int8" or "as it is"."""
    versions = [version(name) for name in ("openvino", "torch", "transformers")]
    return sha256(json.dumps([FORMAT, weights, form, *versions]).encode()).hexdigest()[:32]


def of_model(model: Any) -> str:
    """Hash of a live model: its configuration, or its modules, and every tensor."""
    digest = sha256(str(getattr(model, "config", model)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def of_files(files: Iterable[Path]) -> str:
    """Hash of files' contents, in the order of their names."""
    digest = sha256()
    for path in sorted(files, key=lambda p: p.name):
        with path.open("rb") as file:
            digest.update(path.name.encode() + file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read(name: str) -> Stored | None:
    """An entry, or None if there is none or it is damaged (it is deleted then)."""
    entry = folder() / name
    if not entry.is_dir():
        return None
    try:
        facts = json.loads((entry / _FACTS).read_text())
        for file, size in facts.pop("sizes").items():
            if (entry / file).stat().st_size != size:
                raise ValueError(f"{file} is cut short")
        if facts["eos"] is not None:
            facts["eos"] = frozenset(facts["eos"])
        facts["start"] = tuple(facts["start"])
        there = (entry / _REFERENCE).is_file()
        reference = np.load(entry / _REFERENCE) if there else None
        stored = Stored(core().read_model(entry / _GRAPH), Facts(**facts), reference)
        os.utime(entry)
        return stored
    except Exception:  # whatever is wrong with it, it can be made again
        discard(name)
        return None


def let_go(name: str | None) -> None:
    """Give back the memory of an entry's weights, if one is named, and what loading has left in the
    heap; what is still read comes from the file again.

    The plug-in packs weights when they are first multiplied, and keeps the file mapped.
    """
    weights = str((folder() / str(name) / _GRAPH).with_suffix(".bin"))
    with suppress(OSError, AttributeError):  # other systems have no such file, or no such call
        for first, last, about in _mappings():
            if about[-1] == weights:
                _system("madvise", first, last - first, mmap.MADV_DONTNEED)
    with suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def join_pages(rests: float = 2.0) -> None:
    """Put memory of this process into huge pages where it about fills them.

    A processor looks fewer places up then, and prefetches beyond 4 KB: two threads of a Zen 4 read
    28 GB/s for 20. Nothing happens on systems that cannot, such as Linux before 6.1. One page after
    another with rests between, so many times as long, as nobody gets memory meanwhile: passes
    waited for a second once.
    """
    with suppress(OSError, AttributeError):
        for first, last, (rights, _, _, inode, *_) in _mappings():
            first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
            if rights != "rw-p" or inode != "0" or first >= last:
                continue
            there = np.zeros((last - first) // mmap.PAGESIZE, np.uint8)
            if _system("mincore", first, last - first, there.ctypes.data):
                continue
            used = (there & 1).reshape(-1, _HUGE // mmap.PAGESIZE).mean(1) >= _USED
            for page in np.flatnonzero(used).tolist():
                began = perf_counter()
                _system("madvise", first + page * _HUGE, _HUGE, _COLLAPSE)
                sleep(rests * (perf_counter() - began))


def _mappings() -> list[tuple[int, int, list[str]]]:
    """First and last address of what is mapped, and what the kernel says of it."""
    lines = (x.split(maxsplit=5) for x in Path("/proc/self/maps").read_text().splitlines())
    places = ((line[0].split("-"), line[1:]) for line in lines)
    return [(int(first, 16), int(last, 16), about) for (first, last), about in places]


def _system(call: str, *given: int) -> int:
    """Call the kernel; not 0 if it refuses."""
    return int(getattr(ctypes.CDLL(None), call)(*map(ctypes.c_size_t, given)))


def discard(name: str) -> None:
    """Delete an entry."""
    shutil.rmtree(folder() / name, ignore_errors=True)


def write(name: str, stored: Stored) -> bool:
    """Keep an entry; False if the disk does not take it, which is no error."""
    root = folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    except OSError:
        return False
    try:
        ov.save_model(stored.graph, made / _GRAPH, compress_to_fp16=False)
        if stored.reference is not None:
            np.save(made / _REFERENCE, stored.reference)
        sizes = {path.name: path.stat().st_size for path in made.iterdir()}
        facts = {**asdict(stored.facts), "sizes": sizes}
        (made / _FACTS).write_text(json.dumps(facts, default=sorted))  # a set is no JSON
        made.rename(root / name)
    except (OSError, RuntimeError):  # OpenVINO says RuntimeError for a full disk
        shutil.rmtree(made, ignore_errors=True)
        return (root / name).is_dir()  # somebody else was first
    _prune(root, root / name)
    return True


def _prune(root: Path, newest: Path) -> None:
    """Delete what was used longest ago until the store is small enough."""
    with suppress(OSError):
        entries = sorted(
            (path for path in root.iterdir() if path.is_dir() and path != newest),
            key=lambda path: path.stat().st_mtime,
        )
        size = {p: sum(f.stat().st_size for f in p.iterdir()) for p in [*entries, newest]}
        total = sum(size.values())
        for path in entries:
            if total <= LARGEST_BYTES:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= size[path]
