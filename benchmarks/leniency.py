"""Lenient rules at equal drift: by replay in expectation, and live with seeds of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from benchmarks.common import (
    PENALTY,
    geometric,
    interleaved,
    provenance,
    resumed,
    save,
    show,
    table,
    tasks,
)
from benchmarks.starting_lengths import chats
from forerun.costs import Costs
from forerun.engine import Sampling, Stats
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Replay, draws
from forerun.lab.traces.rules import RecordedRule
from forerun.lab.traces.trace import Trace, concatenate
from forerun.types import FloatArray

LENGTH, DEPTH = "fixed(8)", 8
BETAS = (0.05, 0.1, 0.15, 0.2, 0.3)
PRICED = "priced(drift=0.02)"
CELL = Costs.synthetic(10)
"""Nothing is timed by it: fixed lengths do not ask what a round costs."""
DRAWS = 32
REAL_LENGTH, REAL_DEPTH = "fixed(5)", 5
REAL_RULES = {
    0.0: ("spec-verification(top=3,tau=0.5)", "spec-verification(top=3,tau=1)"),
    1.0: (*(f"ears(beta={b})" for b in (0.05, 0.1, 0.2, 0.3, 0.5)),
          "priced(start=1,pace=0)", "priced(start=0.95,pace=0)"),
}  # fmt: skip
"""By temperature, of a draft that is certain of each of its tokens."""
RULED = (
    "standard", "ears(beta=0.1)", "ears(beta=0.3)", "priced(drift=0.02)",
    "spec-verification(top=3,tau=1)", "easd(entropy=1,bonus=untested)",
)  # fmt: skip
RULED_LENGTHS, RULED_DRAWS = ("fixed(2)", "fixed(4)", "fixed(8)"), 8


@dataclass(frozen=True)
class Counted:
    """One rule on some texts: `(..., texts)` each."""

    tokens: FloatArray
    rounds: FloatArray
    drift: FloatArray
    """Summed over the tokens."""

    @classmethod
    def of(cls, counts: Replay) -> Counted:
        """What was replayed."""
        return cls(counts.committed * 1.0, counts.rounds * 1.0, counts.drift)

    @classmethod
    def written(cls, stats: Sequence[Sequence[Stats]]) -> Counted:
        """Of texts written live, `(seeds, texts)`."""
        counts = [
            [(s.tokens, s.rounds, (s.drift_mean or 0) * s.tokens) for s in row] for row in stats
        ]
        return cls(*np.array(counts, dtype=float).transpose(2, 0, 1))

    @property
    def of_all(self) -> Counted:
        """All seeds, of `(seeds, texts)`, together."""
        return Counted(self.tokens.sum(0), self.rounds.sum(0), self.drift.sum(0))

    def per_round(self, texts: Any = slice(None)) -> FloatArray:
        """Tokens a round over texts, by their numbers along the last axis."""
        ratio: FloatArray = self.tokens[..., texts].sum(-1) / self.rounds[..., texts].sum(-1)
        return ratio

    def spent(self, texts: Any = slice(None)) -> FloatArray:
        """Likewise drift a token."""
        drift: FloatArray = self.drift[..., texts].sum(-1) / self.tokens[..., texts].sum(-1)
        return drift


def main(
    model: forerun.Model,
    prompts: int,
    replayed: int,
    tokens: int,
    seeds: int,
    batch: int,
    cpu: bool,
) -> None:
    """`priced` beside `ears` of the same drift, and `gumbel`; writes `priced.json`.

    Args:
        model: the pair.
        prompts: of each family, live.
        replayed: of each family, by replay.
        tokens: most of each text.
        seeds: texts of each prompt, live.
        batch: of them decoded together.
        cpu: seconds of processor time in place of the clock.
    """
    trace = record(model, _sampled(model, replayed, tokens), depth=DEPTH, rule="standard")
    counted = _counted(trace, LENGTH, (*(f"ears(beta={b})" for b in BETAS), PRICED))
    beta = _equal_beta(counted)
    results: dict[str, Any] = {"replay": _figures(counted), "beta": beta}
    results["replay"][PRICED]["gain of ears"] = gain = _gain(counted)
    rules = ("standard", f"ears(beta={beta:g})", PRICED, "gumbel")
    work = _sampled(model, prompts, tokens)
    results["live"] = _live(model, work, LENGTH, rules, seeds, batch, cpu)
    text = (
        f"T = 1, {LENGTH}. By replay of {trace.prompts} test prompts, {int(trace.sizes.sum())} "
        f"tokens, {DRAWS} draws of the coins: `{PRICED}` has {show(gain)} times the gain of `ears` "
        "at its drift (95 % over prompts).\n\n"
        + _replay_table(results["replay"])
        + f"\n\nLive, {len(work)} prompts and {seeds} seeds, batch {batch}; "
        f"`ears` at the drift that `{PRICED}` has by replay.\n\n"
        + _live_table(results["live"], cpu)
    )
    made = provenance(
        model, prompts=prompts, replayed=replayed, tokens=tokens, seeds=seeds, batch=batch
    )
    save("priced", made, results, text)


def of_file(
    file: str, path: Path, temperature: float, per_kind: int, tokens: int, live: str
) -> None:
    """Rules on a real model's chat prompts: by replay with its default draft, whose texts are
    recorded once and kept in a trace; and `ears` live with a draft that has a distribution.
    Writes `rules-real.json`, or of greedy texts `rules-real-greedy.json`.
    """
    model = forerun.load(file)
    asked = [
        replace(task, sampling=Sampling(temperature=temperature, seed=i, max_new_tokens=tokens))
        for i, task in enumerate(chats(model, per_kind, tokens))
    ]
    if path.exists():
        trace = Trace.read(path)
    else:
        trace = record(model, asked, depth=REAL_DEPTH)
        trace.write(path)
    results: dict[str, Any] = {
        "replay": _figures(_counted(trace, REAL_LENGTH, REAL_RULES[temperature]))
    }
    text = (
        f"{Path(file).name}, T = {temperature:g}, {REAL_LENGTH}, {trace.prompts} chat prompts "
        f"of eight kinds, {int(trace.sizes.sum())} tokens. By replay with its default "
        f"draft, {DRAWS} draws.\n\n" + _replay_table(results["replay"])
    )
    if live:
        rules = ("standard", *(f"ears(beta={b})" for b in (0.1, 0.3, 0.5)))
        own = results["live"] = _live(
            forerun.load(file, live), asked, REAL_LENGTH, rules, seeds=1, batch=1, cpu=True
        )
        text += f"\n\nLive with `{live}`, the same prompts.\n\n" + _live_table(own, True)
    made = provenance(model, prompts=trace.prompts, tokens=tokens)
    save("rules-real" + "-greedy" * (temperature == 0), made, results, text)


def compared(model: forerun.Model, prompts: int, tokens: int, seeds: int) -> None:
    """Tokens a round live and by replay, of six rules at three lengths; write `rules-replay.json`.

    Written after every cell; the same command goes on.

    Args:
        model: the pair.
        prompts: of each family, validation.
        tokens: most of each text.
        seeds: texts of each prompt that are recorded, and as many others that are written live.
    """
    made = {"prompts": prompts, "tokens": tokens, "seeds": seeds}
    results = resumed("rules-replay", **made)
    asked = [_sampled(model, prompts, tokens, "val", seed) for seed in range(2 * seeds)]
    traces = [record(model, part, depth=DEPTH, rule="standard") for part in asked[:seeds]]
    whole = concatenate(traces)
    for rule, length in product(RULED, RULED_LENGTHS):
        key = f"{rule}, {length}"
        if key in results:
            continue
        counts = Counted.of(
            replay(whole, length, CELL, rule=RecordedRule(whole, rule), draws=RULED_DRAWS)
        )
        replayed = Counted(*(
            column.reshape(seeds, -1) for column in (counts.tokens, counts.rounds, counts.drift)
        )).of_all  # fmt: skip
        live = Counted.written([_texts(model, part, rule, length) for part in asked[seeds:]]).of_all
        results[key] = {
            "live": float(live.per_round()),
            "replayed": float(replayed.per_round()),
            "replayed over live": _over(replayed, live),
            "drift": [float(live.spent()), float(replayed.spent())],
        }
        save("rules-replay", provenance(model, **made), results, _compared_text(results, made))


def _texts(model: forerun.Model, asked: Sequence[Task], rule: str, length: str) -> list[Stats]:
    """Of texts written live, together."""
    how = [task.sampling for task in asked]
    prompts = [task.tokens for task in asked]
    done = model.generate(prompts, controller=length, rule=rule, sampling=how, batch_size=16)
    return [completion.stats for completion in done]


def _compared_text(results: dict[str, Any], made: dict[str, int]) -> str:
    rows = []
    for rule in RULED:
        cells = [results.get(f"{rule}, {length}") for length in RULED_LENGTHS]
        shown = [
            f"{c['live']:.2f}, {c['replayed']:.2f}: {_three(c['replayed over live'])}" if c else "–"
            for c in cells
        ]
        drift = cells[1] and ", ".join(f"{d:.4f}" for d in cells[1]["drift"])
        rows.append([f"`{rule}`", *shown, drift or "–"])
    header = ["rule", *(f"`{length}`" for length in RULED_LENGTHS),
              f"drift live and replayed, `{RULED_LENGTHS[1]}`"]  # fmt: skip
    return (
        f"Tokens a round live and by replay, and their ratio (95 % over prompts): T = 1, "
        f"{made['prompts']} validation prompts of each family, up to {made['tokens']} tokens, "
        f"{made['seeds']} texts of each recorded and as many others live.\n\n" + table(header, rows)
    )


def _sampled(
    model: forerun.Model, per_family: int, tokens: int, split: str = "test", turn: int = 0
) -> list[Task]:
    return [
        Task(
            t.family, str(i), t.tokens,
            Sampling(
                temperature=1.0, seed=1000 * turn + i, max_new_tokens=t.max_new_tokens,
                repetition_penalty=PENALTY.get(t.family, 1.0),
            ),
        )
        for i, t in enumerate(tasks(model, split, per_family, tokens))
    ]  # fmt: skip


# --- by replay -----------------------------------------------------------------------------------


def _counted(trace: Trace, length: str, rules: Sequence[str]) -> dict[str, Counted]:
    """`standard` and the rules."""
    times = DRAWS if trace.sampled.any() else 1
    return {
        rule: Counted.of(replay(trace, length, CELL, rule=RecordedRule(trace, rule), draws=times))
        for rule in ("standard", *rules)
    }


def _figures(counted: dict[str, Counted]) -> dict[str, Any]:
    base = counted["standard"]
    out: dict[str, Any] = {}
    for rule, own in counted.items():
        more, drift = _over(own, base), float(own.spent())
        saved = (1 - 1 / more["mean"]) / float(base.per_round())
        out[rule] = {
            "per_round": float(own.per_round()),
            "more": more,
            "drift": drift,
            "rounds per drift": saved / drift if drift else None,
        }
    return out


def _over(own: Counted, base: Counted) -> dict[str, float]:
    """Tokens a round over those of another rule, 95 % over texts."""
    drawn = draws(len(base.tokens), 0)
    low, high = np.quantile(own.per_round(drawn) / base.per_round(drawn), [0.025, 0.975])
    mean = float(own.per_round() / base.per_round())
    return {"mean": mean, "low": float(low), "high": float(high)}


def _curve(counted: dict[str, Counted], texts: Any) -> tuple[FloatArray, FloatArray]:
    """Drift of `ears` by rising β, from 0, and its tokens a round over `standard`'s: `(n, β)` of
    `(n, k)` numbers of texts."""
    base = counted["standard"].per_round(texts)
    own = [counted[f"ears(beta={b})"] for b in BETAS]
    drift = np.stack([np.zeros_like(base), *(c.spent(texts) for c in own)], -1)
    return drift, np.stack([np.ones_like(base), *(c.per_round(texts) / base for c in own)], -1)


def _gain(counted: dict[str, Counted]) -> dict[str, float]:
    """Tokens a round that `priced` gains over those that `ears` gains at its drift."""
    own, base = counted[PRICED], counted["standard"]

    def ratio(texts: Any) -> FloatArray:
        curves = zip(own.spent(texts), *_curve(counted, texts), strict=True)
        of_ears = np.array([np.interp(*curve) for curve in curves])
        return (own.per_round(texts) / base.per_round(texts) - 1) / (of_ears - 1)

    count = len(own.tokens)
    low, high = np.quantile(ratio(draws(count, 0)), [0.025, 0.975])
    mean = float(ratio(np.arange(count)[None])[0])
    return {"mean": mean, "low": float(low), "high": float(high)}


def _equal_beta(counted: dict[str, Counted]) -> float:
    """The β at which `ears` drifts as much as `priced`."""
    drift, _ = _curve(counted, np.arange(len(counted[PRICED].tokens))[None])
    return round(float(np.interp(counted[PRICED].spent(), drift[0], (0.0, *BETAS))), 3)


def _replay_table(figures: dict[str, Any]) -> str:
    header = ["rule", "tokens a round", "over `standard`", "drift", "rounds saved a unit of it"]
    rows = [
        [
            f"`{rule}`", f"{f['per_round']:.3f}", _three(f["more"]), f"{f['drift']:.4f}",
            "–" if f["rounds per drift"] is None else f"{f['rounds per drift']:.2f}",
        ]
        for rule, f in figures.items()
    ]  # fmt: skip
    return table(header, rows)


def _three(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"


# --- live ----------------------------------------------------------------------------------------


def _live(
    model: forerun.Model,
    work: Sequence[Task],
    length: str,
    rules: Sequence[str],
    seeds: int,
    batch: int,
    cpu: bool,
) -> dict[str, Any]:
    """By rule: tokens a round over the first rule's, of each seed and of all; drift; speed."""
    clock: Callable[[], float] = time.process_time if cpu else time.perf_counter

    def run(group: Sequence[Task], case: tuple[str, int]) -> tuple[list[Stats], float]:
        rule, seed = case
        how = [replace(t.sampling, seed=1000 * (seed + 1) + (t.sampling.seed or 0)) for t in group]
        asked = [replace(task, sampling=s) for task, s in zip(group, how, strict=True)]
        began = clock()
        return _texts(model, asked, rule, length), clock() - began

    cases = [(rule, seed) for seed in range(seeds) for rule in rules]
    groups = [work[i : i + batch] for i in range(0, len(work), batch)]
    for rule in rules:
        run(groups[0], (rule, 0))
    runs = interleaved(groups, cases, run, "live")
    counted, paces = {}, {}
    for rule in rules:
        own = [[row[cases.index((rule, seed))] for row in runs] for seed in range(seeds)]
        counted[rule] = Counted.written([[s for stats, _ in row for s in stats] for row in own])
        each = [[sum(s.tokens for s in stats) / took for stats, took in row] for row in own]
        paces[rule] = np.array(each).mean(0)
    base = counted[rules[0]]
    return {
        rule: {
            "per_round": float(c.of_all.per_round()),
            "more": _over(c.of_all, base.of_all),
            "seeds": (c.per_round() / base.per_round()).tolist(),
            "drift": float(c.of_all.spent()),
            "speed": geometric(paces[rule] / paces[rules[0]]),
        }
        for rule, c in counted.items()
    }


def _live_table(figures: dict[str, Any], cpu: bool) -> str:
    kind = "processor time" if cpu else "clock"
    header = ["rule", "tokens a round", "over `standard`", "by seed", "drift",
              f"tokens a second over `standard`'s, {kind}"]  # fmt: skip
    rows = [
        [
            f"`{rule}`", f"{f['per_round']:.3f}", _three(f["more"]),
            ", ".join(f"{x:.3f}" for x in f["seeds"]), f"{f['drift']:.4f}", show(f["speed"]),
        ]
        for rule, f in figures.items()
    ]  # fmt: skip
    return table(header, rows)
