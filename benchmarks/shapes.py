"""Passes of random-weight models of real small models' shapes, beside what reading them costs.

The shipped pair is tiny: its passes are a fifth overhead. Here are shapes that people use. Weights
are random, since time does not depend on them, and how drafts fare is replayed from a trace of the
shipped pair at these costs: what its acceptance would give at this size.

One model at a time, each in a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import forerun
from benchmarks.common import RESULTS, provenance, save, table
from forerun.costs import Costs
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import summarise
from forerun.lab.traces.trace import Trace

PRECISIONS = ("fp32", "bf16", "int8")
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
WIDTHS = (1, 2, 4, 5, 8, 9, 17)
SPECS = ("fixed(3)", "fixed(4)", "auto")
CONTEXT = 96
REPEATS = 7
ROUND = 0.0005
"""Seconds of a round outside passes, as `forerun` takes on OpenVINO."""
DRAFT = "0.1B"


@dataclass(frozen=True)
class Shape:
    """Of a Llama with tied embeddings."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    pairs: int
    vocab: int


SHAPES = {
    "0.1B": Shape(576, 30, 1536, 9, 3, 49152),  # SmolLM2-135M
    "0.5B": Shape(896, 24, 4864, 14, 2, 151936),  # Qwen2.5-0.5B
    "1.5B": Shape(1536, 28, 8960, 12, 2, 151936),  # Qwen2.5-1.5B
}


def main(sizes: Sequence[str], precisions: Sequence[str], threads: int, trace: Path | None) -> None:
    """Measure these shapes, add them to what `shapes.json` has, and replay all of it."""
    file = RESULTS / "shapes.json"
    cells = json.loads(file.read_text())["results"]["cells"] if file.is_file() else {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="shapes-") as folder:
            write(SHAPES[size], Path(folder) / "model")
            for precision in precisions:
                command = [sys.executable, "-m", "benchmarks.shapes", folder, precision]
                done = subprocess.run(
                    [*command, str(threads)], stdout=subprocess.PIPE, text=True, check=True
                )
                cells[f"{size} {precision}"] = json.loads(done.stdout.splitlines()[-1])
    replayed = _replayed(cells, Trace.read(trace)) if trace else {}
    made = provenance(forerun.load(), context=CONTEXT, repeats=REPEATS, runtime="openvino")
    if trace:
        made["command"] = made["command"].replace(str(trace), trace.name)
    made["versions"]["openvino"] = version("openvino")
    save("shapes", made, {"cells": cells, "replayed": replayed}, _text(cells, replayed))


def write(shape: Shape, folder: Path) -> None:
    """Write a checkpoint in bfloat16; values repeat, so that it takes no time to make."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.pairs,
        vocab_size=shape.vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = (0.02 * torch.randn(1 << 20)).bfloat16()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        count = tensor.numel()
        flat = values.repeat(-(-count // len(values)))[:count].clone()
        tensors[name] = torch.ones_like(flat) if tensor.ndim == 1 else flat.view(tensor.shape)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def measure(folder: Path, precision: str, threads: int) -> dict[str, Any]:
    """Start it twice and time its passes, beside reading as many bytes as its weights have."""
    from forerun.runtime.openvino.load import from_name

    os.environ["FORERUN_CACHE"] = str(folder / "cache")
    torch.set_num_threads(threads)
    began = time.perf_counter()
    executor = from_name(folder / "model", precision, threads)
    start = time.perf_counter() - began
    size = executor.facts.weights * BYTES[precision]
    executor.reserve(1, CONTEXT + max(WIDTHS))
    executor.run([0], [list(range(1, CONTEXT + 1))], [0])
    nothing: frozenset[str] = frozenset()
    seconds: dict[int, float] = {}
    for width in WIDTHS:
        taken = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            executor.best([CONTEXT], [[7] * width], [width], nothing)
            taken.append(time.perf_counter() - began)
        seconds[width] = statistics.median(taken[1:])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    levels = executor.levels
    del executor
    return {
        "levels": levels,
        "weights": size // BYTES[precision],
        "bytes": size,
        "start_seconds": start,
        "peak_mib": memory,
        "floor_seconds": _floor(size),
        "seconds": seconds,
    }


def _floor(size: int) -> float:
    """Least seconds that a sum over so many bytes took, by as many threads as torch has."""
    block = torch.ones(min(size, 1 << 30) // 4)
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        block.sum()
        taken.append(time.perf_counter() - began)
    return min(taken) * size / (4 * len(block))


def _replayed(cells: dict[str, Any], trace: Trace) -> dict[str, Any]:
    out = {}
    for name, cell in cells.items():
        size, precision = name.split()
        draft = cells.get(f"{DRAFT} {precision}")
        if size == DRAFT or draft is None:
            continue
        widths = sorted((int(width), seconds) for width, seconds in cell["seconds"].items())
        first = {int(width): seconds for width, seconds in draft["seconds"].items()}[1]
        costs = Costs(first, tuple(widths), fixed=ROUND, levels=tuple(cell["levels"]))
        summaries = {spec: summarise(trace, replay(trace, spec, costs))["all"] for spec in SPECS}
        plain = 1 / (widths[0][1] + ROUND)
        out[name] = {"plain": plain} | {
            spec: {"speedup": f["speedup"], "tokens_per_second": f["tokens_per_second"]["mean"]}
            for spec, f in summaries.items()
        }
    return out


def _text(cells: dict[str, Any], replayed: dict[str, Any]) -> str:
    rows = []
    for name, cell in cells.items():
        seconds = {int(width): s for width, s in cell["seconds"].items()}
        rows.append(
            [
                name,
                f"{cell['bytes'] / 1e9:.2f}",
                f"{cell['floor_seconds'] * 1e3:.1f}",
                *(f"{seconds[w] * 1e3:.1f}" for w in WIDTHS),
                f"{seconds[1] / cell['floor_seconds']:.2f}",
                f"{cell['start_seconds']:.0f}",
                f"{cell['peak_mib'] / 1024:.1f}",
            ]
        )
    head = ["model", "GB", "sum, ms", *(f"1×{w}" for w in WIDTHS), "1×1 / sum"]
    text = f"Milliseconds of a pass after {CONTEXT} tokens (medians of {REPEATS}), and of torch's "
    text += "sum over as many bytes (the least of as many): what reading them takes, about.\n\n"
    text += table([*head, "start, s", "peak, GiB"], rows)
    if replayed:
        lines = [
            [
                name,
                f"{r['plain']:.1f}",
                *(
                    f"{r[spec]['tokens_per_second']:.1f} ({r[spec]['speedup']['mean']:.2f}×)"
                    for spec in SPECS
                ),
            ]
            for name, r in replayed.items()
        ]
        text += "\n\nTokens/s if drafts fared as the shipped pair's do, drafted by the model of "
        text += f"{DRAFT} in the same precision (replay):\n\n"
        text += table(["target", "plain", *SPECS], lines)
    return text


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if sys.argv[2] == "int8":  # has an entry of its own; the float one is not needed any more
        shutil.rmtree(place / "cache", ignore_errors=True)
    print(json.dumps(measure(place, sys.argv[2], int(sys.argv[3]))))
