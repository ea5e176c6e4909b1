"""What would be loaded for a name, before it is: `forerun info --target`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path

from forerun.errors import ForerunError, MissingExtraError, ModelError
from forerun.runtime import gguf
from forerun.runtime.base import Facts
from forerun.runtime.load import (
    EXPORTED,
    check_path,
    checkpoint_files,
    counted,
    exported,
    read_config,
)
from forerun.runtime.support import context_limit, refusal

_BASE, _TOKEN, _GRAPH = 195e6, 440, 25e6
"""Bytes of Python, transformers' tokenizers and OpenVINO; of a token of the vocabulary; and of a
graph's nodes and kernels. Sampled text takes PyTorch, which has 0.19 GB."""
_HELD = 1.2  # bytes of products in memory over those that are reckoned below
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


def preview(name: str | Path) -> list[str]:
    """Lines on a model by what its files say; `ModelError` if they are not here, or cannot be
    read."""
    installed = find_spec("openvino") is not None
    if path := gguf.locate(name):
        return _gguf(gguf.read(path), installed)
    if folder := exported(name):
        return _exported(folder, installed)
    check_path(name)
    here = [path for path in checkpoint_files(name) if path.suffix == ".safetensors"]
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
    counts = counted(here)
    weights, size = sum(counts.values()), sum(n * _WIDTHS.get(k, 1) for k, n in counts.items())
    held = f"torch, {_mb(size)}"
    if installed:  # bfloat16 numbers, which those of 8 bits become, are held in 16 bits
        full = sum(n * (2 if kind in ("BF16", "I8") else 4) for kind, n in counts.items())
        held = f"openvino in fp32 ({_mb(full)}); openvino(precision='int8') would take "
        held += f"{_mb(weights)} and be another model"
    about = str(name), config.model_type, weights, max(counts, key=counts.__getitem__), size
    return _lines(*about, f"{limit:,} tokens", held)


def _gguf(file: gguf.GGUF, installed: bool) -> list[str]:
    facts = file.facts()
    why = file.refusal if installed else "the extra openvino is not installed"
    if not why:
        from forerun.runtime.openvino.parts import narrows

        if not file.window and narrows(file.kind):
            facts = replace(facts, token_bytes=facts.token_bytes // 2)
        held = f"openvino, weights as they are ({file.kind}), {_memory(file, facts)}"
    else:
        held = f"torch, weights widened to bfloat16 ({_mb(facts.weights * 2)}): {why}"
    about = file.path.name, file.architecture, facts.weights, file.kind, file.nbytes
    return _lines(*about, _context(facts), held)


def _memory(file: gguf.GGUF, facts: Facts) -> str:
    """What OpenVINO needs: packed weights and their scales in float32 in every graph; while they
    are packed, the file as well. Embeddings are read where the file has them."""
    from forerun.runtime.openvino.blocks import rounds_inputs
    from forerun.runtime.openvino.making import LARGEST_PACKED, is_packed, sizes, weighed

    sized = {tensor.name: prod(tensor.shape) for tensor in file.tensors}
    products = sum(
        sized[tensor.name] * (0.75 if width < 0.75 else 1.25 if width < 2 else 4)
        for tensor in file.tensors
        if (width := gguf.KINDS[tensor.kind])
        and (tensor.name != "token_embd.weight" or "output.weight" not in sized)
    )
    wanted = is_packed(facts) and rounds_inputs()
    alone, shared = sizes(facts, halved=False, tiled=False, lazy=wanted)
    tokens, graph = len(file.metadata.get("tokenizer.ggml.tokens", ())), _GRAPH + _HELD * products
    held = _BASE + _TOKEN * tokens + (1 + len(alone)) * graph
    most = held + file.nbytes
    more = max(LARGEST_PACKED // weighed(facts) - len(alone), 0) if wanted and shared else 0
    shares = f", up to {more * graph / 1e9:.1f} where texts share passes" if more else ""
    return (
        f"about {held / 1e9:.1f} GB of memory without a draft, {most / 1e9:.1f} while it loads; "
        f"0.2 more once text is sampled{shares}"
    )


def _exported(folder: Path, installed: bool) -> list[str]:
    if not installed:
        raise MissingExtraError.of("openvino", "openvino")
    from forerun.runtime.openvino.exported import graph_of

    _, facts = graph_of(folder)
    size = (folder / EXPORTED).with_suffix(".bin").stat().st_size
    about = str(folder), str(read_config(folder).model_type), facts.weights, facts.precision, size
    return _lines(*about, _context(facts), f"openvino, weights as they are ({facts.precision})")


def _context(facts: Facts) -> str:
    cache = f"its cache takes {_mb(facts.token_bytes * 1000)} per 1,000 tokens"
    return f"{facts.limit:,} tokens; {cache}"


def _lines(
    name: str, kind: str, weights: int, precision: str, size: int, context: str, held: str
) -> list[str]:
    return [
        f"{name}: {kind}, {weights / 1e6:,.0f} million weights",
        f"files: {precision}, {_mb(size)}",
        f"context: {context}",
        f"on a CPU: {held}",
    ]


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
