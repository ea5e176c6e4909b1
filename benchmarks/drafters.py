"""Who drafts for the shipped target: what is kept, and `auto` beside fixed lengths, by replay."""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import forerun
from benchmarks.common import provenance, resumed, save, table, tasks
from forerun.costs import Costs
from forerun.engine import Sampling
from forerun.lab.bounds import best_fixed
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import geometric

DRAFTS = {
    "draft model": None, "kangaroo": "kangaroo", "medusa": "medusa", "lookup": "lookup",
    "suffix": "suffix", "memory": "memory(grow=true)", "memory, then kangaroo":
    "memory(grow=true)+kangaroo",
}  # fmt: skip
DEPTH, SLOPE = 12, 0.02
"""Tokens recorded at each place, and what one adds to a pass, in plain passes."""


def main(prompts: int, tokens: int) -> None:
    """Record every drafter over the same prompts, one after another; write `drafters.json`. An
    interrupted run goes on."""
    settings = {"prompts": prompts, "tokens": tokens, "depth": DEPTH}
    results = resumed("drafters", **settings)
    for name, draft in DRAFTS.items():
        if name in results:
            continue
        with TemporaryDirectory() as cache:  # what is remembered is of these prompts alone
            os.environ["FORERUN_CACHE"] = cache
            model = forerun.load(draft=draft, dtype="float32", runtime="torch")
            results[name] = _measured(model, prompts, tokens)
            save("drafters", provenance(model, **settings), results, _text(results))


def _measured(model: forerun.Model, prompts: int, tokens: int) -> dict[str, Any]:
    """Tokens a round and shares at 4 drafted, and speed-ups of `auto` and the best fixed length."""
    work = [
        Task(t.family, str(i), t.tokens, Sampling(max_new_tokens=t.max_new_tokens))
        for i, t in enumerate(tasks(model, "test", prompts, tokens))
    ]
    torch.manual_seed(0)
    trace = record(model, work, depth=DEPTH, batch_size=1)
    ratio = model.drafter.ratio(model.target)
    cell = Costs.synthetic(ratio, SLOPE)
    four, best = replay(trace, "fixed(4)", cell), best_fixed(trace, cell, most=DEPTH)
    auto = stream(trace, f"auto(high={DEPTH})", cell, np.arange(trace.prompts))
    return {
        "ratio": ratio,
        "tokens_per_round": float(four.committed.sum() / four.rounds.sum()),
        "kept": float(four.accepted.sum() / max(four.drafted.sum(), 1)),
        "auto": geometric(auto.speedup),
        "best_fixed": geometric(best.overall.speedup),
        "length": best.length,
        "auto_over_fixed": geometric(auto.speedup / best.overall.speedup),
    }


def _text(results: dict[str, Any]) -> str:
    rows = [
        [
            name, f"{one['ratio']:.0f}", f"{one['tokens_per_round']:.2f}", f"{one['kept']:.2f}",
            f"{one['best_fixed']['mean']:.2f} ({one['length']})", f"{one['auto']['mean']:.2f}",
            "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**one["auto_over_fixed"]),
        ]
        for name, one in results.items()
    ]  # fmt: skip
    header = [
        "drafter", "c", "tokens a round", "kept", "best fixed length", "auto", "auto over it",
    ]  # fmt: skip
    return (
        "Greedy test prompts, one after another; tokens a round and share of the drafted tokens "
        f"that is kept at 4 drafted. Speed-ups over plain decoding by replay, where a step costs "
        f"1/c of a pass (by the models' sizes) and each further token of a pass {SLOPE} of one.\n\n"
        + table(header, rows)
    )
