"""The GammaTune experiment (its Table 2) in kind: how much does the starting length matter?"""

from __future__ import annotations

from typing import Any

import numpy as np

import forerun
from benchmarks.common import RESULTS, generate, interleaved, provenance, save, table, tasks

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
METHODS = {
    "fixed": "fixed({n})",
    "hf-heuristic": "hf-heuristic(length={n})",
    "hf-threshold": "hf-threshold(length={n})",
    "gammatune": "gammatune(length={n})",
    "gammatune+": "gammatune+(length={n})",
}


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `starting-lengths.json` and a plot."""
    cases = [(name, n) for n in LENGTHS for name in METHODS]
    work = tasks(model, "test", prompts, tokens)
    for name in METHODS:  # warm up
        generate(model, work[0], METHODS[name].format(n=5))
    run = lambda task, case: generate(model, task, METHODS[case[0]].format(n=case[1]))  # noqa: E731
    runs = interleaved(work, cases, run, "starting lengths")
    speed: dict[str, list[float]] = {}
    for index, (name, _) in enumerate(cases):
        done = [r[index].stats for r in runs]
        rate = sum(s.tokens for s in done) / sum(s.seconds for s in done)
        speed.setdefault(name, []).append(rate)
    base = float(np.mean(speed["fixed"]))
    results: dict[str, Any] = {
        name: {
            "tokens_per_second": dict(zip(map(str, LENGTHS), rates, strict=True)),
            "mean": float(np.mean(rates)) / base,
            "std": float(np.std(rates)) / base,
        }
        for name, rates in speed.items()
    }
    rows = [
        [name, f"{r['mean']:.2f} ± {r['std']:.2f}", *[f"{s / base:.2f}" for s in speed[name]]]
        for name, r in results.items()
    ]
    text = (
        "Throughput relative to fixed-length speculation's mean over the same twelve starting "
        "lengths: mean ± standard deviation over the starting lengths, then each one. Greedy, "
        f"batch 1, {len(work)} test prompts of all families.\n\n"
        + table(["method", "mean ± std", *[f"γ₀={n}" for n in LENGTHS]], rows)
    )
    save("starting-lengths", provenance(model, prompts=prompts, tokens=tokens), results, text)
    _plot(speed, base)


def _plot(speed: dict[str, list[float]], base: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, rates in speed.items():
        style = {"color": "0.6", "linestyle": "--"} if name == "fixed" else {}
        axes.plot(LENGTHS, np.array(rates) / base, marker="o", markersize=4, label=name, **style)
    axes.set(
        xlabel="starting speculation length γ₀",
        ylabel="throughput (fixed, mean over γ₀ = 1)",
        title="How much the starting length matters",
        xticks=LENGTHS,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "starting-lengths.png", dpi=150)
    pyplot.close(figure)
