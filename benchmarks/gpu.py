"""The shipped pair on a GPU, as it is and enlarged to shapes that people run there.

An enlarged model computes what the small one does, at the cost of the large shape: hidden units,
heads and layers are added that nothing reads, with random weights. So drafts fare as the shipped
pair's do, live.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

import forerun
from benchmarks.common import Task, geometric, interleaved, provenance, save, show, table
from benchmarks.common import tasks as tasks_of
from forerun.drafters.model import ModelDrafter
from forerun.runtime.base import Executor, Rows
from forerun.runtime.cuda_graphs import CudaGraphExecutor
from forerun.runtime.torch_executor import TorchExecutor

RUNTIMES: dict[str, type[Executor]] = {"torch": TorchExecutor, "cudagraphs": CudaGraphExecutor}
METHODS = (None, "fixed(2)", "fixed(4)", "fixed(7)", "auto")
WIDTHS = (1, 2, 4, 8, 16)
ROWS = (1, 4, 16)
CONTEXT = 256
REPEATS = 9


SHAPES = {  # a hidden size 4 or 16 times the small model's keeps its numbers exact
    "14B": {  # Qwen3-14B, in heads of 64
        "hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17408,
        "num_attention_heads": 80, "num_key_value_heads": 16,
    },
    "0.6B": {  # Qwen3-0.6B
        "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
        "num_attention_heads": 32, "num_key_value_heads": 16,
    },
}  # fmt: skip
"""Fields of a Llama's configuration."""


@torch.no_grad()
def enlarged(small: Any, shape: dict[str, int]) -> Any:
    """A model of another shape on the device and in the dtype of a small one, with its function.

    What is added reads the text and writes nothing; norms divide by more numbers and multiply by
    as much less.
    """
    from transformers import AutoModelForCausalLM

    old = small.config
    config = copy.deepcopy(old)
    config.update(shape)
    config.layer_types = None
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / config.hidden_size
    with small.device:
        large = AutoModelForCausalLM.from_config(config, dtype=small.dtype).eval()
    width, head, units = old.hidden_size, old.head_dim, old.intermediate_size
    per_pair = old.num_attention_heads // old.num_key_value_heads
    queries = [
        i // per_pair * (config.num_attention_heads // config.num_key_value_heads) + i % per_pair
        for i in range(old.num_attention_heads)
    ]
    spans = torch.cat([torch.arange(q * head, (q + 1) * head) for q in queries]).to(small.device)
    pairs = old.num_key_value_heads * head
    shrunk = (old.hidden_size / config.hidden_size) ** 0.5

    def norm(new: Any, weight: torch.Tensor) -> None:
        new.weight.fill_(1.0)
        new.weight[:width] = weight * shrunk

    large.model.embed_tokens.weight.zero_()
    large.model.embed_tokens.weight[:, :width] = small.model.embed_tokens.weight
    norm(large.model.norm, small.model.norm.weight)
    for layer in large.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for new, given in zip(large.model.layers, small.model.layers, strict=False):
        norm(new.input_layernorm, given.input_layernorm.weight)
        norm(new.post_attention_layernorm, given.post_attention_layernorm.weight)
        to, of = new.self_attn, given.self_attn
        to.q_proj.weight[spans, :width] = of.q_proj.weight
        to.k_proj.weight[:pairs, :width] = of.k_proj.weight
        to.v_proj.weight[:pairs, :width] = of.v_proj.weight
        to.o_proj.weight[:width, spans] = of.o_proj.weight
        new.mlp.gate_proj.weight[:units, :width] = given.mlp.gate_proj.weight
        new.mlp.up_proj.weight[:units, :width] = given.mlp.up_proj.weight
        new.mlp.down_proj.weight[:width, :units] = given.mlp.down_proj.weight
    large.generation_config = small.generation_config
    return large


def main(prompts: int, tokens: int, batches: Sequence[int]) -> None:
    """Measure and write `gpu.json`."""
    from forerun import zoo
    from forerun.runtime.load import load_model, load_tokenizer

    device, tokenizer = torch.device("cuda"), load_tokenizer(zoo.TARGET)
    small = {
        dtype: [load_model(name, device, dtype) for name in (zoo.TARGET, zoo.DRAFT)]
        for dtype in ("float32", "bfloat16")
    }
    large = [
        enlarged(model, SHAPES[size])
        for model, size in zip(small["bfloat16"], ("14B", "0.6B"), strict=True)
    ]
    measured: dict[str, Any] = {}
    for name, (target, draft) in {
        "shipped pair, float32": small["float32"],
        "shipped pair, bfloat16": small["bfloat16"],
        "14B and 0.6B, bfloat16": large,
    }.items():
        models = {}
        for runtime, kind in RUNTIMES.items():
            began = time.perf_counter()
            drafter = ModelDrafter(Rows(kind(draft)), draft.config.vocab_size)
            models[runtime] = forerun.Model(Rows(kind(target)), drafter, tokenizer)
            models[runtime].start_seconds = time.perf_counter() - began
        work = tasks_of(models["torch"], "test", prompts, tokens)
        measured[name] = {
            "start": {runtime: model.start_seconds for runtime, model in models.items()},
            "passes": {runtime: passes(model) for runtime, model in models.items()},
            "batches": [_generations(models, work, batch) for batch in batches],
        }
    made = provenance(models["torch"], prompts=prompts, tokens=tokens)
    made["device"] = torch.cuda.get_device_name()
    save("gpu", made, measured, _text(measured, len(work)))


@torch.inference_mode()
def passes(model: forerun.Model) -> dict[str, dict[str, float]]:
    """Median seconds of a pass, by model and `rows×tokens`, its best tokens on the host."""
    out: dict[str, dict[str, float]] = {}
    for name, rows in (("target", model.target), ("draft", model.drafter.rows)):
        out[name] = {}
        for count in ROWS:
            for width in WIDTHS if count == 1 else WIDTHS[:4]:
                starts, pieces = [CONTEXT] * count, [[7] * width] * count
                taken = []
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    rows.executor.best(starts, pieces, [width] * count, frozenset())
                    taken.append(time.perf_counter() - began)
                out[name][f"{count}×{width}"] = median(taken[2:])
    return out


def _generations(
    models: dict[str, forerun.Model], work: Sequence[Task], batch: int
) -> dict[str, Any]:
    """Tokens/s of whole texts by runtime and method, in turns."""
    groups = [[task] for task in work] if batch == 1 else [(list(work) * batch)[:batch]] * 3
    pairs = [(runtime, method) for runtime in models for method in METHODS]

    def run(group: Sequence[Task], pair: tuple[str, str | None]) -> tuple[float, list[list[int]]]:
        how = [
            forerun.Sampling(
                max_new_tokens=task.max_new_tokens, repetition_penalty=task.repetition_penalty
            )
            for task in group
        ]
        began = time.perf_counter()
        done = models[pair[0]].generate(
            [task.tokens for task in group],
            controller=pair[1] or "fixed(0)",
            plain=pair[1] is None,
            sampling=how,
            batch_size=batch,
        )
        return time.perf_counter() - began, [completion.tokens for completion in done]

    for pair in pairs:
        run(groups[0], pair)
    runs = interleaved(groups, pairs, run, f"batch {batch}")
    cells = {}
    for index, (runtime, method) in enumerate(pairs):
        base = pairs.index((runtime, None))
        mine, plain, slow = ([row[i] for row in runs] for i in (index, base, 0))
        both = zip(mine, plain, strict=True)
        same = [a == b for (_, x), (_, y) in both for a, b in zip(x, y, strict=True)]
        cells[f"{runtime} {method or 'plain'}"] = {
            "tokens_per_second": sum(len(t) for _, done in mine for t in done)
            / sum(s for s, _ in mine),
            "over plain": geometric([b[0] / a[0] for a, b in zip(mine, plain, strict=True)]),
            "over torch plain": geometric([b[0] / a[0] for a, b in zip(mine, slow, strict=True)]),
            "identical": sum(same),
            "texts": len(same),
        }
    return {"batch": batch, "cells": cells}


def _text(measured: dict[str, Any], prompts: int) -> str:
    lines = [
        [
            name, runtime, which,
            *(f"{seconds * 1e3:.2f}" for seconds in passes[which].values()),
        ]
        for name, part in measured.items()
        for runtime, passes in part["passes"].items()
        for which in ("target", "draft")
    ]  # fmt: skip
    sizes = next(iter(measured.values()))["passes"]["torch"]["target"]
    text = f"Milliseconds of a pass after {CONTEXT} tokens, rows × tokens:\n\n"
    text += table(["pair", "runtime", "model", *sizes], lines)
    text += (
        f"\n\nGreedy texts of {prompts} test prompts, in turns; speed in tokens/s and over plain "
    )
    text += "decoding on the same runtime; texts equal to plain decoding's.\n\n"
    lines = [
        [
            name, str(done["batch"]), method, f"{cell['tokens_per_second']:.0f}",
            show(cell["over plain"]), show(cell["over torch plain"]),
            f"{cell['identical']}/{cell['texts']}",
        ]
        for name, part in measured.items()
        for done in part["batches"]
        for method, cell in done["cells"].items()
    ]  # fmt: skip
    head = ["pair", "batch", "method", "tokens/s", "over plain", "over torch, plain", "identical"]
    return text + table(head, lines)
