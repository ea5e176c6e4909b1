"""What a lossy rule costs where it changes nothing: CPU time, and the engine's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import forerun
from benchmarks.common import Task, interleaved, provenance, save, table, tasks
from forerun import zoo
from forerun.engine import Sampling

IDLE = {
    "standard": "standard",
    "ears": "ears(beta=0)",
    "spec-verification": "spec-verification(tau=0,top=1)",
    "cm-asd": "cm-asd(tau=0,gamma=0,top=1)",
    "fly": "fly(entropy=1,window=24)",
    "ensemble": "ensemble(weight=1)",
    "priced": "priced(start=2)",
    "budget": "budget(ears(beta=0.3),drift=0)",
    "easd, bonus untested": "easd(entropy=9,bonus=untested,correction=residual)",
    "easd": "easd(entropy=9,correction=residual)",
}
"""Settings that change no greedy text; with a temperature `cm-asd` and `spec-verification` do, and
only their time per round counts."""
BATCHES = (1, 16)
TEMPERATURES = (0.0, 1.0)
REPEATS = 5


def main(model: forerun.Model, prompts: int, tokens: int, target: str = "") -> None:
    """Measure and write `rule-costs.json`, or with `-TARGET` and `-RUNTIME` in its name.

    Args:
        model: the pair; or, with `target`, that encoder-decoder model of `zoo.NAMES` and its draft.
        prompts: of each family of the pair, or a sixth of the sources.
        tokens: most of each text.
        target: its name; "" is the pair.
    """
    work = (
        sources(model, target, 6 * prompts, tokens)
        if target
        else tasks(model, "test", prompts, tokens)
    )
    results: dict[str, Any] = {}
    rows = []
    for batch in BATCHES:
        for temperature in TEMPERATURES:
            cell = f"batch {batch}, T = {temperature:g}"
            results[cell] = _cell(model, work, batch, temperature)
            for name, figures in results[cell].items():
                rows.append([
                    cell, name, f"{figures['speed']:.3f}", f"{figures['own_ms']:.2f}",
                    f"{figures['own_ms'] - results[cell]['standard']['own_ms']:+.2f}",
                    f"{figures['same']:.0%}",
                ])  # fmt: skip
    text = (
        f"Of {REPEATS} turns the least. Speed is CPU seconds of the process a token, against "
        "`standard`'s (geometric mean of pairs); own is the engine's time a round outside both "
        "models (median).\n\n"
        + table(["", "rule", "speed", "own ms", "over standard", "same text"], rows)
    )
    runtime = model.target.facts.executor
    parts = ["rule-costs", target, "" if runtime == "torch" else runtime]
    name = "-".join(filter(None, parts))
    save(name, provenance(model, prompts=prompts, tokens=tokens), results, text)


def sources(model: forerun.Model, target: str, count: int, cap: int) -> list[Task]:
    """Sources for an encoder-decoder model of `zoo.NAMES`."""
    return [
        Task(p.family, model.encode(p.prompt), min(cap, p.max_new_tokens))
        for p in zoo.sources("test", count, zoo.SOURCES[target])
    ]


def _cell(model: forerun.Model, work: list[Task], batch: int, temperature: float) -> dict[str, Any]:
    """By rule: speed, own time and how many texts are `standard`'s."""

    def run(group: list[Task], name: str) -> tuple[list[forerun.Completion], float]:
        how = [
            Sampling(temperature=temperature, seed=i, max_new_tokens=task.max_new_tokens)
            for i, task in enumerate(group)
        ]
        prompts, began = [task.tokens for task in group], time.process_time()
        done = model.generate(
            prompts, controller="fixed(5)", rule=IDLE[name], batch_size=batch, sampling=how
        )
        return done, time.process_time() - began

    groups = [work[i : i + batch] for i in range(0, len(work), batch)]
    for group in groups:
        run(group, "standard")  # every width once
    turns = [interleaved(groups, list(IDLE), run, "costs", turn) for turn in range(REPEATS)]

    def least(of: Callable[[list[forerun.Completion], float], float]) -> Any:
        """`(groups, rules)`; what disturbs a run only adds to it."""
        return np.min([[[of(*one) for one in row] for row in turn] for turn in turns], 0)

    cost = np.log(least(lambda done, spent: spent / sum(d.stats.tokens for d in done)))
    own = least(lambda done, _: float(np.median([d.stats.other_seconds / d.stats.rounds
                                                 for d in done])))  # fmt: skip
    texts = [[[d.tokens for d in done] for done, _ in row] for row in turns[0]]
    same = [[a == b for row in texts for a, b in zip(row[at], row[0], strict=True)]
            for at in range(len(IDLE))]  # fmt: skip
    return {
        name: {
            "speed": float(np.exp((cost[:, 0] - cost[:, at]).mean())),
            "own_ms": float(np.median(own[:, at])) * 1e3,
            "same": float(np.mean(same[at])),
        }
        for at, name in enumerate(IDLE)
    }
