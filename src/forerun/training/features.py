"""Feature caching: the model runs once over the text, its layers' outputs go to disk.

A cache is a folder: `layer-NN.bin` per exit layer and `last.bin`, bfloat16 `(count, H)`; `top.bin`,
int32 `(count,)`; and `cache.json`, which lists what has been written. It is written in shards, each
complete before it counts, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import SettingError
from forerun.runtime.fingerprints import fingerprint as fingerprint
from forerun.runtime.layers import LayerAccess

STATE = "cache.json"  # file of the key and the progress
SHARD = 8192
"""Positions written at once."""
FORWARD = 4096
"""Most tokens, padding included, in one forward pass."""

Document = tuple[list[int], int]
"""Token ids, and the first position whose prediction counts: 0, or the last token of a prompt."""

Tell = Callable[[int], None]
"""Called with the positions done so far."""


def positions_of(document: Document) -> int:
    """How many predictions of a document count (its last token has no known successor)."""
    ids, start = document
    return max(len(ids) - 1 - start, 0)


@dataclass(frozen=True)
class Features:
    """A finished cache, memory-mapped.

    `hidden[l]` and `last`: bfloat16 `(count, H)`, the outputs of exit layer `l` and of the last
    layer, before the final norm. `top`: int32 `(count,)`, the arg-max of the model's own logits.
    """

    hidden: dict[int, torch.Tensor]
    last: torch.Tensor
    top: torch.Tensor
    key: str
    """A hash of the model, documents and layers."""

    @property
    def count(self) -> int:
        """Positions."""
        return len(self.top)


def cache_bytes(positions: int, layers: int, width: int) -> int:
    """Size of a cache on disk.

    >>> cache_bytes(100_000, 5, 320) / 1e6
    384.4
    """
    return positions * ((layers + 1) * width * 2 + 4)


def collect(
    access: LayerAccess,
    documents: Sequence[Document],
    layers: Sequence[int],
    folder: Path,
    *,
    identity: str = "",
    tell: Tell = lambda done: None,
    stop_after: int | None = None,
) -> Features:
    """The features of these documents: read if the folder has them, else written or completed.

    Args:
        access: the model.
        documents: the texts; each row sees itself alone.
        layers: exit layers, below the last.
        folder: where the cache is; made if missing.
        identity: of the model, from `fingerprint`; with the documents and layers it decides whether
            a cache that is there can be used. One that cannot is replaced.
        tell: called with the positions done.
        stop_after: leave after so many shards (for tests).

    Raises:
        SettingError: no document has a position to learn from, or the disk has no room.
        OSError: the cache cannot be written.
    """
    count = sum(map(positions_of, documents))
    if not count:
        raise SettingError("the texts are too short: not one of them has two tokens")
    key = _key(identity, documents, layers)
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"layer-{layer:02d}" for layer in layers), "last", "top"]
    width = access.width
    sizes = {name: 4 if name == "top" else width * 2 for name in names}
    files = {name: folder / f"{name}.bin" for name in names}
    state = _state(folder, key)
    complete = all(
        file.is_file() and file.stat().st_size >= state["positions"] * sizes[name]
        for name, file in files.items()
    )
    if not complete:
        state |= {"documents": 0, "positions": 0}
    if state["documents"] < len(documents):
        _check_room(folder, cache_bytes(count - state["positions"], len(layers), width))
        _save_state(folder, state)  # from here on the folder holds nothing else
    for number, (upto, shard) in enumerate(_shards(documents, state["documents"])):
        if number == stop_after:
            break
        rows = _run(access, shard, layers)
        for name, tensor in zip(names, rows, strict=True):
            _write(files[name], state["positions"] * sizes[name], tensor)
        state |= {"documents": upto, "positions": state["positions"] + len(rows[-1])}
        _save_state(folder, state)
        tell(state["positions"])
    done = state["positions"]
    hidden = [_mapped(files[name], done * width).view(done, width) for name in names[:-1]]
    top = _mapped(files["top"], done, torch.int32)
    return Features(dict(zip(layers, hidden, strict=False)), hidden[-1], top, key)


def _key(identity: str, documents: Sequence[Document], layers: Sequence[int]) -> str:
    digest = hashlib.sha256(f"1 {identity} {list(layers)} {SHARD} {FORWARD}".encode())
    for ids, start in documents:
        digest.update(f"{start} {ids}".encode())
    return digest.hexdigest()[:16]


def _state(folder: Path, key: str) -> dict[str, Any]:
    """The progress of the cache in a folder; none if its key is another one."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if state["key"] == key:
            return state
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    for old in folder.glob("layer-*.bin"):
        old.unlink()  # perhaps of other layers: nothing would ever write over them
    return {"key": key, "documents": 0, "positions": 0}


def _save_state(folder: Path, state: dict[str, Any]) -> None:
    beside = folder / f"{STATE}.tmp"
    beside.write_text(json.dumps(state) + "\n", encoding="utf-8")
    os.replace(beside, folder / STATE)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SettingError(
            f"the features need {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; "
            "use fewer `tokens` or `layers`, or another `cache`"
        )


def _mapped(path: Path, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The first `size` numbers of a file, which are read when they are used."""
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)


def _write(path: Path, at: int, tensor: torch.Tensor) -> None:
    """Put rows at a place in a file; whatever an interrupted shard left there is overwritten."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(at)
        file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())  # before the state counts it


def _shards(documents: Sequence[Document], start: int) -> Iterator[tuple[int, list[Document]]]:
    """Documents from `start` on in groups of about `SHARD` positions, and where each ends."""
    group: list[Document] = []
    size = 0
    for index in range(start, len(documents)):
        group.append(documents[index])
        size += positions_of(documents[index])
        if size >= SHARD or index == len(documents) - 1:
            yield index + 1, group
            group, size = [], 0


@torch.inference_mode()
def _run(access: LayerAccess, shard: list[Document], layers: Sequence[int]) -> list[torch.Tensor]:
    """One shard through the model: hidden states after `layers` and the last, and the top ids."""
    # Long ones first and together: little padding, and a batch too large fails at once.
    order = sorted(shard, key=lambda document: -len(document[0]))
    parts: list[list[torch.Tensor]] = []
    while order:
        width = len(order[0][0])
        rows = max(1, FORWARD // max(width, 1))
        parts.append(_forward(access, order[:rows], width, layers))
        del order[:rows]
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


def _forward(
    access: LayerAccess, documents: list[Document], width: int, layers: Sequence[int]
) -> list[torch.Tensor]:
    weight = access.unembedding
    device, dtype = weight.device, weight.dtype
    # Padding stands on the right, where no token before it sees it.
    ids = torch.tensor([d[0] + [0] * (width - len(d[0])) for d in documents], device=device)
    counts = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (tokens, start) in enumerate(documents):
        counts[row, start : len(tokens) - 1] = True
    counts = counts.to(device)
    positions = torch.arange(width, device=device).expand(len(documents), width)
    lowest = torch.finfo(dtype).min
    mask = torch.full((width, width), lowest, dtype=dtype, device=device).triu(1)[None, None]
    hidden, at, states = access.embed(ids, positions), 0, []
    for layer in (*layers, access.layers):
        hidden = access.run(hidden, at, layer, mask, positions)
        at = layer
        states.append(hidden[counts])
    top = access.logits(states[-1]).argmax(-1)
    return [*(h.to("cpu", torch.bfloat16) for h in states), top.to("cpu", torch.int32)]
