"""EASD: is the answer better than the target's own? Accuracy, ablations, thresholds, speed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import forerun
from benchmarks import rsd
from benchmarks.common import (
    Task,
    geometric,
    interleaved,
    provenance,
    resumed,
    save,
    show,
    table,
)
from benchmarks.quality import CELLS, Outcome, bar, paired, percent, problems, solve
from forerun import zoo
from forerun.rules.easd import EASD
from forerun.rules.odds import Odds
from forerun.types import Draft, Target, Verdict

LENGTH = "fixed(5)"
ENTROPIES, OVERLAPS = (1.0, 1.5, 2.0), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Counted(EASD):
    """EASD that counts the penalties that mattered: at positions that were judged."""

    penalised: ClassVar[list[int]] = [0]

    def judge(self, draft: Draft, target: Target, uniforms: Any) -> Verdict:
        """As EASD."""
        verdict = super().judge(draft, target, uniforms)
        if draft.tokens.shape[1]:
            odds = Odds(draft, target)
            judged = odds.place <= verdict.accepted[:, None]
            self.penalised[0] += int((self.fires(odds) & judged).sum())
        return verdict


BONUSES, LENGTHS = ("off", "untested"), (1, 4, 8)


def bonus(model: forerun.Model, count: int, calibrated: float) -> None:
    """Whether the output depends on γ, by what follows a whole draft; write `easd-bonus.json`.

    Written after every cell; the same command goes on.
    """
    results = resumed("easd-bonus", problems=count, calibrated=calibrated)
    for cell in CELLS:
        if cell not in results:
            results[cell] = _bonus(model, cell, count, calibrated)
            made = provenance(model, problems=count, calibrated=calibrated)
            save("easd-bonus", made, results, _bonus_text(results, count, calibrated))


def _bonus(model: forerun.Model, cell: str, count: int, calibrated: float) -> dict[str, Any]:
    """Every reading at every length on one cell."""
    items, out = problems(cell, count), {}
    progress, task = bar(cell, len(BONUSES) * len(LENGTHS))
    with progress:
        for reading in BONUSES:
            texts: list[list[str]] = []
            for length in LENGTHS:
                rule = Counted(entropy=calibrated, bonus=reading)
                rule.penalised[0] = 0
                outcome = solve(model, cell, items, controller=f"fixed({length})", rule=rule)
                texts.append(outcome.texts)
                out[f"{reading}, γ = {length}"] = {
                    **outcome.to_json(),
                    "tokens_per_round": outcome.tokens / outcome.rounds,
                    "penalised": rule.penalised[0] / outcome.tokens,
                    "untested": outcome.untested,
                    "differs": sum(a != b for a, b in zip(texts[0], texts[-1], strict=True)),
                }
                progress.advance(task)
    return out


def _bonus_text(results: dict[str, Any], count: int, calibrated: float) -> str:
    rows = [
        [
            cell,
            name,
            percent(r),
            f"{100 * r['penalised']:.1f}",
            f"{100 * r['untested']:.0f}",
            f"{r['tokens_per_round']:.2f}",
            str(r["differs"]),
        ]
        for cell, readings in results.items()
        for name, r in readings.items()
    ]
    header = ["cell", "bonus", "accuracy", "penalised %", "never tested %", "tokens a round",
              "texts that differ from γ = 1"]  # fmt: skip
    return (
        f"{count} new problems per cell, greedy, τ_H = {calibrated:.2f}; accuracy in percent with "
        "a 95 % Wilson interval. Penalised and never tested (bonus and plain tokens that no rule "
        "judged): shares of output tokens.\n\n" + table(header, rows)
    )


def main(model: forerun.Model, count: int, calibrated: float) -> None:
    """Measure and write `easd.json`."""
    work = {cell: problems(cell, count) for cell in CELLS}
    variants = {
        "EASD (τ_H = 2)": Counted(),
        f"EASD (calibrated τ_H = {calibrated:.2f})": Counted(entropy=calibrated),
        "w/o overlap": Counted(entropy=calibrated, overlap=0.0),
        "w/o H_d": Counted(entropy=calibrated, draft_entropy=False),
        "w/o H_d and overlap": Counted(entropy=calibrated, draft_entropy=False, overlap=0.0),
    }
    grid = {(h, o): Counted(entropy=h, overlap=o) for o in OVERLAPS for h in ENTROPIES}
    draft = forerun.load(zoo.DRAFT, draft="none", dtype="float32", device=model.target.device)
    outcomes: dict[str, dict[str, Outcome]] = {}
    shares: dict[str, dict[str, float]] = {}
    progress, task = bar("EASD", len(CELLS) * (3 + len(variants) + len(grid)))
    with progress:
        for cell, items in work.items():
            solved: dict[str, Outcome] = {}
            solved["target"] = solve(model, cell, items, plain=True)
            progress.advance(task)
            solved["draft"] = solve(draft, cell, items, plain=True)
            progress.advance(task)
            solved["SD"] = solve(model, cell, items, controller=LENGTH)
            progress.advance(task)
            for name, rule in [*variants.items(), *((str(k), r) for k, r in grid.items())]:
                rule.penalised[0] = 0
                solved[name] = solve(model, cell, items, controller=LENGTH, rule=rule)
                shares.setdefault(name, {})[cell] = rule.penalised[0] / solved[name].tokens
                progress.advance(task)
            outcomes[cell] = solved
    results: dict[str, Any] = {
        "accuracy": {
            cell: {
                name: {**o.to_json(), "penalised": shares.get(name, {}).get(cell, 0.0)}
                for name, o in by_method.items()
            }
            for cell, by_method in outcomes.items()
        },
        "gain": {
            cell: {
                name: {
                    base: paired(by_method[name].right, by_method[base].right)
                    for base in ("target", "SD")
                }
                for name in variants
            }
            for cell, by_method in outcomes.items()
        },
    }
    made = provenance(model, problems=count, calibrated=calibrated, length=LENGTH)
    save("easd", made, results, _text(results, list(variants), count))


def speed(model: forerun.Model, count: int, calibrated: float) -> None:
    """Measure speed beside plain decoding, SD and RSD, batch 1; write `easd-speed.json`."""
    work = {cell: problems(cell, count) for cell in CELLS}
    tasks = [
        Task(cell, model.encode(p.prompt), 96 if "arith" in cell else 48)
        for cell, items in work.items()
        for p in items
    ]
    rules = {
        "SD": "standard",
        "EASD (τ_H = 2)": EASD(),
        "EASD (τ_H = 2, bonus token)": EASD(bonus="untested"),
        "EASD (calibrated)": EASD(calibrated),
        "EASD (calibrated, bonus token)": EASD(calibrated, bonus="untested"),
    }
    methods = ["target alone", *rules, "RSD"]
    # Steps begin where the last one ended: nothing is read twice.
    target = forerun.load(prefix_cache="64MB")
    draft = forerun.load(zoo.DRAFT, draft="none", prefix_cache="64MB")
    scorer = rsd.Scorer.load()

    def run(task: Task, name: str) -> tuple[int, float, float]:
        """Tokens, seconds, drift."""
        began = time.perf_counter()
        if name == "RSD":
            if not task.family.startswith("arith"):
                return 0, 0.0, 0.0
            made = rsd.answers(target, draft, scorer, [task.tokens], task.max_new_tokens)[0]
            return made.tokens, time.perf_counter() - began, 0.0
        how: dict[str, Any] = {"rule": rules[name]} if name in rules else {"plain": True}
        limit = task.max_new_tokens
        done = model.generate([task.tokens], controller=LENGTH, max_new_tokens=limit, **how)
        stats = done[0].stats
        return stats.tokens, time.perf_counter() - began, (stats.drift_mean or 0) * stats.tokens

    for name in methods:
        run(tasks[0], name)
    runs = interleaved(tasks, methods, run, "speed")
    results: dict[str, Any] = {name: {} for name in methods}
    for cell in (*work, "all"):
        rows = [r for t, r in zip(tasks, runs, strict=True) if cell in (t.family, "all")]
        for i, name in enumerate(methods):
            if all(row[i][0] for row in rows):
                pace = [[row[k][0] / row[k][1] for row in rows] for k in (i, 0, 1)]
                results[name][cell] = {
                    "rate": sum(row[i][0] for row in rows) / sum(row[i][1] for row in rows),
                    "target": geometric(np.divide(pace[0], pace[1])),
                    "SD": geometric(np.divide(pace[0], pace[2])),
                    "drift": sum(row[i][2] for row in rows) / sum(row[i][0] for row in rows),
                }
    save(
        "easd-speed",
        provenance(model, problems=count, calibrated=calibrated, length=LENGTH),
        results,
        _speed_text(results, count),
    )


def _speed_text(results: dict[str, Any], count: int) -> str:
    cells = (*CELLS, "all")
    rows = [
        [
            name,
            *[f"{by_cell[c]['rate']:.0f}" if c in by_cell else "–" for c in cells],
            *[show(by_cell[c]["target"]) if c in by_cell else "–" for c in cells],
            show(by_cell["all"]["SD"]) if "all" in by_cell else "–",
            f"{by_cell['all']['drift']:.4f}" if "EASD" in name else "–",
        ]
        for name, by_cell in results.items()
    ]
    header = ["method", *[f"tokens/s, {c}" for c in cells], *[f"× target, {c}" for c in cells],
              "× SD, all", "drift"]  # fmt: skip
    return (
        f"{count} problems per cell, greedy, γ = 5, batch 1. Tokens per second, prompts included; "
        "against the target alone and SD paired, geometric mean with a 95 % bootstrap interval. "
        "RSD: arithmetic only, scoring included; between its steps the models keep what they have "
        "read.\n\n" + table(header, rows)
    )


def corrections(model: forerun.Model, count: int, calibrated: float) -> None:
    """Compare what replaces a rejected token when sampling; write `easd-corrections.json`."""
    rules = {
        "standard": "standard",
        "no penalty, correction=target": EASD(entropy=float("inf")),
        "correction=target": EASD(entropy=calibrated),
        "correction=residual": EASD(entropy=calibrated, correction="residual"),
    }
    results: dict[str, Any] = {}
    progress, task = bar("corrections", 2 * len(rules) * len(CELLS))
    with progress:
        for temperature in (0.7, 1.0):
            for name, rule in rules.items():
                cells = {}
                for cell in CELLS:
                    outcome = solve(
                        model, cell, problems(cell, count),
                        controller=LENGTH, rule=rule, temperature=temperature, seed=0,
                    )  # fmt: skip
                    cells[cell] = outcome.to_json()
                    progress.advance(task)
                results[f"T={temperature}, {name}"] = cells
    rows = [
        [
            name,
            *[percent(cells[c]) for c in CELLS],
            f"{np.mean([cells[c]['accepted_per_round'] for c in CELLS]):.2f}",
            *[f"{cells[c]['drift_mean']:.4f}" for c in CELLS],
        ]
        for name, cells in results.items()
    ]
    text = (
        f"{count} new problems per cell, sampled, γ = 5, τ_H = {calibrated:.2f}; accuracy in "
        "percent with a 95 % Wilson interval; drift: mean total-variation distance to the target "
        "per token.\n\n"
        + table(["method", *CELLS, "accepted a round", *[f"drift, {c}" for c in CELLS]], rows)
    )
    made = provenance(model, problems=count, calibrated=calibrated, length=LENGTH)
    save("easd-corrections", made, results, text)


def _text(results: dict[str, Any], variants: list[str], count: int) -> str:
    accuracy, gain = results["accuracy"], results["gain"]
    labels = {
        "target": "target alone",
        "draft": "draft alone",
        "SD": "SD",
    }
    rows = [
        [
            labels.get(name, name),
            *[percent(accuracy[c][name]) for c in CELLS],
            *[
                f"{100 * accuracy[c][name]['penalised']:.1f}" if name in variants else "–"
                for c in CELLS
            ],
            f"{max(accuracy[c][name]['drift_mean'] for c in CELLS):.3f}",
        ]
        for name in [*labels, *variants]
    ]
    gains = [[name, *[percent(gain[c][name]["target"]) for c in CELLS]] for name in variants]
    grid = [
        [
            str(h),
            str(o),
            *[percent(accuracy[c][str((h, o))]) for c in CELLS],
            *[f"{100 * accuracy[c][str((h, o))]['penalised']:.2f}" for c in CELLS],
            f"{max(accuracy[c][str((h, o))]['drift_mean'] for c in CELLS):.3f}",
        ]
        for o in OVERLAPS
        for h in ENTROPIES
    ]
    shares = [f"penalised %, {c}" for c in CELLS]
    return (
        f"{count} new problems per cell, greedy, γ = 5; accuracy in percent with a 95 % Wilson "
        "interval. Penalised: share of output tokens. Drift: mean total-variation distance to the "
        "target per token, the worst cell. Ablations at the calibrated threshold (`forerun "
        "calibrate easd`, validation prompts).\n\n"
        + table(["method", *CELLS, *shares, "drift"], rows)
        + "\n\nGain over the target alone on the same problems, percentage points with a 95 % "
        "paired bootstrap interval (a gain is real where the interval excludes 0):\n\n"
        + table(["method", *CELLS], gains)
        + "\n\nThresholds (the paper's Tables 6 and 7):\n\n"
        + table(["τ_H", "τ_O", *CELLS, *shares, "drift"], grid)
    )
