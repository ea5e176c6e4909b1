"""transformers' `generate` as it is, assisted, and attached to the engine; and the engine alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

import forerun
from benchmarks.common import (
    PENALTY,
    geometric,
    interleaved,
    provenance,
    save,
    show,
    table,
    tasks,
)
from benchmarks.peers.hugging_face import Assisted, Plain
from forerun import zoo
from forerun.drafters.model import ModelDrafter
from forerun.lab.bench.peers import opening
from forerun.runtime.load import load_model, load_tokenizer
from forerun.runtime.torch_executor import torch_rows
from forerun.transformers import attach

ASSISTED = (("constant", 3), ("constant", 5), ("heuristic", 5))
"""Schedules and lengths of assisted generation, which takes one text at a time."""
Run = tuple[float, list[list[int]]]


def main(prompts: int, tokens: int, batches: Sequence[int], threads: int, cpu: bool) -> None:
    """Measure and write `attached-THREADS.json`, or of processor time `attached-THREADS-cpu.json`,
    by `fixed(4)` for the same work everywhere."""
    torch.set_num_threads(threads)
    clock, controller = time.perf_counter, "auto"
    if cpu:
        clock, controller = time.process_time, "fixed(4)"
    target, attached = (load_model(zoo.TARGET, dtype="float32") for _ in range(2))
    draft = load_model(zoo.DRAFT, dtype="float32")
    attach(attached, draft, controller)
    rows = torch_rows(target)
    drafter = ModelDrafter(torch_rows(draft), rows.vocab_size)
    engine = forerun.Model(rows, drafter, load_tokenizer(zoo.TARGET))
    first = opening(engine, "", None)
    peers: dict[str, Plain] = {
        "generate": Plain(first, target),
        "attached": Plain(first, attached),
        **{f"assisted({s}, {n})": Assisted(first, target, draft, s, n) for s, n in ASSISTED},
    }

    def run(group: list[list[int]], name: str) -> Run:
        began = clock()
        if name == "engine":
            how = {"max_new_tokens": tokens, "batch_size": len(group), "controller": controller}
            texts = [completion.tokens for completion in engine.generate(group, **how)]
        else:
            texts = peers[name].generate(group, tokens)
        return clock() - began, texts

    # One penalty is for a whole batch there, and of padded rows it is a call of Python per place.
    work = [
        task.tokens for task in tasks(engine, "test", prompts, tokens) if task.family not in PENALTY
    ]
    cells = []
    for batch in batches:
        groups = [[prompt] for prompt in work] if batch == 1 else [(work * batch)[:batch]] * 4
        names = ["engine", *peers] if batch == 1 else ["engine", "generate", "attached"]
        for name in names:
            run(groups[0], name)  # what a batch of this size costs is learned
        runs = interleaved(groups, names, run, f"batch {batch}")
        cells += _cells(batch, names, runs)
    header = ["batch", "method", "tokens/s", "attached over it", "same text as generate"]
    shown = [
        [str(c["batch"]), c["method"], f"{c['rate']:.0f}", show(c["ratio"]), f"{c['same']:.0%}"]
        for c in cells
    ]
    text = (
        f"Shipped pair, float32, {threads} thread(s), `{controller}`, "
        f"{'processor time' if cpu else 'by the clock'}, {len(work)} test prompts without a "
        f"penalty, {tokens} tokens at most, in turns. *engine*: over the same weights, not packed."
        f"\n\n{table(header, shown)}"
    )
    name = f"attached-{threads}{'-cpu' * cpu}"
    save(name, provenance(engine, prompts=prompts, tokens=tokens), cells, text)


def _cells(batch: int, names: list[str], runs: list[list[Run]]) -> list[dict[str, Any]]:
    """Per method its rate, the time it takes over that of the attached one, and its texts."""
    by = {name: [row[at] for row in runs] for at, name in enumerate(names)}
    return [
        {
            "batch": batch,
            "method": name,
            "rate": sum(len(t) for _, texts in by[name] for t in texts)
            / sum(s for s, _ in by[name]),
            "ratio": geometric(
                [a[0] / b[0] for a, b in zip(by[name], by["attached"], strict=True)]
            ),
            "same": fmean(
                float(a[1] == b[1]) for a, b in zip(by[name], by["generate"], strict=True)
            ),
        }
        for name in names
    ]
