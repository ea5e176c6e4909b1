"""Choose GammaTune's defaults on validation prompts.

Each prompt is recorded once: the target's greedy text, and what the draft would say from every
position of it, to full depth. Controllers are then replayed over the recording, all prompts at
once, with measured costs; greedy replay is exact, so settings differ by their merit and not by
the machine's noise.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.progress import track

import forerun
from benchmarks.common import Task, console, provenance, save, table, tasks
from benchmarks.overhead import WIDTHS, forward_costs
from forerun.controllers import CONTROLLERS
from forerun.drafters.model import ModelDrafter
from forerun.engine.sampling import Sampler, Sampling
from forerun.signals import measure
from forerun.types import FloatArray, IntArray, RoundOutcome, Signals, Stop

DEPTH = 24
WEIGHTS = (
    "sharpness=1", "sharpness=0.5", "sharpness=2", "entropy=1,margin=0,softmax=0",
    "entropy=0,margin=1,softmax=0", "entropy=0,margin=0,softmax=1", "literal=true",
)  # fmt: skip
SIGNALS = tuple(f.name for f in fields(Signals))


@dataclass(frozen=True)
class Trace:
    """What the draft says at every position of some greedy texts."""

    sizes: IntArray
    """`(prompts,)` tokens of each text, at most T."""
    budgets: IntArray
    """`(prompts,)` tokens each text was allowed."""

    matches: IntArray
    """`(prompts, T)` how many tokens drafted from a position the target keeps, ≤ DEPTH."""
    ends: IntArray
    """`(prompts, T)` tokens drafted up to and with the first end of text; DEPTH + 1 if none."""
    signals: dict[str, FloatArray]
    """Each field of `Signals`, `(prompts, T, DEPTH)`, of each drafted token."""

    def at(self, rows: IntArray, place: IntArray) -> Signals:
        """What the draft says from one position per prompt on."""
        return Signals(**{name: values[rows, place] for name, values in self.signals.items()})


def record(model: forerun.Model, work: list[Task]) -> Trace:
    """Draft from every true prefix, as rows of one batch per prompt."""
    assert isinstance(model.drafter, ModelDrafter)
    draft, sizes, parts = model.drafter.rows, [], []
    longest = max(task.max_new_tokens for task in work)
    for task in track(work, "recording", console=console, transient=True):
        how = Sampling(
            max_new_tokens=task.max_new_tokens, repetition_penalty=task.repetition_penalty
        )
        text = model.generate([task.tokens], plain=True, sampling=how)[0]
        size = len(text.tokens)
        known = [*task.tokens, *text.tokens]
        starts = [len(task.tokens) + p for p in range(size)]
        draft.join([known[:n] for n in starts], DEPTH)
        pieces = [[known[n - 1]] for n in starts]
        sampler = Sampler([how] * size, [frozenset()] * size)
        texts = [SimpleNamespace(context=known[:n], prompt=len(task.tokens)) for n in starts]
        drafted: list[Any] = []
        seen: list[dict[str, Any]] = []
        for step in range(DEPTH):
            logits = draft.feed(pieces, want="last")
            ahead = np.stack(drafted, 1).tolist() if drafted else [[]] * size
            tokens = sampler.process(logits.unsqueeze(1), texts, ahead, step)[:, 0].argmax(-1)
            seen.append(measure(logits, tokens, set(SIGNALS)))
            drafted.append(tokens.numpy())
            pieces = [[t] for t in tokens.tolist()]
        draft.keep([])
        truth = np.full((size, DEPTH), -1)
        for p in range(size):
            rest = text.tokens[p : p + DEPTH]
            truth[p, : len(rest)] = rest
        hit = np.stack(drafted, 1) == truth
        over = np.isin(np.stack(drafted, 1), list(model.eos))
        ends = np.where(over.any(1), over.argmax(1) + 1, DEPTH + 1)
        said = [torch.stack([s[name] for s in seen], 1).double().numpy() for name in SIGNALS]
        found = (hit.cumprod(1).sum(1), ends, *said)
        sizes.append(size)
        parts.append([np.pad(f, [(0, longest - size), *[(0, 0)] * (f.ndim - 1)]) for f in found])
    budgets = np.array([task.max_new_tokens for task in work])
    matches, ends, *said = (np.stack(field) for field in zip(*parts, strict=True))
    signals = dict(zip(SIGNALS, said, strict=True))
    return Trace(np.array(sizes), budgets, matches, ends, signals)


def replay(trace: Trace, spec: str) -> dict[str, IntArray | FloatArray]:
    """Run a controller over every prompt; rounds, drafted tokens and verify widths per prompt."""
    controller = CONTROLLERS.make(spec)
    size, prompts = trace.sizes, len(trace.sizes)
    rows = np.arange(prompts)
    state, at = controller.start(prompts), np.zeros(prompts, dtype=np.int64)
    totals = {"rounds": np.zeros(prompts, np.int64), "drafted": np.zeros(prompts, np.int64),
              "widths": np.zeros((prompts, DEPTH + 2), np.int64)}  # fmt: skip
    while (alive := at < size).any():
        here = np.minimum(at, size - 1)
        room = np.maximum(trace.budgets - at - 1, 0)
        wanted = controller.limit(state)
        limit = np.minimum(wanted, np.minimum(room, DEPTH))
        stopped = np.where(room < wanted, Stop.BUDGET, Stop.LIMIT)
        drafted, active = np.zeros(prompts, np.int64), alive & (limit > 0)
        said, steps = trace.at(rows, here), drafted.copy()
        while active.any():
            drafted += active
            steps += active
            depth = int(drafted.max())
            stop = active & ~controller.keep_going(state, drafted, upto(said, depth))
            stopped[stop] = Stop.CONFIDENCE
            over = active & (drafted >= trace.ends[rows, here])
            active &= ~stop & (drafted < limit)
            if controller.drops_last:
                drafted -= stop
                over &= ~stop
            stopped[over] = Stop.END_OF_TEXT
            active &= ~over
        if controller.previews and drafted.any():
            planned = controller.plan(state, drafted, upto(said, int(drafted.max())))
            stopped = np.where(planned < drafted, Stop.CONFIDENCE, stopped)
            drafted = planned
        accepted = np.minimum(drafted, trace.matches[rows, here])
        totals["rounds"] += alive
        totals["drafted"] += np.where(alive, steps, 0)
        totals["widths"][rows, drafted + 1] += alive
        prob = (np.arange(DEPTH) < accepted[:, None]).astype(float)
        state = controller.observe(
            state,
            RoundOutcome(drafted, accepted, prob, stopped, said),
        )
        at = np.where(alive, at + accepted + 1, at)
    return totals


def upto(signals: Signals, depth: int) -> Signals:
    """The first `depth` drafted tokens only."""
    return Signals(**{name: getattr(signals, name)[:, :depth] for name in SIGNALS})


def seconds(totals: dict[str, Any], costs: dict[str, Any]) -> FloatArray:
    """Predicted milliseconds per prompt."""
    verify = np.interp(np.arange(DEPTH + 2), WIDTHS, [costs["target"][str(w)] for w in WIDTHS])
    return totals["widths"] @ verify + totals["drafted"] * costs["draft"]


def main(model: forerun.Model, prompts: int, tokens: int) -> None:
    """Record, replay a grid, write `sweep.json`."""
    work = tasks(model, "val", prompts, tokens)
    costs = forward_costs(model)
    trace = record(model, work)
    families = np.array([t.family for t in work])

    def score(spec: str) -> dict[str, Any]:
        plain = trace.sizes * costs["target"]["1"]
        speed = plain / seconds(replay(trace, spec), costs)
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
            f"goodput(cost={cost},width_cost={width})"
            for cost, width in itertools.product((3, 4.2, 6), (0.0, 0.02, 0.05))
        ],
        "bandit": [
            f"bandit(policy={policy},explore={explore})"
            for policy, explore in itertools.product(("ucb", "thompson"), (0.1, 0.25, 1.0))
        ],
    }  # fmt: skip
    found = {
        name: sorted(
            (score(s) for s in track(specs, name, console=console, transient=True)),
            key=lambda r: -r["all"],
        )
        for name, specs in grid.items()
    }
    names = sorted(set(families))
    rows = [
        [f"`{r['spec']}`", f"{r['all']:.3f}", *[f"{r[f]:.2f}" for f in names]]
        for results in found.values()
        for r in (*results[:4], results[-1])
    ]
    plus = found["gammatune+"]
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
            max((r for r in found["cm-asd"] if weight in r["spec"]), key=lambda r: r["all"])
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
        {"costs": costs, "grid": found}, text,
    )  # fmt: skip
