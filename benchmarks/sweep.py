"""Choose GammaTune's defaults on validation prompts.

Each prompt is recorded once: the target's greedy text, and what the draft would say from every
position of it, to full depth. Controllers are then replayed over the recording, all prompts at
once, with measured costs; greedy replay is exact, so settings differ by their merit and not by
the machine's noise.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from rich.progress import track

import forerun
from benchmarks.common import console, provenance, recorded, save, table, tasks
from benchmarks.overhead import WIDTHS, forward_costs
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.replay import replay

WEIGHTS = (
    "sharpness=1", "sharpness=0.5", "sharpness=2", "entropy=1,margin=0,softmax=0",
    "entropy=0,margin=1,softmax=0", "entropy=0,margin=0,softmax=1", "literal=true",
)  # fmt: skip


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Record, replay a grid, write `sweep.json`."""
    work = tasks(model, "val", prompts, tokens)
    costs = forward_costs(model)
    # Work outside forwards is left out: what a controller costs there is measured live.
    cell = Cell(costs["draft"] / 1e3, tuple((w, costs["target"][str(w)] / 1e3) for w in WIDTHS))
    trace = recorded(model, work)
    families = np.array([t.family for t in work])

    def score(spec: str) -> dict[str, Any]:
        speed = replay(trace, spec, cell).speedup
        per = {f: float(np.exp(np.log(speed[families == f]).mean())) for f in np.unique(families)}
        return {"spec": spec, "all": float(np.exp(np.log(speed).mean())), **per}

    grid = {
        "fixed": [f"fixed({n})" for n in range(13)],
        "gammatune": [
            f"gammatune(length={length},eta={eta},delta={delta})"
            for length, eta, delta in itertools.product(
                (5, 7, 10), (0.1, 0.2, 0.3, 0.5, 0.7, 1.0), (1, 2, 4, 6)
            )
        ]
        + ["gammatune(literal=true)"],
        "gammatune+": [
            f"gammatune+(length={length},eta={eta},delta={delta},threshold={tau},keep={keep},"
            f"early_stop={early})"
            for length, eta, delta, tau, keep, early in itertools.product(
                (5, 7, 10), (0.1, 0.3, 0.5), (2, 4, 6), (0.2, 0.3, 0.4, 0.6),
                ("true", "false"), ("update", "expand", "skip"),
            )
        ],
        "hf": ["hf-heuristic", *[f"hf-threshold(threshold={t})" for t in (0.2, 0.4, 0.6)]],
        "cm-asd": [
            f"cm-asd(alpha={alpha},high={high},{weights})"
            for alpha, high, weights in itertools.product(
                (0.4, 0.6, 0.7, 0.8, 1.0), (4, 6, 8, 10, 12, 16), WEIGHTS
            )
        ],
        "cm-asd two-pass": [
            f"cm-asd(alpha={alpha},high={high},two_pass=true)"
            for alpha, high in itertools.product((0.4, 0.6, 0.8, 1.0), (4, 6, 8, 12, 16))
        ],
        "svip": [f"svip(threshold={t},length=24)" for t in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)],
        "adaedl": [
            f"adaedl(threshold={t},keep={keep})"
            for t, keep in itertools.product((0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), ("true", "false"))
        ],
        "exllama-ema": [f"exllama-ema(length=4,high={n})" for n in (4, 6, 8, 12, 24)],
        "sglang-ema": ["sglang-ema", "sglang-ema(length=4,candidate_steps='1,2,3,4,6,8,12')"],
        "goodput": [
            f"goodput(cost={cost},slope={width})"
            for cost, width in itertools.product((3, 4.2, 6), (0.0, 0.02, 0.05))
        ],
        "bandit": [
            f"bandit(policy={policy},explore={explore})"
            for policy, explore in itertools.product(("ucb", "thompson"), (0.1, 0.25, 1.0))
        ],
    }  # fmt: skip
    ranked = {
        name: sorted(
            (score(s) for s in track(specs, name, console=console, transient=True)),
            key=lambda r: -r["all"],
        )
        for name, specs in grid.items()
    }
    names = sorted(set(families))
    rows = [
        [f"`{r['spec']}`", f"{r['all']:.3f}", *[f"{r[f]:.2f}" for f in names]]
        for results in ranked.values()
        for r in (*results[:4], results[-1])
    ]
    plus = ranked["gammatune+"]
    open_points = [
        [f"{key}={value}", f"{best['all']:.3f}", f"{np.mean([r['all'] for r in match]):.3f}"]
        for key, values in {
            "keep": ("true", "false"),
            "early_stop": ("update", "expand", "skip"),
        }.items()
        for value in values
        for match in [[r for r in plus if f"{key}={value}" in r["spec"]]]
        for best in [max(match, key=lambda r: r["all"])]
    ]
    weights = [
        [f"`{weight}`", f"`{best['spec']}`", f"{best['all']:.3f}"]
        for weight in WEIGHTS
        for best in [
            max((r for r in ranked["cm-asd"] if weight in r["spec"]), key=lambda r: r["all"])
        ]
    ]
    text = (
        f"Predicted speed-up over plain decoding on {len(work)} validation prompts, at most "
        f"{tokens} tokens each, at measured costs (c = {costs['ratio']:.1f}); the best four "
        "and the worst of each grid.\n\n"
        + table(["setting", "all", *names], rows)
        + "\n\nThe paper's open points, over the whole GammaTune+ grid:\n\n"
        + table(["reading", "best", "mean"], open_points)
        + "\n\nCM-ASD's confidence, the best α and k_max for each:\n\n"
        + table(["confidence", "best", "speed-up"], weights)
    )
    save(
        "sweep", provenance(model, prompts=prompts, tokens=tokens),
        {"costs": costs, "grid": ranked}, text,
    )  # fmt: skip
