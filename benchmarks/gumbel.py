"""Sampled text by common noise (`gumbel`) and by coins (`standard`): speed, tokens kept, texts."""

from __future__ import annotations

from typing import Any

import numpy as np

import forerun
from benchmarks.common import (
    Task,
    generate,
    geometric,
    interleaved,
    provenance,
    save,
    show,
    table,
    tasks,
)

RULES = "standard", "gumbel"
CONTROLLERS = None, "auto", "hf-threshold", "adaedl", "fixed(2)", "fixed(4)"
TEMPERATURES = 0.3, 0.7, 1.0


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Measure and write `gumbel.json`."""
    work = tasks(model, "test", prompts, tokens)
    methods = [(c, rule) for c in CONTROLLERS for rule in RULES]

    def one(task: Task, method: tuple[str | None, str]) -> forerun.Completion:
        controller, rule = method
        return generate(model, task, controller, temperature, rule)

    results: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        for method in methods:
            one(work[0], method)
        runs = interleaved(work, methods, one, f"T = {temperature}")
        base = [row[methods.index((None, "standard"))] for row in runs]
        by_noise = [row[methods.index((None, "gumbel"))] for row in runs]
        results[str(temperature)] = {
            f"{controller or 'plain'}, {rule}": cell([row[i] for row in runs], base, by_noise)
            for i, (controller, rule) in enumerate(methods)
        }
    made = provenance(model, prompts=prompts, tokens=tokens)
    save("gumbel", made, results, _text(results, len(work)))


def cell(
    done: list[forerun.Completion], base: list[forerun.Completion], by_noise: list[Any]
) -> dict[str, Any]:
    """One method's figures; speed beside `base`, texts beside `by_noise`."""
    rounds = [r for c in done for r in c.rounds]
    judged = sum(min(r.accepted + 1, r.drafted) for r in rounds)
    pace = [c.stats.tokens_per_second for c in done]
    return {
        **geometric([ours / b.stats.tokens_per_second for ours, b in zip(pace, base, strict=True)]),
        "kept": sum(r.accepted for r in rounds) / judged if judged else None,
        "else_ms": float(np.median([r.other_seconds for r in rounds])) * 1e3,
        "identical": sum(c.tokens == b.tokens for c, b in zip(done, by_noise, strict=True)),
    }


def _text(results: dict[str, Any], prompts: int) -> str:
    header = ["method, rule"]
    for temperature in results:
        header += [f"T = {temperature}", "kept", "else, ms"]
    lines = []
    for name in next(iter(results.values())):
        line = [name]
        for cells in results.values():
            c = cells[name]
            kept = "–" if c["kept"] is None else f"{c['kept']:.3f}"
            line += [show(c), kept, f"{c['else_ms']:.2f}"]
        lines.append(line)
    same = {
        rule: sum(
            c["identical"]
            for cells in results.values()
            for name, c in cells.items()
            if name.endswith(rule) and not name.startswith("plain")
        )
        for rule in RULES
    }
    count = prompts * len(results) * (len(CONTROLLERS) - 1)
    return (
        "Speed over plain decoding by coins, in tokens per second: geometric mean over "
        f"{prompts} test prompts of all families with a 95 % bootstrap interval, each prompt "
        "with a seed; by coins every method writes another text. Kept: of the tokens that were "
        "judged. Else: time of a round outside both models, median.\n\n"
        + table(header, lines)
        + f"\n\nTexts equal to plain decoding's by the same noise: {same['gumbel']} of {count} "
        f"drafted by noise (by coins {same['standard']})."
    )
