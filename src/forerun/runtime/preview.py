"""What would be loaded for a name, before it is: `forerun info --target`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from forerun.errors import ForerunError, MissingExtraError, ModelError
from forerun.runtime import gguf
from forerun.runtime.load import EXPORTED, exported, read_config
from forerun.runtime.support import context_limit, refusal

_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Preview:
    """What is known of a model whose weights are not loaded."""

    name: str
    kind: str
    """Architecture."""
    weights: int
    """Numbers."""
    precision: str
    """Of the files."""
    nbytes: int
    """Of the files' weights."""
    limit: int
    """Tokens of context."""
    token_bytes: int | None
    """Of the cache, in float32; None: unknown."""
    runtime: str
    """What `auto` would run it with on a CPU, in which precision."""

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.kind}, {self.weights / 1e6:,.0f} million weights"
        yield f"files: {self.precision}, {self.nbytes / 1e6:,.0f} MB"
        cache = (
            f"; its cache takes {self.token_bytes * 1000 / 1e6:,.0f} MB per 1,000 tokens"
            if self.token_bytes
            else ""
        )
        yield f"context: {self.limit:,} tokens{cache}"
        yield f"on a CPU: {self.runtime}"


def preview(name: str | Path) -> Preview:
    """Read what files say of a model.

    Args:
        name: a folder, or a GGUF file.

    Raises:
        ModelError: no such model on this machine, or one that cannot be read.
    """
    installed = find_spec("openvino") is not None
    if path := gguf.locate(name):
        file = gguf.read(path)
        facts = file.facts()
        return Preview(
            path.name,
            file.architecture,
            facts.weights,
            file.kind,
            file.nbytes,
            facts.limit,
            facts.token_bytes,
            f"openvino, weights as they are ({file.kind})"
            if installed
            else f"torch, weights widened to bfloat16 ({facts.weights * 2 / 1e6:,.0f} MB)",
        )
    from forerun.runtime.openvino.load import files

    if folder := exported(name):
        return _exported(folder, installed)
    here = [path for path in files(name) if path.suffix == ".safetensors"]
    if not here:
        raise ModelError(
            f"no model of safetensors, GGUF or OpenVINO at {str(name)!r} on this machine; give a "
            "folder, a GGUF file, or an id that was downloaded"
        )
    try:
        config = read_config(name)
        if reason := refusal(config, encoders=True):
            raise ModelError(f"{config.model_type} models cannot run here: {reason}")
        limit = context_limit(config)
    except ForerunError:
        raise
    except Exception as error:  # whatever a config.json may hold
        raise ModelError(f"cannot read the config.json of {str(name)!r}: {error}") from error
    counts = _counted(here)
    weights, size = sum(counts.values()), sum(n * _WIDTHS.get(k, 1) for k, n in counts.items())
    return Preview(
        str(name),
        str(config.model_type),
        weights,
        max(counts, key=lambda kind: counts[kind]),
        size,
        limit,
        None,
        f"openvino in fp32 ({_held(counts) / 1e6:,.0f} MB); "
        f"openvino(precision='int8') would take {weights / 1e6:,.0f} MB and be another model"
        if installed
        else f"torch, {size / 1e6:,.0f} MB",
    )


def _exported(folder: Path, installed: bool) -> Preview:
    if not installed:
        raise MissingExtraError.of("openvino", "openvino")
    from forerun.runtime.openvino.exported import graph_of

    _, facts = graph_of(folder)
    return Preview(
        str(folder),
        str(read_config(folder).model_type),
        facts.weights,
        facts.precision,
        (folder / EXPORTED).with_suffix(".bin").stat().st_size,
        facts.limit,
        facts.token_bytes,
        f"openvino, weights as they are ({facts.precision})",
    )


def _held(counts: dict[str, int]) -> int:
    """Bytes of weights in full precision: bfloat16 numbers are held in 16 bits."""
    return sum(n * (2 if kind == "BF16" else 4) for kind, n in counts.items())


def _counted(paths: list[Path]) -> dict[str, int]:
    """Numbers by type, from the headers of safetensors files."""
    counts: dict[str, int] = {}
    for path in paths:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(size))
            except ValueError as error:
                raise ModelError(f"{str(path)!r} is damaged: {error}") from error
        for name, tensor in header.items():
            if name != "__metadata__":
                numbers = 1
                for length in tensor["shape"]:
                    numbers *= length
                counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + numbers
    return counts
