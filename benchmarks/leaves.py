"""Second choices judged in the target's pass: tokens a round and time, with and without."""

from __future__ import annotations

from typing import Any

import forerun
from benchmarks.common import generate, geometric, interleaved, provenance, save, show, table, tasks

METHODS = "auto", "auto(leaves=1)", "auto(leaves=4)"


def main(model: forerun.Model, prompts: int, tokens: int, temperature: float = 0.0) -> None:
    """Measure and write `leaves.json`; `-sampled` above temperature 0."""
    work = tasks(model, "test", prompts, tokens)
    for method in METHODS:  # warm up
        generate(model, work[0], method, temperature)
    runs = interleaved(work, METHODS, lambda t, m: generate(model, t, m, temperature), "leaves")
    results: dict[str, Any] = {}
    for family in (*dict.fromkeys(t.family for t in work), "all"):
        rows = [r for t, r in zip(work, runs, strict=True) if family in (t.family, "all")]
        results[family] = {}
        for index, method in enumerate(METHODS):
            done = [r[index].stats for r in rows]
            rounds, leaves = sum(s.rounds for s in done), sum(_counted(s, "leaves") for s in done)
            pace = [r[index].stats.tokens_per_second / r[0].stats.tokens_per_second for r in rows]
            results[family][method] = {
                **geometric(pace),
                "tokens_per_round": sum(s.tokens for s in done) / rounds,
                "leaves_per_round": leaves / rounds,
                "kept_per_leaf": sum(_counted(s, "leaves_kept") for s in done) / max(leaves, 1),
                "identical": sum(r[index].tokens == r[0].tokens for r in rows),
            }
    made = provenance(model, prompts=prompts, tokens=tokens, temperature=temperature)
    save("leaves" + "-sampled" * bool(temperature), made, results, _text(results))


def _counted(stats: Any, name: str) -> int:
    return int(stats.counters.get(name, 0))


def _text(results: dict[str, Any]) -> str:
    lines = [
        [
            family, method, f"{cell['tokens_per_round']:.2f}", f"{cell['leaves_per_round']:.2f}",
            f"{cell['kept_per_leaf']:.2f}", show(cell),
        ]
        for family, cells in results.items() for method, cell in cells.items()
    ]  # fmt: skip
    header = ["family", "controller", "tokens a round", "leaves", "kept of these", "speed"]
    same = sum(cell["identical"] for cell in results["all"].values())
    total = sum(cell["n"] for cell in results["all"].values())
    return (
        "Speed: tokens per second over those of `auto` without second choices, geometric mean over "
        "prompts with a 95 % bootstrap interval, batch 1, test prompts.\n\n"
        + table(header, lines)
        + f"\n\nOutputs identical to those without: {same} of {total}."
    )
