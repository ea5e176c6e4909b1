"""Every acceptance rule side by side: speed, drift and accuracy, greedy and sampled."""

from __future__ import annotations

from typing import Any

import forerun
from benchmarks.common import Task, geometric, interleaved, provenance, save, show, table, tasks
from benchmarks.quality import bar, percent, problems, solve

RULES = {
    "standard": (0.0, 1.0),
    "gumbel": (1.0,),
    "block": (1.0,),
    "ears": (1.0,),
    "ears(beta=0.3)": (1.0,),
    "ensemble": (1.0,),
    "ensemble(weight=0.7)": (1.0,),
    "typical": (1.0,),
    "easd": (0.0, 1.0),
    "easd(correction=residual)": (1.0,),
    "cm-asd": (0.0, 1.0),
    "spec-verification": (0.0, 1.0),
    "fly(window=2)": (0.0,),
    "fly": (0.0,),
    "budget(ears(beta=0.3),drift=0.02)": (1.0,),
    "budget(cm-asd,drift=0.02)": (0.0, 1.0),
}
"""Each rule and the temperatures at which it is not just `standard`."""
LENGTH = "fixed(8)"
CELLS = ("arithmetic easy", "extraction")


def main(model: forerun.Model, prompts: int, tokens: int, count: int) -> None:
    """Measure and write `rules.json`."""
    work = tasks(model, "test", prompts, tokens)
    cells = {cell: problems(cell, count) for cell in CELLS}
    results: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        rules = [rule for rule, at in RULES.items() if temperature in at]

        def run(task: Task, rule: str, temperature: float = temperature) -> forerun.Completion:
            return model.generate(
                [task.tokens],
                controller=LENGTH,
                rule=rule,
                temperature=temperature,
                seed=len(task.tokens),
                ignore_eos=temperature > 0,
                max_new_tokens=task.max_new_tokens,
                repetition_penalty=task.repetition_penalty,
            )[0]

        for rule in rules:  # warm up
            run(work[0], rule)
        runs = interleaved(work, rules, run, f"T = {temperature:g}")
        progress, task = bar("accuracy", len(rules) * len(CELLS))
        with progress:
            for i, rule in enumerate(rules):
                done = [row[i].stats for row in runs]
                pace = [
                    s.tokens_per_second / row[0].stats.tokens_per_second
                    for s, row in zip(done, runs, strict=True)
                ]
                total = sum(s.tokens for s in done)
                scores = {}
                for cell, items in cells.items():
                    scores[cell] = solve(
                        model, cell, items,
                        controller=LENGTH, rule=rule, temperature=temperature, seed=0,
                    ).to_json()  # fmt: skip
                    progress.advance(task)
                results[f"T={temperature:g}, {rule}"] = {
                    "speed": geometric(pace),
                    "accepted_per_round": sum(s.accepted for s in done)
                    / sum(s.rounds for s in done),
                    "drift_mean": sum((s.drift_mean or 0) * s.tokens for s in done) / total,
                    "drift_max": max(s.drift_max or 0 for s in done),
                    "accuracy": scores,
                }
    rows = [
        [
            *name.split(", ", 1),
            show(r["speed"]),
            f"{r['accepted_per_round']:.2f}",
            f"{r['drift_mean']:.4f}",
            f"{r['drift_max']:.2f}",
            *[percent(r["accuracy"][c]) for c in CELLS],
        ]
        for name, r in results.items()
    ]
    header = ["T", "rule", "speed against standard", "accepted a round", "drift, mean",
              "drift, max", *[f"{c}, %" for c in CELLS]]  # fmt: skip
    text = (
        f"Speed and drift on {len(work)} test prompts of all families, {tokens} tokens at most, "
        f"batch 1, γ = 8, paired per prompt; accuracy on {count} new problems per cell with a 95 % "
        "Wilson interval. Drift: exact total-variation distance to the target per token.\n\n"
        + table(header, rows)
    )
    save("rules", provenance(model, prompts=prompts, tokens=tokens, problems=count), results, text)
