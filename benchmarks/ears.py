"""EARS: what tolerance buys in speed and costs in drift and accuracy, over β and temperature."""

from __future__ import annotations

from typing import Any

import forerun
from benchmarks.common import (
    RESULTS,
    Task,
    geometric,
    interleaved,
    provenance,
    save,
    show,
    table,
    tasks,
)
from benchmarks.quality import bar, percent, problems, solve

BETAS, TEMPERATURES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5), (0.0, 0.5, 0.7, 0.9, 1.1)
LENGTHS = {"γ = 5": "fixed(5)", "adaptive": "gammatune"}
ACCURACY = ("arithmetic easy", "extraction")


CASES = [(length, t, b) for length in LENGTHS for t in TEMPERATURES for b in BETAS]


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure speed and drift; write `ears.json` and a plot."""
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
            repetition_penalty=task.repetition_penalty,
        )[0]

    for case in CASES[:: len(BETAS)]:  # warm up
        run(work[0], case)
    runs = interleaved(work, CASES, run, "EARS")
    results: dict[str, Any] = {}
    for i, (length, temperature, beta) in enumerate(CASES):
        done = [row[i].stats for row in runs]
        base = [row[CASES.index((length, temperature, 0.0))].stats for row in runs]
        pace = [s.tokens_per_second / b.tokens_per_second for b, s in zip(base, done, strict=True)]
        total = sum(s.tokens for s in done)
        results[f"{length}, T={temperature}, β={beta}"] = {
            "length": length,
            "temperature": temperature,
            "beta": beta,
            "tokens_per_second": total / sum(s.seconds for s in done),
            "speed": geometric(pace),
            "accepted_per_round": sum(s.accepted for s in done) / sum(s.rounds for s in done),
            "drift_mean": sum((s.drift_mean or 0) * s.tokens for s in done) / total,
            "drift_max": max(s.drift_max or 0 for s in done),
        }
    header = ["length", "T", "β", "tokens/s", "speed against β = 0", "accepted a round",
              "drift, mean", "drift, max"]  # fmt: skip
    rows = [
        [
            r["length"],
            f"{r['temperature']:g}",
            f"{r['beta']:g}",
            f"{r['tokens_per_second']:.0f}",
            show(r["speed"]),
            f"{r['accepted_per_round']:.2f}",
            f"{r['drift_mean']:.4f}",
            f"{r['drift_max']:.2f}",
        ]
        for r in results.values()
    ]
    text = (
        f"{len(work)} test prompts of all families, {tokens} tokens each at most and no end of "
        "text, batch 1, paired per prompt, the same coins for every β. Drift: exact "
        "total-variation distance to the target per token. Accuracy: `ears-accuracy`.\n\n"
        + table(header, rows)
    )
    save("ears", provenance(model, prompts=prompts, tokens=tokens), results, text)
    _plot(results)


def accuracy(model: forerun.Model, count: int) -> None:
    """Measure accuracy and drift on problems with an answer; write `ears-accuracy.json`."""
    cells = {cell: problems(cell, count) for cell in ACCURACY}
    results: dict[str, Any] = {}
    progress, task = bar("accuracy", len(CASES) * len(cells))
    with progress:
        for length, temperature, beta in CASES:
            found = {}
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
                found[cell] = outcome.to_json()
                progress.advance(task)
            results[f"{length}, T={temperature}, β={beta}"] = found
    rows = [
        [
            length,
            f"{temperature:g}",
            f"{beta:g}",
            *[percent(found[c]) for c in ACCURACY],
            *[f"{found[c]['drift_mean']:.4f}" for c in ACCURACY],
        ]
        for (length, temperature, beta), found in zip(CASES, results.values(), strict=True)
    ]
    header = [
        "length",
        "T",
        "β",
        *[f"{c}, %" for c in ACCURACY],
        *[f"drift, {c}" for c in ACCURACY],
    ]
    text = (
        f"Accuracy in percent on {count} new problems per cell with a 95 % Wilson interval; drift: "
        "exact total-variation distance to the target per token.\n\n" + table(header, rows)
    )
    save("ears-accuracy", provenance(model, problems=count), results, text)


def _plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        for temperature in TEMPERATURES[1:]:
            line = [results[f"{length}, T={temperature}, β={b}"] for b in BETAS]
            axes.plot(
                [r["drift_mean"] for r in line],
                [r["speed"]["mean"] for r in line],
                marker="o",
                markersize=4,
                label=f"T = {temperature}",
            )
        axes.set(xlabel="mean drift per token", title=length)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="speed against β = 0")
    panels[0].legend(frameon=False)
    figure.suptitle("EARS: what it buys against what it costs, β from 0 to 0.5")
    figure.savefig(RESULTS / "ears.png", dpi=150)
    pyplot.close(figure)
