"""EARS: what tolerance buys in speed and costs in drift and accuracy, over β and temperature."""

from __future__ import annotations

from typing import Any

import numpy as np

import forerun
from benchmarks.common import RESULTS, Task, geometric, interleaved, provenance, save, table, tasks
from benchmarks.quality import bar, percent, problems, solve

BETAS, TEMPERATURES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5), (0.0, 0.5, 0.7, 0.9, 1.1)
LENGTHS = {"γ = 5": "fixed(5)", "adaptive": "gammatune"}
ACCURACY = ("arithmetic easy", "extraction")


def main(model: forerun.Model, prompts: int, tokens: int, count: int) -> None:
    """Measure and write `ears.json` and a plot."""
    cases = [(length, t, b) for length in LENGTHS for t in TEMPERATURES for b in BETAS]
    work = tasks(model, "test", prompts, tokens)

    def run(task: Task, case: tuple[str, float, float]) -> forerun.Completion:
        length, temperature, beta = case
        # Every β meets the same coins.
        return model.generate(
            [task.tokens],
            controller=LENGTHS[length],
            rule=f"ears(beta={beta})",
            temperature=temperature,
            seed=len(task.tokens),
            ignore_eos=True,
            max_new_tokens=task.max_new_tokens,
        )[0]

    for case in cases[:: len(BETAS)]:  # warm up
        run(work[0], case)
    runs = interleaved(work, cases, run, "EARS")
    cells = {cell: problems(cell, count) for cell in ACCURACY}
    results: dict[str, Any] = {}
    progress, task = bar("accuracy", len(cases) * len(cells))
    with progress:
        for i, case in enumerate(cases):
            length, temperature, beta = case
            done = [row[i].stats for row in runs]
            base = [row[cases.index((length, temperature, 0.0))].stats for row in runs]
            pace = [
                (b.seconds / b.tokens) / (s.seconds / s.tokens)
                for b, s in zip(base, done, strict=True)
            ]
            total = sum(s.tokens for s in done)
            result: dict[str, Any] = {
                "tokens_per_second": total / sum(s.seconds for s in done),
                "speed": geometric(pace),
                "accepted_per_round": sum(s.accepted for s in done) / sum(s.rounds for s in done),
                "drift_mean": sum((s.drift_mean or 0) * s.tokens for s in done) / total,
                "drift_max": max(s.drift_max or 0 for s in done),
                "accuracy": {},
            }
            for cell, items in cells.items():
                outcome = solve(
                    model,
                    cell,
                    items,
                    controller=LENGTHS[length],
                    rule=f"ears(beta={beta})",
                    temperature=temperature,
                    seed=0,
                )
                result["accuracy"][cell] = outcome.to_json()
                progress.advance(task)
            results[f"{length}, T={temperature}, β={beta}"] = {
                "length": length,
                "temperature": temperature,
                "beta": beta,
                **result,
            }
    made = provenance(model, prompts=prompts, tokens=tokens, problems=count)
    save("ears", made, results, _text(results, len(work), tokens, count))
    _plot(results)


def _text(results: dict[str, Any], prompts: int, tokens: int, count: int) -> str:
    rows = [
        [
            r["length"],
            f"{r['temperature']:g}",
            f"{r['beta']:g}",
            f"{r['tokens_per_second']:.0f}",
            f"{r['speed']['mean']:.2f} [{r['speed']['low']:.2f}, {r['speed']['high']:.2f}]",
            f"{r['accepted_per_round']:.2f}",
            f"{r['drift_mean']:.4f}",
            f"{r['drift_max']:.2f}",
            *[percent(r["accuracy"][c]) for c in ACCURACY],
        ]
        for r in results.values()
    ]
    header = ["length", "T", "β", "tokens/s", "speed against β = 0", "accepted a round",
              "drift, mean", "drift, max", *[f"{c}, %" for c in ACCURACY]]  # fmt: skip
    return (
        f"Speed on {prompts} test prompts of all families ({tokens} tokens each at most, batch 1, "
        "paired per prompt, the same coins for every β); accuracy on "
        f"{count} new problems per cell with a 95 % Wilson interval. Drift: exact total-variation "
        "distance to the target per token.\n\n" + table(header, rows)
    )


def _plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for temperature in TEMPERATURES[1:]:
        line = [results[f"γ = 5, T={temperature}, β={b}"] for b in BETAS]
        left.plot(BETAS, [r["speed"]["mean"] for r in line], marker="o", label=f"T = {temperature}")
        right.plot(
            [r["drift_mean"] for r in line],
            [np.mean([r["accuracy"][c]["accuracy"] for c in ACCURACY]) for r in line],
            marker="o",
        )
    left.set(xlabel="β", ylabel="speed against β = 0", title="What the tolerance buys")
    right.set(xlabel="mean drift per token", ylabel="accuracy", title="What it costs")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(RESULTS / "ears.png", dpi=150)
    pyplot.close(figure)
