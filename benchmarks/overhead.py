"""Where a round's time goes, and what one forward costs by width."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import forerun
from benchmarks.common import PENALTY, generate, interleaved, provenance, save, table, tasks
from forerun.drafters.model import ModelDrafter

METHODS: list[str | None] = [
    None, "fixed(2)", "fixed(4)", "gammatune", "gammatune+", "auto(high=4)", "auto",
]  # fmt: skip
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `overhead.json`, or `overhead-RUNTIME.json`."""
    work = [t for t in tasks(model, "test", prompts, tokens) if t.family not in PENALTY]
    for method in METHODS:
        generate(model, work[0], method)
    runs = interleaved(work, METHODS, lambda t, m: generate(model, t, m), "overhead")
    shares: dict[str, Any] = {}
    for index, method in enumerate(METHODS):
        done = [r[index].stats for r in runs]
        draft, verify = (sum(getattr(s, f"{k}_seconds") for s in done) for k in ("draft", "verify"))
        other = sum(s.other_seconds for s in done)
        per_round = [s.other_seconds / s.rounds * 1e6 for s in done]
        shares[method or "plain"] = {
            "draft": draft / (draft + verify + other),
            "verify": verify / (draft + verify + other),
            "other": other / (draft + verify + other),
            "other_us_per_round": float(np.median(per_round)),
            "drafted_per_round": sum(s.drafted for s in done) / sum(s.rounds for s in done),
        }
    costs = forward_costs(model)
    text = (
        "Share of the rounds' time outside both models' forward passes (batch 1, greedy):\n\n"
        + table(
            ["controller", "draft", "verify", "everything else", "of which per round",
             "drafted per round"],
            [
                [m, f"{s['draft']:.1%}", f"{s['verify']:.1%}", f"**{s['other']:.1%}**",
                 f"{s['other_us_per_round']:.0f} µs", f"{s['drafted_per_round']:.1f}"]
                for m, s in shares.items()
            ],
        )
        + "\n\nOne forward pass over 128 tokens of context, median of interleaved runs:\n\n"
        + table(
            ["tokens fed", *map(str, WIDTHS)],
            [
                ["target ms", *[f"{costs['target'][str(w)]:.2f}" for w in WIDTHS]],
                ["draft ms", f"{costs['draft']:.2f}"],
            ],
        )
        + f"\n\nCost ratio c (target ÷ draft, one token): **{costs['ratio']:.1f}**"
    )  # fmt: skip
    results = {"shares": shares, "forward_ms": costs}
    runtime = model.target.facts.executor
    name = "overhead" if runtime == "torch" else f"overhead-{runtime}"
    save(name, provenance(model, prompts=prompts, tokens=tokens), results, text)


def forward_costs(model: forerun.Model, repeats: int = 25) -> dict[str, Any]:
    """Median milliseconds of a target forward by width and of a draft step, interleaved."""
    assert isinstance(model.drafter, ModelDrafter)
    context = [(7 * i) % 500 + 50 for i in range(129)]
    times: dict[tuple[str, int], list[float]] = {}
    for runtime in (model.target, model.drafter.rows):
        runtime.read([context], 64)
    for turn in range(repeats + 3):
        for name, runtime, widths in (
            ("target", model.target, WIDTHS),
            ("draft", model.drafter.rows, (1,)),
        ):
            for width in widths:
                began = time.perf_counter()
                runtime.feed([(context * 2)[128 : 128 + width]])
                elapsed = time.perf_counter() - began
                runtime.rollback(0, 128)
                if turn >= 3:
                    times.setdefault((name, width), []).append(elapsed * 1e3)
    for runtime in (model.target, model.drafter.rows):
        runtime.keep([])
    target = {str(w): float(np.median(times["target", w])) for w in WIDTHS}
    draft = float(np.median(times["draft", 1]))
    return {"target": target, "draft": draft, "ratio": target["1"] / draft}
