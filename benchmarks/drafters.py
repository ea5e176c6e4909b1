"""Who drafts for a target: what is kept, what a step takes, and how fast that is.

By replay (`auto` beside the best fixed length), or live.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import forerun
from benchmarks.common import interleaved, provenance, resumed, save, show, table, tasks
from benchmarks.rule_costs import sources
from benchmarks.starting_lengths import chats
from forerun import zoo
from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.engine import Sampling
from forerun.engine.meter import Meter
from forerun.lab.bounds.bounds import best_fixed
from forerun.lab.traces.batches import Replayed
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import geometric
from forerun.lab.traces.trace import Trace

SHIPPED = {
    "draft model": None, "kangaroo": "kangaroo", "medusa": "medusa", "lookup": "lookup",
    "suffix": "suffix", "memory": "memory(grow=true)", "memory, then kangaroo":
    "memory(grow=true)+kangaroo",
}  # fmt: skip
SOURCED = {"shared": "shared", "block": "block", "lookup": "lookup"}
REAL = {
    "eagle": "eagle", "memory, then eagle": "memory+eagle", "memory": "memory",
    "suffix": "suffix", "lookup": "lookup",
}  # fmt: skip
METHODS = "plain", "fixed(4)", "auto"
ROWS = 1, 4
LIVE = [f"{method}, {rows}" for rows in ROWS for method in METHODS[1:]]
DEPTH, SLOPE = 12, 0.02
"""Tokens recorded at each place, and what one adds to a pass, in plain passes."""
LEARNING = "auto", "exllama-confidence"
ENGINES = (
    f"auto(high={DEPTH})", f"exllama-confidence(high={DEPTH})", "exllama-confidence",
    f"exllama-ema(high={DEPTH})", "exllama-ema", "sglang-ema", f"goodput(high={DEPTH})",
    f"hf-threshold(length={DEPTH})", "fixed(4)",
)  # fmt: skip
"""Of exllamav3 1.6.5 and 1.4, SGLang, vLLM and transformers."""
RATIOS, STREAMS = (4, 8, 20), 4
"""Cost ratios, and random orders of the prompts."""
OTHER = Task("", "", [*range(5, 21)], Sampling(max_new_tokens=8))
"""What warms up: no prompt that is measured, or `memory` would know its text."""


def main(
    prompts: int, tokens: int, target: str | None, trained: dict[str, str], timed: bool, cpu: bool
) -> None:
    """Measure every drafter over the same prompts; write `drafters.json`, live `drafters-live`, of
    a target other than the shipped pair's with its name behind. An interrupted run goes on."""
    drafts = (SOURCED if target in zoo.NAMES else REAL) if target else SHIPPED
    drafts = trained | drafts | trained  # the files of target and runtime are of the last
    whose = [Path(target).stem.lower()] if target else []
    name = "-".join(["drafters", *["live"] * timed, *whose])
    settings = {"prompts": prompts, "tokens": tokens, "processor_time": cpu}
    results = resumed(name, **settings)
    for drafter in [drafter for drafter in drafts if drafter not in results]:
        how: dict[str, Any] = {} if target else {"dtype": "float32", "runtime": "torch"}
        with _kept(cpu or not timed):
            if timed:
                model, results[drafter] = _live(target, drafts[drafter], how, prompts, tokens)
            else:
                model = forerun.load(target, drafts[drafter], **how)
                results[drafter] = _replayed(model, tasks_of(model, target, prompts, tokens))
        save(name, provenance(model, **settings), results, _text(results, timed, cpu))


def engines(prompts: int, tokens: int) -> None:
    """`auto` beside the rules of other engines, by replay of the shipped pair; write
    `engines-replay.json`."""
    model = forerun.load(dtype="float32")
    trace = record(model, tasks_of(model, None, prompts, tokens), depth=DEPTH)
    orders = np.stack([np.random.default_rng(n).permutation(trace.prompts) for n in range(STREAMS)])
    results: dict[str, dict[str, float]] = {}
    for spec in ENGINES:
        done = {f"c = {c}": stream(trace, spec, Costs.synthetic(c, SLOPE), orders) for c in RATIOS}
        results[spec] = {
            cell: float(one.plain_seconds.sum() / one.seconds.sum()) for cell, one in done.items()
        }
    rows = [[f"`{spec}`", *(f"{x:.2f}" for x in own.values())] for spec, own in results.items()]
    text = (
        f"{trace.prompts} greedy prompts in {STREAMS} random orders as requests of one engine. "
        "Speed over plain decoding where a pass of the target costs c draft steps, and each "
        f"further token of it {SLOPE} of one.\n\n"
        + table(["controller", *next(iter(results.values()))], rows)
    )
    save("engines-replay", provenance(model, prompts=prompts, tokens=tokens), results, text)


@contextmanager
def _kept(cpu: bool) -> Iterator[None]:
    """What is timed and remembered meanwhile is of these runs alone; by the process's own time."""
    clock = time.process_time if cpu else time.perf_counter
    with (
        TemporaryDirectory() as folder,
        patch("time.perf_counter", clock),
        patch.dict(os.environ, {"FORERUN_CACHE": folder}),
    ):
        yield


def tasks_of(model: forerun.Model, target: str | None, prompts: int, tokens: int) -> list[Task]:
    """Greedy prompts of the pair's families, a translator's sources, or chats of a real model."""
    if target and target not in zoo.NAMES:
        return chats(model, prompts, tokens)
    count = prompts * len(zoo.families())
    work = (
        sources(model, target, count, tokens) if target else tasks(model, "test", prompts, tokens)
    )
    return [
        Task(t.family, str(i), t.tokens, Sampling(max_new_tokens=t.max_new_tokens))
        for i, t in enumerate(work)
    ]


def _replayed(model: forerun.Model, work: Sequence[Task]) -> dict[str, Any]:
    """Tokens a round and shares at 4 drafted, and `auto` over the best fixed length."""
    torch.manual_seed(0)
    trace = record(model, work, depth=DEPTH, batch_size=1)
    ratio = model.drafter.ratio(model.target)
    cell = Costs.synthetic(ratio, SLOPE)
    four, (best, length) = replay(trace, "fixed(4)", cell), best_fixed(trace, cell)
    order = np.arange(trace.prompts)
    auto, exllama = (stream(trace, f"{spec}(high={DEPTH})", cell, order) for spec in LEARNING)
    fixed, batched = _together(trace, ratio)
    return {
        "ratio": ratio,
        "tokens_per_round": float(four.committed.sum() / four.rounds.sum()),
        "kept": float(four.accepted.sum() / max(four.drafted.sum(), 1)),
        "auto": geometric(auto.speedup),
        "best_fixed": geometric(best.speedup),
        "length": length,
        "auto_over_fixed": geometric(auto.speedup / best.speedup),
        "exllama_confidence": geometric(exllama.speedup),
        "best_fixed_together": fixed,
        "auto_over_fixed_together": batched,
    }


def _together(trace: Trace, ratio: float) -> tuple[int, float]:
    """Of `ROWS[-1]` texts at a time the best fixed length, and its time over that of `auto`."""
    cell = Costs.synthetic(ratio, SLOPE * ROWS[-1])
    orders = (np.random.default_rng(n).permutation(trace.prompts) for n in range(STREAMS))
    work = np.concatenate(list(orders))  # one after the other, so that few rows end alone

    def seconds(spec: str) -> float:
        engine = Replayed(trace, CONTROLLERS.make(spec), Meter.given(cell), ROWS[-1])
        return float(engine.serve(work).seconds.sum())

    taken = [seconds(f"fixed({n})") for n in range(DEPTH + 1)]
    return int(np.argmin(taken)), min(taken) / seconds(f"auto(high={DEPTH})")


@cache
def _plain(target: str | None, runtime: str, dtype: str) -> forerun.Model:
    return forerun.load(target, "none", runtime=runtime, dtype=dtype)


def _live(
    target: str | None, spec: str | None, how: dict[str, Any], prompts: int, tokens: int
) -> tuple[forerun.Model, dict[str, Any]]:
    """A drafted token's time over a plain pass's, what is kept of four, and × plain by rows."""

    def load() -> forerun.Model:
        if "grow" in (spec or ""):  # each method and batch size learns from its own texts alone
            os.environ["FORERUN_CACHE"] = mkdtemp(dir=os.environ["FORERUN_CACHE"])
        return forerun.load(target, spec, **how)

    model = load()
    fresh: Callable[[], forerun.Model] = load if "grow" in (spec or "") else lambda: model
    plain = _plain(target, model.target.facts.executor, how.get("dtype", "auto"))
    work = tasks_of(model, target, prompts, tokens)
    out: dict[str, Any] = {"texts": 0, "same": 0}
    for rows in ROWS:
        models = {METHODS[0]: plain} | {method: fresh() for method in METHODS[1:]}

        def run(part: Sequence[Task], method: str) -> tuple[float, list[forerun.Completion]]:
            began = time.perf_counter()
            done = models[method].generate(  # noqa: B023 (called before the next turn)
                [task.tokens for task in part], sampling=[task.sampling for task in part],
                controller="fixed(0)" if method == "plain" else method, batch_size=len(part),
            )  # fmt: skip
            return time.perf_counter() - began, done

        for method in METHODS:
            run([OTHER] * rows, method)
        parts = [work[i : i + rows] for i in range(0, len(work), rows)]
        runs = interleaved(parts, METHODS, run, f"{spec or 'draft model'}, {rows} rows")
        times = np.array([[took for took, _ in row] for row in runs])
        for method, taken in zip(METHODS[1:], times.T[1:], strict=True):
            out[f"{method}, {rows}"] = geometric(times[:, 0] / taken)
        texts = [[[d.tokens for d in done] for _, done in row] for row in runs]
        for own, *others in texts:
            out["texts"] += sum(len(own) for _ in others)
            out["same"] += sum(a == b for other in others for a, b in zip(own, other, strict=True))
        if rows == 1:
            out |= _counted([row[0][1][0] for row in runs], [row[1][1][0] for row in runs])
    return model, out


def _counted(
    plain: Sequence[forerun.Completion], four: Sequence[forerun.Completion]
) -> dict[str, float]:
    """Of texts one at a time; in a round that reads its prompt the drafter may, too."""
    total = {n: sum(getattr(d.stats, n) for d in four)
             for n in ("tokens", "rounds", "drafted", "accepted")}  # fmt: skip
    steps = [r.draft_seconds / r.drafted for d in four for r in d.rounds[1:] if r.drafted]
    passes = [r.verify_seconds for d in plain for r in d.rounds[1:]]
    step = float(np.median(steps or [0.0]))
    return {
        "tokens_per_round": total["tokens"] / total["rounds"],
        "kept": total["accepted"] / max(total["drafted"], 1),
        "step": step / float(np.median(passes)),
        "step_ms": step * 1e3,
    }


def _text(results: dict[str, Any], timed: bool, cpu: bool) -> str:
    if not timed:
        rows = [
            [
                name, f"{one['ratio']:.0f}", f"{one['tokens_per_round']:.2f}", f"{one['kept']:.2f}",
                f"{one['best_fixed']['mean']:.2f} ({one['length']})", f"{one['auto']['mean']:.2f}",
                "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**one["auto_over_fixed"]),
                f"{one['exllama_confidence']['mean']:.2f}",
                f"{one['auto_over_fixed_together']:.3f} ({one['best_fixed_together']})",
            ]
            for name, one in results.items()
        ]  # fmt: skip
        header = ["drafter", "c", "tokens a round", "kept", "best fixed length", "`auto`",
                  "`auto` over it", "`exllama-confidence`",
                  f"`auto` over it, {ROWS[-1]} rows"]  # fmt: skip
        return (
            "Greedy prompts, one after another; tokens a round and share of the drafted tokens "
            "that is kept at 4 drafted. Speed-ups over plain decoding by replay, where a step "
            "costs 1/c of a pass (by the models' sizes) and each further token of a pass "
            f"{SLOPE} of one. Of {ROWS[-1]} texts at a time, {STREAMS} times all in random "
            "orders, the time of all at the best length (in brackets) over that of `auto`, where a "
            f"token more in every row costs {ROWS[-1]} times as much.\n\n" + table(header, rows)
        )
    rows = [
        [
            name, f"{one['tokens_per_round']:.2f}", f"{one['kept']:.2f}", f"{one['step']:.2f}",
            f"{one['step_ms']:.1f}", *(show(one[n]) for n in LIVE),
        ]
        for name, one in results.items()
    ]  # fmt: skip
    header = ["drafter", "tokens a round", "kept", "step", "ms", *(f"`{n}`" for n in LIVE)]
    same, texts = (sum(one[n] for one in results.values()) for n in ("same", "texts"))
    return (
        "Greedy, live, " + ("processor time. " if cpu else "by the clock. ") + "At 4 drafted, one "
        "text at a time: tokens a round, share of the drafted tokens that is kept, and what a "
        "drafted token takes, in plain passes and ms. Times plain decoding in turns, by "
        "controller and rows, mean over texts or batches of them with a 95 % bootstrap interval; "
        f"{same} of {texts} texts are plain decoding's.\n\n" + table(header, rows)
    )
