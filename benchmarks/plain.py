"""Plain decoding through the engine against transformers' own `generate`, same weights."""

from __future__ import annotations

import time
from statistics import median

import torch

import forerun
from benchmarks.common import (
    PENALTY,
    Task,
    geometric,
    interleaved,
    provenance,
    save,
    show,
    table,
    tasks,
)
from forerun.runtime import Rows, torch_rows
from forerun.runtime.packing import unpacked

WIDTHS = 1, 2, 4, 8, 16
"""Tokens of a timed pass."""
CONTEXT = 100
"""Tokens before it."""


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `plain.json`."""
    work = [t for t in tasks(model, "test", prompts, tokens) if t.family not in PENALTY]
    hf = unpacked(model.target.executor.module())

    def transformers_generate(task: Task) -> tuple[float, list[int]]:
        ids = torch.tensor([task.tokens], device=model.target.device)
        began = time.perf_counter()
        with torch.inference_mode():
            out = hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=task.max_new_tokens,
                min_new_tokens=task.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - began, out[0, ids.shape[1] :].tolist()

    def engine(task: Task) -> tuple[float, list[int]]:
        began = time.perf_counter()
        done = model.generate(
            [task.tokens], plain=True, max_new_tokens=task.max_new_tokens, ignore_eos=True
        )[0]
        return time.perf_counter() - began, done.tokens

    methods = [engine, transformers_generate]
    for method in methods:
        method(work[0])
    runs = interleaved(work, methods, lambda task, method: method(task), "plain")
    cell = geometric([theirs[0] / ours[0] for ours, theirs in runs])
    text = (
        f"Plain greedy decoding, tokens/s of the engine over transformers `generate`: "
        f"**{show(cell)}** over {len(work)} prompts of {tokens} tokens at most, paired."
    )
    loaded, packed = torch_rows(hf), torch_rows(model.target.executor.module())
    timed = {width: passes([loaded, packed], width) for width in WIDTHS}
    rows = [
        [name, *(f"{timed[width][at]:.2f}" for width in WIDTHS)]
        for at, name in enumerate(("as loaded", "packed"))
    ]
    text += "\n\nA pass of the target on torch, ms, by its tokens (median, in turns):\n\n"
    text += table(["weights", *map(str, WIDTHS)], rows)
    results = {"over transformers": cell, "passes": {str(w): t for w, t in timed.items()}}
    save("plain", provenance(model, prompts=prompts, tokens=tokens), results, text)


@torch.inference_mode()
def passes(models: list[Rows], width: int, turns: int = 10, repeats: int = 12) -> list[float]:
    """Median milliseconds of a pass over so many tokens, of each model going on."""
    seconds: list[list[float]] = [[] for _ in models]
    for rows in models:
        rows.executor.run([0], [list(range(1, CONTEXT + 1))], [1])
    for _ in range(turns):
        for rows, own in zip(models, seconds, strict=True):
            for turn in range(repeats):
                began = time.perf_counter()
                rows.executor.run([CONTEXT], [list(range(1, width + 1))], [width])
                if turn >= repeats // 3:  # before, its weights are not in the caches as they go on
                    own.append(time.perf_counter() - began)
    return [1e3 * median(own) for own in seconds]
