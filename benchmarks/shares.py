"""How much of what is possible each controller reaches, by replay of recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

import forerun
from benchmarks.common import RESULTS, console, geometric, provenance, save, show, table
from forerun.controllers import CONTROLLERS
from forerun.lab.bounds.bounds import Bound, best_fixed, oracle
from forerun.lab.bounds.informed import Study
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import Rounds
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import tune
from forerun.types import FloatArray, IntArray

RATIOS = (2, 5, 10, 20, 40)
SLOPE = 0.02
"""What each further token adds to a target pass, for the made-up costs."""
STREAMS = 8
"""Random orders of all prompts, each served as one stream of requests."""
AUTO = "auto"


def main(val: Path, test: Path, costs: Path, budget: int, name: str) -> None:
    """Tune on one trace, judge on the other, in every cell; write `shares-NAME.json`."""
    searched, judged = Trace.read(val), Trace.read(test)
    measured = CostTable.read(costs).at(1, 128)
    cells = {f"measured, c = {measured.ratio:.1f}": measured} | {
        f"c = {c}": Cell.synthetic(c, SLOPE) for c in RATIOS
    }
    study = Study(judged)
    results: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("cells", total=len(cells))
        for label, cell in cells.items():
            results[label] = one(searched, judged, study, cell, budget)
            progress.advance(bar)
    made = provenance(
        forerun.load(), val=searched.about, test=judged.about, costs=str(measured), budget=budget
    )
    save(f"shares-{name}", made, results, text(results, judged))
    plot(results, name)


def one(val: Trace, test: Trace, study: Study, cell: Cell, budget: int) -> dict[str, Any]:
    """One cell: every controller at its default and as tuned on `val`, against the bounds."""
    names = [n for n in CONTROLLERS.names() if n not in ("bounded", AUTO)]
    tuned = tune(val, cell, names, budget=budget)
    specs = {AUTO: AUTO}
    for result in tuned.results:
        specs[f"{result.name}, default"] = result.default
        specs[f"{result.name}, tuned"] = result.best
    bounds = {
        "oracle": oracle(test, cell).seconds,
        "informed": study.tried(cell)[0].seconds,
        "best fixed": best_fixed(test, cell)[0].seconds,
    }
    out: dict[str, Any] = {"bounds": {}, "controllers": {}}
    plain = replay(test, "fixed(0)", cell).seconds
    families = families_of(test)
    for label, limit in bounds.items():
        out["bounds"][label] = {f: geometric(plain[at] / limit[at]) for f, at in families.items()}
    own = served(test, AUTO, cell)
    for label, spec in specs.items():
        took = own if spec == AUTO else replay(test, spec, cell).seconds
        out["controllers"][label] = {
            "spec": spec,
            "speedup": {f: geometric(plain[at] / took[at]) for f, at in families.items()},
            "slowest": float((plain / took).min()),
            **{
                bound: {f: geometric(limit[at] / took[at]) for f, at in families.items()}
                for bound, limit in bounds.items()
            },
            "auto over it": {f: geometric(took[at] / own[at]) for f, at in families.items()},
            "mixed": total(plain, took),
            "auto over it, mixed": total(took, own),
        }
    fresh = replay(test, AUTO, cell).seconds
    out["fresh"] = {f: geometric(plain[at] / fresh[at]) for f, at in families.items()}
    return out


def served(trace: Trace, spec: str, cell: Cell) -> Any:
    """Seconds of each prompt as one request among all, the mean over random orders."""
    order = np.stack([np.random.default_rng(s).permutation(trace.prompts) for s in range(STREAMS)])
    seconds = stream(trace, spec, cell, order).seconds
    return np.take_along_axis(seconds, order.argsort(1), 1).mean(0)


def total(base: Any, took: Any, seed: int = 0) -> dict[str, float]:
    """Ratio of summed seconds with a 95 % bootstrap interval over prompts."""
    draw = np.random.default_rng(seed).integers(0, len(base), (2000, len(base)))
    low, high = np.quantile(base[draw].sum(1) / took[draw].sum(1), [0.025, 0.975])
    return {"mean": float(base.sum() / took.sum()), "low": float(low), "high": float(high)}


def regrets(test: Path, costs: Path, name: str) -> None:
    """Time lost against the bounds as texts grow; write `regret-NAME.json` and a plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trace, cell = Trace.read(test), CostTable.read(costs).at(1, 128)
    bounds = {"oracle": oracle(trace, cell), "informed bound": Study(trace).tried(cell)[0]}
    curves: dict[str, Any] = {}
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axes, (label, bound) in zip(panels, bounds.items(), strict=True):
        best = clocked(bound, trace, cell.asked)
        for spec in (AUTO, "hf-threshold", "gammatune+", "fixed(5)", "fixed(0)"):
            clock = Clock(trace)
            replay(trace, spec, cell, clock)
            lost = regret(clock.seconds, best) * 1e3
            curves.setdefault(spec, {})[label] = lost.round(3).tolist()
            axes.plot(np.arange(1, len(lost) + 1), lost, label=spec, color="black"
                      if spec == AUTO else None, linewidth=2.5 if spec == AUTO else 1)  # fmt: skip
        axes.set(xlabel="tokens written", ylabel="ms lost, mean over prompts",
                 title=f"Regret against the {label}, {name}")  # fmt: skip
        axes.legend(fontsize=8)
    figure.savefig(RESULTS / f"regret-{name}.png", dpi=120)
    pyplot.close(figure)
    ends = [[spec, *[f"{lost[-1]:.0f}" for lost in f.values()]] for spec, f in curves.items()]
    text = (
        f"Milliseconds lost per text against each bound, {trace.prompts} test prompts, at measured "
        f"costs (one plain token takes {cell.plain * 1e3:.1f} ms); `auto` starts each text "
        "afresh.\n\n"
        + table(["controller", *bounds], ends)
        + f"\n\n![As texts grow](regret-{name}.png)"
    )
    save(f"regret-{name}", provenance(forerun.load()), curves, text)


def families_of(trace: Trace) -> dict[str, Any]:
    """Where each family's prompts are, and all of them."""
    names = np.array(trace.families)
    return {f: names == f for f in dict.fromkeys(trace.families)} | {"all": names == names}


def text(results: dict[str, Any], trace: Trace) -> str:
    """A table per cell, and what `auto` is against the rest."""
    families = list(families_of(trace))
    parts = [
        f"{trace.prompts} test prompts; tuned: by `forerun tune` on validation prompts in the same "
        "cell. Speed-up over plain decoding, geometric mean over prompts; shares of the oracle and "
        f"of the informed bound. `auto` serves the prompts as one stream of requests, as live, in "
        f"{STREAMS} random orders, and is given the costs. Mixed: "
        "tokens per second over all prompts together, against plain decoding. Made-up costs: each "
        f"further token adds {SLOPE:.0%} to a target pass."
    ]
    for label, cell in results.items():
        rows = [
            [f"*{n}*", *[f"{b[f]['mean']:.2f}" for f in families],
             f"{share(cell, n, 'oracle'):.3f}", f"{share(cell, n, 'informed'):.3f}", "", ""]
            for n, b in cell["bounds"].items()
        ]  # fmt: skip
        ranked = sorted(cell["controllers"].items(), key=lambda c: -c[1]["speedup"]["all"]["mean"])
        rows += [
            [f"**{n}**" if n == AUTO else n, *[f"{c['speedup'][f]['mean']:.2f}" for f in families],
             f"{c['oracle']['all']['mean']:.3f}", f"{c['informed']['all']['mean']:.3f}",
             f"{c['mixed']['mean']:.2f}", show(c["auto over it"]["all"]) if n != AUTO else ""]
            for n, c in ranked
        ]  # fmt: skip
        head = ["", *families, "of oracle", "of informed", "mixed", "auto over it"]
        parts += [f"### {label}", table(head, rows)]
    return "\n\n".join([*parts[:1], summary(results), verdict(results, families), *parts[1:]])


def summary(results: dict[str, Any]) -> str:
    """All families together, a row per cell: `auto` beside the best other, as tuned."""
    rows = []
    for label, cell in results.items():
        own = cell["controllers"][AUTO]
        others = {n: c for n, c in cell["controllers"].items() if n.endswith(", tuned")}
        best = max(others, key=lambda n: others[n]["speedup"]["all"]["mean"])
        fixed = cell["bounds"]["best fixed"]["all"]["mean"]
        rows.append(
            [label, f"{fixed:.2f}",
             f"{others[best]['speedup']['all']['mean']:.2f} (`{best.removesuffix(', tuned')}`)",
             f"{own['speedup']['all']['mean']:.2f}", show(others[best]["auto over it"]["all"]),
             f"{own['informed']['all']['mean']:.3f}", f"{own['oracle']['all']['mean']:.3f}"]
        )  # fmt: skip
    head = ["costs", "best fixed γ", "best other, tuned", "auto", "auto over it"]
    return table([*head, "of the informed bound", "of the oracle"], rows)


def share(cell: dict[str, Any], bound: str, of: str) -> float:
    """One bound's speed over another's."""
    b = cell["bounds"]
    return float(b[bound]["all"]["mean"] / b[of]["all"]["mean"])


def verdict(results: dict[str, Any], families: list[str]) -> str:
    """`auto` against all others, at their tuned settings, in every cell."""
    cells, behind, ahead, informed, lowest = 0, [], 0, [], []
    mixed = []
    for label, cell in results.items():
        own = cell["controllers"][AUTO]
        informed += [own["informed"][f]["mean"] for f in families[:-1]]
        for f in families[:-1]:
            cells += 1
            lowest.append(own["speedup"][f]["mean"])
            others = {n: c["auto over it"][f] for n, c in cell["controllers"].items() if n != AUTO}
            worst = min(others, key=lambda n: others[n]["mean"])
            if others[worst]["high"] < 1:
                behind.append(f"{label}, {f}: {worst} {show(others[worst])}")
            ahead += others[worst]["low"] > 1
        rest = {n: c["auto over it, mixed"] for n, c in cell["controllers"].items() if n != AUTO}
        worst = min(rest, key=lambda n: rest[n]["mean"])
        mixed.append(f"{label}: {show(rest[worst])} ({worst})")
    lines = [
        f"`auto` against the best other controller, tuned, in each of {cells} cells (family × "
        f"costs): significantly ahead in {ahead}, behind in {len(behind)}, otherwise within the "
        "95 % interval." + (" Behind: " + "; ".join(behind) + "." if behind else ""),
        f"Share of the informed bound, mean over cells: **{np.mean(informed):.3f}**. Lowest "
        f"speed-up of a cell: **{min(lowest):.3f}**.",
        "Mixed streams, `auto` over the best other: " + "; ".join(mixed) + ".",
    ]
    return "\n".join(f"- {line}" for line in lines)


def plot(results: dict[str, Any], name: str) -> None:
    """Share of the informed bound by cell, every tuned controller a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    labels = list(results)
    shown = [n for n in results[labels[0]]["controllers"] if n == AUTO or n.endswith("tuned")]
    for n in sorted(shown, key=lambda n: n == AUTO):
        y = [c["controllers"][n]["informed"]["all"]["mean"] for c in results.values()]
        mine = n == AUTO
        axes.plot(labels, y, label=n.removesuffix(", tuned"), marker="o",
                  linewidth=3 if mine else 1, color="black" if mine else None)  # fmt: skip
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set(ylabel="share of the informed bound", title=f"Tuned controllers and auto, {name}")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(RESULTS / f"shares-{name}.png", dpi=120)
    pyplot.close(figure)


class Clock:
    """A `watch` for `replay` that notes when each token comes out."""

    def __init__(self, trace: Trace) -> None:
        self.seconds: FloatArray = np.full(trace.tokens.shape, np.nan)
        """`(prompts, T)` seconds from the start until the token is committed; NaN beyond the
        text."""
        self._spent, self.sizes = np.zeros(trace.prompts), trace.sizes

    def __call__(self, rounds: Rounds) -> None:
        """Note one round of every prompt that is still running."""
        kept = rounds.accepted + rounds.leaves_kept
        self.note(rounds.prompt, rounds.at, kept, rounds.seconds)

    def note(self, prompt: IntArray, at: IntArray, accepted: IntArray, seconds: FloatArray) -> None:
        """Note one round of some prompts, all arrays `(rows,)`."""
        self._spent[prompt] += seconds
        position = np.arange(self.seconds.shape[1])
        end = np.minimum(at + accepted + 1, self.sizes[prompt])
        row, token = np.nonzero((position >= at[:, None]) & (position < end[:, None]))
        self.seconds[prompt[row], token] = self._spent[prompt[row]]


def clocked(bound: Bound, trace: Trace, cell: Cell) -> FloatArray:
    """`(prompts, T)` seconds after which each token of a bound is out, as a `Clock` notes them."""
    clock, spent = Clock(trace), bound.path.round_seconds(cell)
    at, prompts = np.zeros(trace.prompts, np.int64), np.arange(trace.prompts)
    for turn, drafted in enumerate(bound.path.drafted.T):
        rows = np.flatnonzero(drafted >= 0)
        matches = trace.matches[prompts, np.minimum(at, trace.sizes - 1)]
        accepted = np.minimum(drafted, matches)
        clock.note(rows, at[rows], accepted[rows], spent[rows, turn])
        at[rows] += accepted[rows] + 1
    return clock.seconds


def regret(mine: FloatArray, best: FloatArray) -> FloatArray:
    """`(T,)` seconds lost against a bound by the time the n-th token is out, mean over prompts.

    Args:
        mine: `(prompts, T)` of a controller (`Clock.seconds` after `replay`).
        best: `(prompts, T)` of a bound (`clocked`).

    Prompts whose text has ended keep what they had lost. A bound is the best for whole texts: in
    between a controller can be ahead of it.

    >>> regret(np.array([[1.0, 3.0]]), np.array([[1.0, 2.0]]))
    array([0., 1.])
    """
    lost, position = mine - best, np.arange(mine.shape[1])
    last = np.where(np.isnan(lost), 0, position).max(1)
    held = lost[np.arange(len(lost))[:, None], np.minimum(position, last[:, None])]
    return held.mean(0)
