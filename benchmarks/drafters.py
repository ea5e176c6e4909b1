"""Who drafts for a target: what is kept, what a step takes, and `auto` beside fixed lengths."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import forerun
from benchmarks.common import interleaved, provenance, resumed, save, show, table, tasks
from benchmarks.real_models import KINDS
from forerun.costs import Costs
from forerun.engine import Sampling
from forerun.lab.bounds import best_fixed
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import geometric

SHIPPED = {
    "draft model": None, "kangaroo": "kangaroo", "medusa": "medusa", "lookup": "lookup",
    "suffix": "suffix", "memory": "memory(grow=true)", "memory, then kangaroo":
    "memory(grow=true)+kangaroo",
}  # fmt: skip
REAL = {
    "eagle": "eagle", "memory, then eagle": "memory+eagle", "memory": "memory",
    "suffix": "suffix", "lookup": "lookup",
}  # fmt: skip
METHODS = "plain", "fixed(4)", "auto"
ROWS = 1, 4
LIVE = [f"{method}, {rows}" for rows in ROWS for method in METHODS[1:]]
DEPTH, SLOPE = 12, 0.02
"""Tokens recorded at each place, and what one adds to a pass, in plain passes."""


def main(prompts: int, tokens: int, target: str | None, eagle3: str | None, timed: bool) -> None:
    """Measure every drafter over the same prompts, one after another; write `drafters.json`, of a
    `target` other than the shipped one `drafters-NAME.json`. An interrupted run goes on."""
    drafts = dict(REAL if target else SHIPPED) | ({"eagle3": eagle3} if eagle3 else {})
    name = f"drafters-{Path(target).stem.lower()}" if target else "drafters"
    settings = {"prompts": prompts, "tokens": tokens, "depth": DEPTH, "timed": timed}
    results = resumed(name, **settings)
    for drafter in [drafter for drafter in drafts if drafter not in results]:
        # What is remembered is of these prompts alone; time is the process's own.
        with TemporaryDirectory() as cache, patch("time.perf_counter", time.process_time):
            os.environ["FORERUN_CACHE"] = cache
            on_torch = not target or drafter == "eagle3"  # which shares its target's embeddings
            how: dict[str, Any] = {"dtype": "float32", "runtime": "torch"} if on_torch else {}
            model = forerun.load(target, drafts[drafter], **how)
            work = _tasks(model, prompts, tokens, real=target is not None)
            results[drafter] = _replayed(model, work)
            if timed and "grow" not in (drafts[drafter] or ""):  # it would know every text by now
                how["runtime"] = model.target.facts.executor
                plain = forerun.load(target, "none", **how)
                results[drafter] |= _timed(plain, model, work)
            save(name, provenance(model, **settings), results, _text(results, timed))


def _tasks(model: forerun.Model, prompts: int, tokens: int, real: bool) -> list[Task]:
    if not real:
        return [
            Task(t.family, str(i), t.tokens, Sampling(max_new_tokens=t.max_new_tokens))
            for i, t in enumerate(tasks(model, "test", prompts, tokens))
        ]
    how = Sampling(max_new_tokens=tokens)
    ask = model.tokenizer.apply_chat_template
    return [
        Task(kind, str(i), list(ask([{"role": "user", "content": form.format(filling)}],
                                    add_generation_prompt=True, return_dict=False)), how)
        for kind, (form, fillings) in KINDS.items()
        for i, filling in enumerate(fillings[:prompts])
    ]  # fmt: skip


def _replayed(model: forerun.Model, work: Sequence[Task]) -> dict[str, Any]:
    """Tokens a round and shares at 4 drafted, and `auto` over the best fixed length."""
    torch.manual_seed(0)
    trace = record(model, work, depth=DEPTH, batch_size=1)
    ratio = model.drafter.ratio(model.target)
    cell = Costs.synthetic(ratio, SLOPE)
    four, (best, length) = replay(trace, "fixed(4)", cell), best_fixed(trace, cell, most=DEPTH)
    auto = stream(trace, f"auto(high={DEPTH})", cell, np.arange(trace.prompts))
    return {
        "ratio": ratio,
        "tokens_per_round": float(four.committed.sum() / four.rounds.sum()),
        "kept": float(four.accepted.sum() / max(four.drafted.sum(), 1)),
        "auto": geometric(auto.speedup),
        "best_fixed": geometric(best.speedup),
        "length": length,
        "auto_over_fixed": geometric(auto.speedup / best.speedup),
    }


def _timed(plain: forerun.Model, model: forerun.Model, work: Sequence[Task]) -> dict[str, Any]:
    """By the process's own time: a drafted token's over a plain pass's, × plain by rows."""
    paces: dict[str, list[float]] = {}

    def run(part: Sequence[Task], method: str) -> float:
        began = time.process_time()
        done = (plain if method == "plain" else model).generate(
            [task.tokens for task in part], sampling=[task.sampling for task in part],
            controller="fixed(0)" if method == "plain" else method, batch_size=len(part),
        )  # fmt: skip
        took = time.process_time() - began
        for r in done[0].rounds[1:]:  # in the first the drafter may read the prompt
            each = r.draft_seconds / r.drafted if r.drafted else r.verify_seconds
            paces.setdefault(f"{method}, {len(part)}, {r.drafted > 0}", []).append(each)
        return took

    out: dict[str, Any] = {}
    for rows in ROWS:
        parts = [work[i : i + rows] for i in range(0, len(work) - rows + 1, rows)]
        for method in METHODS:  # warm up
            run(parts[0], method)
        runs = np.array(interleaved(parts, METHODS, run, f"{rows} rows"))
        for method, taken in zip(METHODS[1:], runs.T[1:], strict=True):
            out[f"{method}, {rows}"] = geometric(runs[:, 0] / taken)
    step, passed = (float(np.median(paces[n])) for n in ("fixed(4), 1, True", "plain, 1, False"))
    return out | {"step": step / passed, "step_seconds": step}


def _text(results: dict[str, Any], timed: bool) -> str:
    rows = []
    for name, one in results.items():
        live = [show(one[n]) if n in one else "–" for n in LIVE]
        rows.append([
            name, f"{one['ratio']:.0f}", f"{one['tokens_per_round']:.2f}", f"{one['kept']:.2f}",
            f"{one['best_fixed']['mean']:.2f} ({one['length']})", f"{one['auto']['mean']:.2f}",
            "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**one["auto_over_fixed"]),
            *([f"{one['step']:.2f}" if "step" in one else "–", *live] if timed else []),
        ])  # fmt: skip
    header = [
        "drafter", "c", "tokens a round", "kept", "best fixed length", "`auto`", "`auto` over it",
        *(["step", *(f"live, `{n}`" for n in LIVE)] if timed else []),
    ]  # fmt: skip
    clock = (
        "By the process's own time, one thread: what a drafted token takes, in plain passes, and "
        "times plain decoding, by controller and rows. "
    )
    return (
        "Greedy prompts, one after another; tokens a round and share of the drafted tokens that is "
        "kept at 4 drafted. Speed-ups over plain decoding by replay, where a step costs 1/c of a "
        f"pass (by the models' sizes) and each further token of a pass {SLOPE} of one. "
        f"{clock * timed}\n\n" + table(header, rows)
    )
