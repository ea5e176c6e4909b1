"""Plain decoding through the engine against transformers' own `generate`, same weights."""

from __future__ import annotations

import time

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
    tasks,
)


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `plain.json`."""
    work = [t for t in tasks(model, "test", prompts, tokens) if t.family not in PENALTY]
    hf = model.target.executor.module()

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
    save("plain", provenance(model, prompts=prompts, tokens=tokens), cell, text)
