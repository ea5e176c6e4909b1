"""The GammaTune experiment (its Table 2) in kind: how much does the starting length matter?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

import forerun
from benchmarks.common import (
    RESULTS,
    generate,
    interleaved,
    provenance,
    recorded,
    save,
    table,
    tasks,
)
from benchmarks.real_models import KINDS
from forerun import zoo
from forerun.costs import Costs
from forerun.engine import Sampling
from forerun.lab.traces import record
from forerun.lab.traces.replay import stream
from forerun.lab.traces.trace import Trace

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
METHODS = {
    "fixed": "fixed({n})",
    "hf-heuristic": "hf-heuristic(length={n})",
    "hf-threshold": "hf-threshold(length={n})",
    "hf-threshold, dynamic": "hf-threshold(length={n},dynamic=true)",
    "gammatune": "gammatune(length={n})",
    "gammatune+": "gammatune+(length={n})",
}
PERSISTENT = {
    f"{name}, persistent": f"{spec[:-1]},persistent=true)"
    for name, spec in METHODS.items()
    if name not in ("fixed", "hf-threshold")
}
NEXT = {
    "gammatune, next": "gammatune(length={n},expand=next)",
    "gammatune+, next": "gammatune+(length={n},expand=next)",
}
HISTORIES = ("fixed", "hf-heuristic", "gammatune", "gammatune, persistent")
"""Those that read no distribution: a chain of drafts has none."""
DEPTH = 10
"""Of a real model's trace."""
SLOPE, STREAMS = 0.03, 8
"""Of replays: share of a plain pass that each further token of it costs; orders of the prompts."""


def main(model: forerun.Model, prompts: int, tokens: int, long: bool = False) -> None:
    """Measure and write `starting-lengths.json` and a plot; `-long` of long outputs."""
    specs = METHODS | PERSISTENT
    cases = [(name, n) for n in LENGTHS for name in specs]
    work = tasks(model, "test", prompts, tokens, long)
    for name in specs:  # warm up
        generate(model, work[0], specs[name].format(n=5))
    run = lambda task, case: generate(model, task, specs[case[0]].format(n=case[1]))  # noqa: E731
    runs = interleaved(work, cases, run, "starting lengths")
    counts: dict[str, list[Counts]] = {}
    for index, (name, _) in enumerate(cases):
        done = [r[index] for r in runs]
        counts.setdefault(name, []).append(
            Counts(
                sum(c.stats.tokens for c in done) / sum(c.stats.seconds for c in done),
                sum(c.stats.drafted for c in done),
                sum(c.stats.accepted for c in done),
                sum(c.stats.rounds for c in done),
            )
        )
    results, rows = _summary(counts)
    mean = float(np.mean([c.stats.tokens for c in done]))
    text = (
        f"{INTRO} Greedy, batch 1, {len(work)} test prompts of all families with "
        f"{'long' if long else 'short'} outputs, {mean:.0f} tokens each in the mean.\n\n"
    ) + _table(rows)
    name = "starting-lengths" + "-long" * long
    made = provenance(model, prompts=prompts, tokens=None if long else tokens)
    save(name, made, results, text)
    speed = {name: [c.rate for c in by_length] for name, by_length in counts.items()}
    _plot(name, speed, float(np.mean(speed["fixed"])))


def replayed(model: forerun.Model, prompts: int, tokens: int, cost: float) -> None:
    """The same by replay, free of the machine's noise; write `starting-lengths-replay.json`."""
    work = tasks(model, "test", prompts, tokens)
    specs = {**METHODS, **NEXT, **PERSISTENT}
    counts = _replays(recorded(model, work), Costs.synthetic(cost, SLOPE), specs)
    results, rows = _summary(counts)
    text = (
        f"{INTRO} Greedy, {len(work)} test prompts of all families one after another in {STREAMS} "
        f"random orders, by replay: a target pass costs {cost:g} draft steps, and each further "
        f"token of it {SLOPE:g} of a plain one.\n\n" + _table(rows)
    )
    made = provenance(model, prompts=prompts, tokens=tokens, cost=cost)
    save("starting-lengths-replay", made, results, text)


def pairs(folders: Sequence[Path], prompts: int, tokens: int) -> None:
    """The replay on the shipped pair and others (folders with target/ and draft/)."""
    chosen = ("fixed", "gammatune", "gammatune+", "gammatune, persistent", "gammatune+, persistent")
    specs = {name: spec for name, spec in (METHODS | PERSISTENT).items() if name in chosen}
    results: dict[str, Any] = {}
    rows = []
    shipped = (zoo.TARGET, zoo.DRAFT)
    for pair in (shipped, *((folder / "target", folder / "draft") for folder in folders)):
        model, (sizes, cost) = forerun.load(*map(str, pair)), _sizes(pair)
        work, cell = tasks(model, "test", prompts, tokens), Costs.synthetic(cost, SLOPE)
        methods, _ = _summary(_replays(recorded(model, work), cell, specs))
        results[sizes] = {"cost": cost, "methods": methods}
        rows.append(
            [sizes, f"{cost:.1f}", f"{methods['fixed']['acceptance']:.2f}"]
            + [f"{methods[name]['mean']:.2f} ± {methods[name]['std']:.2f}" for name in specs]
        )
    text = (
        f"{INTRO} Greedy, {prompts} test prompts of each family one after another in {STREAMS} "
        f"random orders, by replay: a target pass costs c draft steps, the ratio of the parameters "
        f"that both read, and each further token of it {SLOPE:g} of a plain one. Pairs are named "
        "by layers x hidden size; acceptance is that of fixed lengths.\n\n"
    ) + table(["target, draft", "c", "acceptance", *[f"`{name}`" for name in specs]], rows)
    made = provenance(model, prompts=prompts, tokens=tokens)
    save("starting-lengths-pairs", made, results, text)


def _sizes(pair: Sequence[Path]) -> tuple[str, float]:
    """Layers and hidden sizes of target and draft, and the ratio of their parameters."""
    shapes, weights = [], []
    for folder in pair:
        model = AutoModelForCausalLM.from_pretrained(str(folder))
        shapes.append(f"{model.config.num_hidden_layers}x{model.config.hidden_size}")
        weights.append(sum(p.numel() for p in model.parameters()))
    return ", ".join(shapes), weights[0] / weights[1]


def of_file(file: str, path: Path, per_kind: int, tokens: int) -> None:
    """The replay on a model in a GGUF file with its default draft, at a CPU's costs and a GPU's;
    texts are recorded once and kept in a trace. Writes `starting-lengths-real.json`, of
    more than 64 tokens `-long`."""
    if path.exists():
        trace = Trace.read(path)
    else:
        model = forerun.load(file)
        trace = record.record(model, chats(model, per_kind, tokens), depth=DEPTH)
        trace.write(path)
    specs = {n: s for n, s in (METHODS | PERSISTENT).items() if n in HISTORIES}
    results, parts = {}, []
    for slope in (0.19, 0.02):
        cell = Costs.synthetic(12, slope)
        counts = _replays(trace, cell, specs)
        results[f"{slope}"], rows = _summary(counts)
        for row, own in zip(rows, counts.values(), strict=True):
            row.insert(1, f"{np.mean([c.rate for c in own]) * cell.plain:.2f}")
        header = ["method", "of plain", "mean ± std", "acceptance", "length",
                  *[f"γ₀={n}" for n in LENGTHS if n <= DEPTH]]  # fmt: skip
        parts.append(f"## {slope} of a pass for each further token\n\n" + table(header, rows))
    text = (
        f"{INTRO.replace('twelve', 'eight')} Of plain: the mean's throughput over plain "
        f"decoding's. Greedy, {trace.prompts} chat prompts of eight kinds, "
        f"{int(trace.sizes.sum())} tokens, one after another in "
        f"{STREAMS} random orders, by replay: a target pass costs 12 draft steps.\n\n"
    ) + "\n\n".join(parts)
    made = provenance(forerun.load()) | {n: trace.about[n] for n in ("target", "dtype")}
    save("starting-lengths-real" + "-long" * (tokens > 64), made, results, text)


def chats(model: forerun.Model, per_kind: int, tokens: int) -> list[record.Task]:
    """The first prompts of each of `real_models.KINDS`, a kind after another."""
    ask: Any = model.tokenizer
    return [
        record.Task(
            kind, f"{kind}-{i}",
            ask.apply_chat_template(
                [{"role": "user", "content": template.format(fillers[i])}],
                add_generation_prompt=True, return_dict=False,
            ),
            Sampling(max_new_tokens=tokens),
        )
        for i in range(per_kind)
        for kind, (template, fillers) in KINDS.items()
    ]  # fmt: skip


def _replays(trace: Trace, cell: Costs, specs: dict[str, str]) -> dict[str, list[Counts]]:
    """Every method from every starting length that the trace is deep enough for."""
    random = np.random.default_rng(0)
    orders = np.stack([random.permutation(trace.prompts) for _ in range(STREAMS)])
    counts: dict[str, list[Counts]] = {}
    for name, spec in specs.items():
        for n in [n for n in LENGTHS if n <= trace.depth]:
            done = stream(trace, spec.format(n=n), cell, orders)
            counts.setdefault(name, []).append(
                Counts(
                    float(done.committed.sum() / done.seconds.sum()),
                    int(done.drafted.sum()),
                    int(done.accepted.sum()),
                    int(done.rounds.sum()),
                )
            )
    return counts


@dataclass(frozen=True)
class Counts:
    """One method from one starting length."""

    rate: float
    """Tokens per second."""
    drafted: int
    accepted: int
    rounds: int


INTRO = (
    "Throughput relative to fixed-length speculation's mean over the same twelve starting lengths: "
    "mean ± standard deviation over the starting lengths, then each one. Acceptance: accepted over "
    "drafted tokens; length: drafted tokens a round; both over all starting lengths."
)


def _summary(counts: dict[str, list[Counts]]) -> tuple[dict[str, Any], list[list[str]]]:
    base = float(np.mean([c.rate for c in counts["fixed"]]))
    results: dict[str, Any] = {}
    rows = []
    for name, by_length in counts.items():
        rates = [c.rate for c in by_length]
        r = results[name] = {
            "tokens_per_second": dict(zip(map(str, LENGTHS), rates, strict=False)),
            "mean": float(np.mean(rates)) / base,
            "std": float(np.std(rates)) / base,
            "acceptance": sum(c.accepted for c in by_length) / sum(c.drafted for c in by_length),
            "length": sum(c.drafted for c in by_length) / sum(c.rounds for c in by_length),
        }
        rows.append(
            [name, f"{r['mean']:.3f} ± {r['std']:.3f}", f"{r['acceptance']:.2f}",
             f"{r['length']:.1f}", *[f"{s / base:.2f}" for s in rates]]
        )  # fmt: skip
    return results, rows


def _table(rows: list[list[str]]) -> str:
    header = ["method", "mean ± std", "acceptance", "length", *[f"γ₀={n}" for n in LENGTHS]]
    return table(header, rows)


def _plot(called: str, speed: dict[str, list[float]], base: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, rates in speed.items():
        if name not in METHODS:
            continue
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
    figure.savefig(RESULTS / f"{called}.png", dpi=150)
    pyplot.close(figure)
