"""Second choices judged in the target's pass: tokens a round and time, with and without."""

from __future__ import annotations

import shutil
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import forerun
from benchmarks.common import (
    generate,
    geometric,
    interleaved,
    provenance,
    recorded,
    save,
    show,
    table,
    tasks,
)
from forerun import zoo
from forerun.costs import Costs
from forerun.lab.traces.replay import stream
from forerun.lab.traces.results import Replay
from forerun.lab.traces.trace import Trace

METHODS = "auto", "auto(leaves=1)", "auto(leaves=4)"
NOISE = 0.35
"""Standard deviations of a matrix that the poor draft is off by."""
COSTS = {
    "openvino": Costs(
        0.55, ((1, 4.0), (2, 4.2), (4, 4.2), (5, 6.1), (6, 6.8), (8, 6.8), (9, 9.7), (12, 10.6),
               (16, 11.9)), 0.5, levels=(1, 4, 5, 8), tree=0.15,
    ),
    "torch": Costs(
        2.3, ((1, 13.0), (6, 13.0), (8, 14.6), (12, 16.5), (16, 17.8)), 0.5, tree=0.15,
    ),
}  # fmt: skip
"""CPU milliseconds of passes of the shipped target after 200 tokens, on one thread."""


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


def replayed(prompts: int, tokens: int) -> None:
    """Record the shipped pair and a poor one, replay both; write `leaves-replay.json`."""
    model = forerun.load(dtype="float32")
    made = provenance(model, prompts=prompts, tokens=tokens)
    results: dict[str, Any] = {}
    for pair in ("shipped", "poor"):
        if pair == "poor":
            model = with_poor_draft()
        work = [replace(t, repetition_penalty=1.0) for t in tasks(model, "test", prompts, tokens)]
        trace = recorded(model, work)
        order = np.random.default_rng(0).permutation(trace.prompts)
        for runtime, costs in COSTS.items():
            done = [stream(trace, spec, costs, order) for spec in METHODS]
            results[f"{pair}, costs of {runtime}"] = _families(trace, order, done)
    save("leaves-replay", made, results, _replayed_text(results))


def with_poor_draft() -> forerun.Model:
    """The shipped pair with noise in its draft's weights."""
    draft = AutoModelForCausalLM.from_pretrained(zoo.DRAFT, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight += NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    with TemporaryDirectory() as folder:
        shutil.copytree(zoo.DRAFT, folder, dirs_exist_ok=True)
        draft.save_pretrained(folder)
        return forerun.load(draft=folder, dtype="float32")


def _families(trace: Trace, order: Any, done: list[Replay]) -> dict[str, Any]:
    """By family: tokens a round, leaves, how many of them are kept, and time without over with."""
    families, out = np.array(trace.families)[order], {}
    for family in (*dict.fromkeys(trace.families), "all"):
        parts = [one.take((families == family) | (family == "all")) for one in done]
        out[family] = {
            spec: {
                "tokens_per_round": float(part.committed.sum() / part.rounds.sum()),
                "leaves_per_round": float(part.leaves.sum() / part.rounds.sum()),
                "kept_per_leaf": float(part.leaves_kept.sum() / max(part.leaves.sum(), 1)),
                "time": float(parts[0].seconds.sum() / part.seconds.sum()),
            }
            for spec, part in zip(METHODS, parts, strict=True)
        }
    return out


def _replayed_text(results: dict[str, Any]) -> str:
    tables = []
    for name, families in results.items():
        cells = {
            "tokens a round": ("tokens_per_round", METHODS[:1]),
            "with `{}`": ("tokens_per_round", METHODS[1:]),
            "leaves of `{}` a round": ("leaves_per_round", METHODS[1:]),
            "of these kept": ("kept_per_leaf", METHODS[-1:]),
            "time with `{}`": ("time", METHODS[1:]),
        }
        lines = [
            [label.format(spec[5:-1]), *(f"{one[spec][key]:.3f}" for one in families.values())]
            for label, (key, specs) in cells.items()
            for spec in specs
        ]
        tables.append(table([name, *families], lines))
    return "\n\n".join(tables)


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
