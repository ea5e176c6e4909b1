"""CM-ASD's Figure 2: latency against throughput over batch sizes, on the shipped translator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cmasd import Run
from benchmarks.common import RESULTS, geometric, interleaved, provenance, save, show, table
from benchmarks.translator import PLAIN, Item, loaded
from forerun import zoo

NAME = "cm-asd-batches"
METHODS = {
    "plain": PLAIN,
    "fixed": "blockwise (k = 5, exact)",
    "CM-ASD": "CM-ASD, prose",
    "auto": "auto, standard",
}
"""Of the translator's; the first is what the others are measured against."""


def main(count: int, sizes: Sequence[int], cpu: bool) -> None:
    """Translate the same `count` sentences in batches of each size; write a table and a picture.

    With `cpu` seconds are those of the process's processor time, for `auto`, too: on one thread a
    quiet machine's clock, wherever the machine is not quiet.
    """
    engine, clock = loaded("translator"), time.process_time if cpu else time.perf_counter
    for model in engine.models.values():
        model.meter.clock = clock
    items = [Item(p.prompt, p.references or (p.answer,)) for p in zoo.sources("test", count)]

    def run(batch: Sequence[Item], name: str) -> tuple[Run, float]:
        began = clock()
        return engine.run(batch, name), clock() - began

    results: dict[str, Any] = {}
    for size in sizes:
        work = [items[first : first + size] for first in range(0, len(items), size)]
        for name in METHODS.values():
            run(work[0], name)
        runs = interleaved(work, list(METHODS.values()), run, f"batch {size}")
        pace = np.array([[done.tokens / seconds for done, seconds in row] for row in runs])
        results[str(size)] = {
            name: _cell([row[i] for row in runs], pace[:, i] / pace[:, 0])
            for i, name in enumerate(METHODS)
        }
    made = provenance(engine.model, count=count, seconds="processor" if cpu else "clock")
    save(NAME, made, results, _text(results, count, cpu))
    _plot(results, cpu)


def _cell(runs: Sequence[tuple[Run, float]], ratios: Any) -> dict[str, Any]:
    tokens, seconds = sum(done.tokens for done, _ in runs), sum(took for _, took in runs)
    rounds = sum(done.rounds for done, _ in runs)
    return {
        "latency": seconds / len(runs),
        "throughput": tokens / seconds,
        "tokens_per_round": tokens / rounds,
        "drift": sum(done.drift for done, _ in runs) / tokens,
        "speed": geometric(ratios),
    }


def _text(results: dict[str, Any], count: int, cpu: bool) -> str:
    rows = [
        [
            size, name, f"{1e3 * cell['latency']:.1f}", f"{cell['throughput']:.0f}",
            show(cell["speed"]) if name != "plain" else "1",
            f"{cell['tokens_per_round']:.2f}", f"{cell['drift']:.3f}",
        ]
        for size, cells in results.items()
        for name, cell in cells.items()
    ]  # fmt: skip
    header = ["batch", "method", "ms a batch", "tokens/s", "of plain", "tokens a round", "drift"]
    kind = "processor time of the process" if cpu else "the clock"
    return (
        f"The same {count} sentences in batches of each size, greedy; latency is that of a whole "
        f"batch, encoding included; seconds by {kind}. Of plain: tokens per second, paired by "
        f"batch, geometric mean with 95 % interval.\n\n{table(header, rows)}\n\n![]({NAME}.png)"
    )


def _plot(results: dict[str, Any], cpu: bool) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in METHODS:
        cells = [cells[name] for cells in results.values()]
        places = [(cell["throughput"], 1e3 * cell["latency"]) for cell in cells]
        axes.plot(*zip(*places, strict=True), marker="o", markersize=4, label=name)
    for size, cells in results.items():
        plain = cells["plain"]
        place = plain["throughput"], 1e3 * plain["latency"]
        axes.annotate(size, place, textcoords="offset points", xytext=(6, -8), fontsize=8)
    unit = "processor second" if cpu else "second"
    axes.set(
        xlabel=f"tokens per {unit}",
        ylabel="milliseconds a batch",
        title="Translator; numbers are batch sizes",
        xscale="log",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)
    pyplot.close(figure)
