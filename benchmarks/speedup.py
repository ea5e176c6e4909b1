"""Speed-up over plain decoding through the same engine, per family and controller."""

from __future__ import annotations

from typing import Any

import numpy as np

import forerun
from benchmarks.common import generate, geometric, interleaved, provenance, save, show, table, tasks
from forerun import zoo

FIXED = [f"fixed({n})" for n in (1, 2, 3, 4, 5, 6, 8, 12)]
ADAPTIVE = ["hf-heuristic", "hf-threshold", "hf-threshold(dynamic=True)", "gammatune", "gammatune+"]


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `speedup.json`."""
    methods: list[str | None] = [None, *FIXED, *ADAPTIVE]
    work = tasks(model, "test", prompts, tokens)
    for method in methods:  # warm up
        generate(model, work[0], method)
    runs = interleaved(work, methods, lambda t, m: generate(model, t, m), "speed-up")
    results: dict[str, Any] = {}
    for family in (*zoo.families(), "all"):
        rows = [r for t, r in zip(work, runs, strict=True) if family in (t.family, "all")]
        cells: dict[str, Any] = {}
        for index, method in enumerate(methods):
            done = [r[index] for r in rows]
            ratio = [r[0].stats.seconds / r[index].stats.seconds for r in rows]
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
    save("speedup", provenance(model, prompts=prompts, tokens=tokens), results, _text(results))


def _text(results: dict[str, Any]) -> str:
    header = ["family", "acceptance rate", "best fixed γ", *["fixed(5)"], *ADAPTIVE]
    rows = []
    for family, cells in results.items():
        best = max(FIXED, key=lambda m: cells[m]["mean"])
        rows.append(
            [
                family,
                f"{cells['fixed(1)']['acceptance_rate']:.2f}",
                f"{show(cells[best])} (γ={best[6:-1]})",
                show(cells["fixed(5)"]),
                *[show(cells[m]) for m in ADAPTIVE],
            ]
        )
    total = sum(c["n"] for c in results["all"].values())
    same = sum(c["identical"] for c in results["all"].values())
    return (
        "Speed-up over plain decoding through the same engine: geometric mean over prompts with a "
        "95 % bootstrap interval; greedy (stories with a repetition penalty of 1.2, or they fall "
        "into loops), batch 1, test prompts, prefill included. Acceptance rate: accepted / judged "
        "at γ = 1.\n\n" + table(header, rows) + f"\n\nOutputs identical to plain decoding: "
        f"{same} of {total}."
    )
