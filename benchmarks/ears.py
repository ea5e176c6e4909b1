"""EARS: what tolerance buys in speed and costs in drift and accuracy, over β and temperature."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import forerun
from benchmarks.common import (
    RESULTS,
    Task,
    geometric,
    interleaved,
    provenance,
    resumed,
    save,
    show,
    table,
    tasks,
)
from benchmarks.quality import bar, coins, paired, percent, problems, solve

BETAS, TEMPERATURES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5), (0.0, 0.5, 0.7, 0.9, 1.1)
LENGTHS = {"γ = 5": "fixed(5)", "adaptive": "gammatune"}
ACCURACY, OPEN = ("arithmetic easy", "extraction"), ("chat", "stories")


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
            outcomes = {}
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
                outcomes[cell] = outcome.to_json()
                progress.advance(task)
            results[f"{length}, T={temperature}, β={beta}"] = outcomes
    rows = [
        [
            length,
            f"{temperature:g}",
            f"{beta:g}",
            *[percent(measured[c]) for c in ACCURACY],
            *[f"{measured[c]['drift_mean']:.4f}" for c in ACCURACY],
        ]
        for (length, temperature, beta), measured in zip(CASES, results.values(), strict=True)
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


WARM = 0.9
"""The paper's temperature, with γ = 5 and β = 0.1."""


def pairs(model: forerun.Model, count: int, block: int = 250) -> None:
    """Compare accuracies on many problems and the same coins; write `ears-pairs.json`.

    Written after every `block` problems; the same command goes on, also with more of them.
    """
    cell, betas = "arithmetic easy", (0.0, 0.1, 0.3)
    results: dict[str, Any] = resumed("ears-pairs") or {"right": {}, "drift": {}}
    items = problems(cell, count)
    while (begin := len(results["right"].get(str(betas[-1]), ""))) < count:
        batch = items[begin : begin + block]
        for beta in betas:
            how = {"controller": LENGTHS["γ = 5"], "temperature": WARM, "seed": begin}
            done = solve(model, cell, batch, rule=f"ears(beta={beta})", **how)
            key = str(beta)
            results["right"][key] = results["right"].get(key, "")[:begin] + "".join(
                "01"[ok] for ok in done.right
            )
            results["drift"].setdefault(key, []).append(done.drift)
        save("ears-pairs", provenance(model, problems=count), results, _pairs_text(results, cell))


def _pairs_text(results: dict[str, Any], cell: str) -> str:
    right = {beta: [mark == "1" for mark in marks] for beta, marks in results["right"].items()}
    base = right["0.0"]
    rows = [
        [
            beta,
            f"{100 * np.mean(ours):.2f}",
            percent(paired(ours, base), 2),
            str(sum(a != b for a, b in zip(ours, base, strict=True))),
            f"{np.mean(results['drift'][beta]):.4f}",
        ]
        for beta, ours in right.items()
    ]
    return (
        f"{len(base)} new problems, {cell}, T = 0.9, γ = 5, the same coins for every β. Accuracy "
        "in percent; difference to β = 0 on the same problems in points, 95 % paired bootstrap "
        "interval; how many of the problems are right under one and wrong under the other; drift: "
        "exact total-variation distance to the target per token.\n\n"
        + table(["β", "accuracy", "difference", "verdicts that differ", "drift"], rows)
    )


def throughput(model: forerun.Model, groups: int, tokens: int) -> None:
    """Measure what a server's users see, alone and 8 at a time; write `ears-throughput.json`."""
    methods: dict[str, dict[str, Any]] = {
        "plain": {"plain": True},
        **{f"β = {beta}": {"rule": f"ears(beta={beta})"} for beta in (0.0, 0.1, 0.3)},
    }
    ids = [t.tokens for t in tasks(model, "test", 4 * groups, tokens) if t.family in OPEN]
    work = [[prompt] for prompt in ids] + [ids[i : i + 8] for i in range(0, len(ids), 8)]

    def run(prompts: list[list[int]], name: str) -> tuple[list[forerun.Completion], float]:
        began = time.perf_counter()
        # Texts of one length, so that no method gains by ending early.
        how = coins(len(prompts), ignore_eos=True, max_new_tokens=tokens, temperature=WARM)
        done = model.generate(prompts, sampling=how, controller=LENGTHS["γ = 5"], **methods[name])
        return done, time.perf_counter() - began

    for name in methods:
        run(work[0], name)
        run(work[-1], name)
    runs = interleaved(work, list(methods), run, "throughput")
    results = {
        f"{size} at a time, {name}": _served([row[i] for row in runs if len(row[i][0]) == size])
        for size in sorted({len(prompts) for prompts in work})
        for i, name in enumerate(methods)
    }
    rows = [
        [
            key,
            f"{r['output']:.1f}",
            f"{r['total']:.1f}",
            f"{r['request']:.1f}",
            f"{r['latency']:.3f}",
            f"{r['accepted_per_round']:.2f}",
            show(geometric(np.divide(r["seconds"], results[_base(key)]["seconds"]))),
        ]
        for key, r in results.items()
    ]
    header = ["", "output tokens/s", "total tokens/s", "tokens/s of a request",
              "mean latency, s", "accepted a round", "latency against β = 0"]  # fmt: skip
    text = (
        f"{len(ids)} test prompts of {' and '.join(OPEN)}, {tokens} tokens each, no end of text, "
        "T = 0.9, γ = 5. Total: prompt and output tokens over the wall time of all. Of a request: "
        "the mean over requests of its own. Latency: to the last token, no request waits for a "
        "place; its quotient is paired per request, geometric mean with a 95 % bootstrap "
        "interval.\n\n" + table(header, rows)
    )
    save("ears-throughput", provenance(model, groups=groups, tokens=tokens), results, text)


def _base(key: str) -> str:
    return key.partition(", ")[0] + ", β = 0.0"


def _served(runs: Sequence[tuple[list[forerun.Completion], float]]) -> dict[str, Any]:
    """Rates of some calls by all their requests and wall seconds."""
    stats = [done.stats for completions, _ in runs for done in completions]
    wall, written = sum(seconds for _, seconds in runs), sum(s.tokens for s in stats)
    return {
        "output": written / wall,
        "total": (written + sum(s.prompt_tokens for s in stats)) / wall,
        "request": float(np.mean([s.tokens_per_second for s in stats])),
        "latency": float(np.mean([s.seconds for s in stats])),
        "accepted_per_round": sum(s.accepted for s in stats) / sum(s.rounds for s in stats),
        "seconds": [s.seconds for s in stats],
    }


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
