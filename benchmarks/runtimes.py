"""The shipped pair on each runtime: whole generations, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from statistics import fmean
from typing import Any

import torch

import forerun
from benchmarks.common import Task, geometric, interleaved, provenance, save, show, tasks

RUNTIMES = ("torch", "openvino")
METHODS = ("plain", "fixed(4)", "auto")
Run = tuple[float, list[list[int]]]


def main(prompts: int, tokens: int, batches: Sequence[int], threads: int) -> None:
    """Measure and write `runtimes-THREADS.json`."""
    torch.set_num_threads(threads)
    models = {name: forerun.load(runtime=name) for name in RUNTIMES}
    work = tasks(models["torch"], "test", prompts, tokens)
    cells: list[dict[str, Any]] = []
    for batch in batches:
        groups = [[task] for task in work] if batch == 1 else [(work * batch)[:batch]] * 2
        pairs = [(name, method) for method in METHODS for name in RUNTIMES]
        for pair in pairs:
            run(models, groups[0], pair)  # what a batch of this size costs is learned
        runs = interleaved(groups, pairs, partial(run, models), f"batch {batch}")
        cells += _cells(batch, pairs, runs)
    lines = [
        f"Shipped pair, float32, {threads} thread(s), {len(work)} test prompts, in turns: "
        "tokens/s, and openvino over torch.",
        "",
        "| batch | method | torch | openvino | ratio | same text |",
        "|---|---|---|---|---|---|",
        *(
            f"| {c['batch']} | {c['method']} | {c['torch']:.0f} | {c['openvino']:.0f} | "
            f"{show(c['ratio'])} | {c['same']:.0%} |"
            for c in cells
        ),
    ]
    made = provenance(models["torch"], prompts=prompts, tokens=tokens, runtimes=RUNTIMES)
    made["versions"]["openvino"] = version("openvino")
    save(f"runtimes-{threads}", made, cells, "\n".join(lines))


def run(models: dict[str, forerun.Model], group: Sequence[Task], pair: tuple[str, str]) -> Run:
    """One timed generation of a group."""
    name, method = pair
    model = models[name]
    how = [
        forerun.Sampling(
            max_new_tokens=task.max_new_tokens, repetition_penalty=task.repetition_penalty
        )
        for task in group
    ]
    plain = method == "plain"
    began = time.perf_counter()
    done = model.generate(
        [task.tokens for task in group],
        controller="fixed(0)" if plain else method,
        plain=plain,
        sampling=how,
        batch_size=len(group),
    )
    return time.perf_counter() - began, [completion.tokens for completion in done]


def _cells(
    batch: int, pairs: Sequence[tuple[str, str]], runs: Sequence[Sequence[Run]]
) -> list[dict[str, Any]]:
    out = []
    for method in METHODS:
        mine = {name: [row[pairs.index((name, method))] for row in runs] for name in RUNTIMES}
        rate = {
            name: sum(len(text) for _, texts in done for text in texts) / sum(s for s, _ in done)
            for name, done in mine.items()
        }
        both = list(zip(mine["torch"], mine["openvino"], strict=True))
        same = fmean(float(a[1] == b[1]) for a, b in both)
        ratio = geometric([a[0] / b[0] for a, b in both])
        out.append({"batch": batch, "method": method, **rate, "ratio": ratio, "same": same})
    return out
