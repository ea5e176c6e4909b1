"""Speed-up over plain decoding through the same engine, per family and controller."""

from __future__ import annotations

from typing import Any

import numpy as np

import forerun
from benchmarks.common import generate, geometric, interleaved, provenance, save, show, table, tasks

FIXED = [f"fixed({n})" for n in (1, 2, 3, 4, 5, 6, 8, 12)]
ADAPTIVE = [
    "auto",
    "hf-heuristic", "hf-threshold", "hf-threshold(dynamic=True)", "gammatune", "gammatune+",
    "cm-asd", "svip", "adaedl", "exllama-ema", "sglang-ema", "goodput", "bandit",
]  # fmt: skip


def main(
    model: forerun.Model, prompts: int, tokens: int, temperature: float = 0.0, long: bool = False
) -> None:
    """Measure and write `speedup.json`; `-sampled` above temperature 0, `-long` of long outputs."""
    methods: list[str | None] = [None, *FIXED, *ADAPTIVE]
    work = tasks(model, "test", prompts, tokens, long)
    for method in methods:  # warm up
        generate(model, work[0], method, temperature)
    runs = interleaved(work, methods, lambda t, m: generate(model, t, m, temperature), "speed-up")
    results: dict[str, Any] = {}
    for family in (*dict.fromkeys(t.family for t in work), "all"):
        rows = [r for t, r in zip(work, runs, strict=True) if family in (t.family, "all")]
        cells: dict[str, Any] = {}
        for index, method in enumerate(methods):
            done = [r[index] for r in rows]
            pace = [[c.stats.tokens_per_second for c in (r[0], r[index])] for r in rows]
            ratio = [ours / plain for plain, ours in pace]
            accepted = sum(c.stats.accepted for c in done)
            judged = sum(min(x.accepted + 1, x.drafted) for c in done for x in c.rounds)
            cells[method or "plain"] = {
                **geometric(ratio),
                "tokens_per_second": sum(c.stats.tokens for c in done)
                / sum(c.stats.seconds for c in done),
                "acceptance_rate": accepted / judged if judged else None,
                "block_efficiency": float(np.mean([c.stats.block_efficiency for c in done])),
                "identical": sum(r[index].tokens == r[0].tokens for r in rows),
            }
        results[family] = cells
    cap = None if long else tokens
    made = provenance(model, prompts=prompts, tokens=cap, temperature=temperature)
    mean = float(np.mean([r[0].stats.tokens for r in runs]))
    name = "speedup" + "-sampled" * bool(temperature) + "-long" * long
    save(name, made, results, _text(results, temperature, mean))


def _text(results: dict[str, Any], temperature: float, mean: float) -> str:
    rows = {}
    for family, cells in results.items():
        best = max(FIXED, key=lambda m: cells[m]["mean"])
        rows[family] = {
            "acceptance rate": f"{cells['fixed(1)']['acceptance_rate']:.2f}",
            "best fixed γ": f"{show(cells[best])} (γ={best[6:-1]})",
            **{m: show(cells[m]) for m in ("fixed(5)", *ADAPTIVE)},
        }
    lines = [[name, *[row[name] for row in rows.values()]] for name in rows["all"]]
    how = f"temperature {temperature:g}, by noise" if temperature else "greedy"
    text = (
        "Speed-up over plain decoding through the same engine, in tokens per second: geometric "
        f"mean over prompts with a 95 % bootstrap interval; {how} (stories with a "
        "repetition penalty of 1.2, or they fall into loops), batch 1, test prompts, "
        f"{mean:.0f} tokens of output in the mean, prefill included. Acceptance rate: accepted / "
        "judged at γ = 1. The best fixed γ is chosen in hindsight, per family.\n\n"
        + table(["controller", *rows], lines)
    )
    total = sum(c["n"] for c in results["all"].values())
    same = sum(c["identical"] for c in results["all"].values())
    return text + f"\n\nOutputs identical to plain decoding: {same} of {total}."
