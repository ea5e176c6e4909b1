"""The default controller live: beside replay's prediction, and on pairs made bad on purpose."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

import forerun
from benchmarks.common import (
    PENALTY,
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
from forerun.engine.meter import Meter
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.measuring import measure
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import Rounds
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray

METHODS = ["auto", "fixed(3)", "fixed(7)", "hf-heuristic", "hf-threshold", "gammatune",
           "gammatune+", "cm-asd", "sglang-ema", "goodput"]  # fmt: skip
PARTS = 10


def predicted(model: forerun.Model, prompts: int, tokens: int, long: bool = False) -> None:
    """Live speed-up of ten controllers beside what replay predicts; write `live.json`, or with
    `-long` and `-torch` in its name."""
    # The time that penalties take is not among the costs.
    work = [t for t in tasks(model, "test", prompts, tokens, long) if t.family not in PENALTY]
    trace = recorded(model, work)
    methods: list[str | None] = [None, *METHODS]
    for method in methods:
        generate(model, work[0], method)
    context = int(np.mean([len(t.tokens) for t in work]) + trace.sizes.mean() / 2)
    # A shared machine is not as fast all the time: each part has its own costs.
    parts = [np.arange(part, len(work), PARTS) for part in range(PARTS)]
    runs, tables = {}, []
    for part in parts:
        [table] = measure(model, [1], [context])
        costs = table.at(1, context)
        tables.append(replace(costs, prefill=True))  # live, first passes read prompts
        model.meter = Meter.given(tables[-1].asked)
        model.forget()
        done = interleaved(
            [work[i] for i in part], methods, lambda t, m: generate(model, t, m), "live"
        )
        runs |= dict(zip(part.tolist(), done, strict=True))
    plain = np.array([np.divide(*_later(runs[i][0])) for i in range(len(work))])
    rows, cells = [], {}
    for index, method in enumerate(METHODS, 1):
        replayed = np.zeros((4, len(work)))
        for part, cell in zip(parts, tables, strict=True):
            replayed[:, part] = _replayed(trace.take(part), method, cell)
        seconds, written = np.array([_later(runs[i][index]) for i in range(len(work))]).T
        compared = (written > 0) & (replayed[1] > 0)
        live = (plain * written / seconds)[compared]
        predicted = replayed[0][compared]
        stats = [runs[i][index].stats for i in range(len(work))]
        counted = np.array([[s.rounds, s.drafted] for s in stats]).T
        cells[method] = {
            "live": geometric(live),
            "predicted": geometric(predicted),
            "live over predicted": geometric(live / predicted),
            "same rounds": int((counted == replayed[2:]).all(0).sum()),
            "identical": sum(runs[i][index].tokens == runs[i][0].tokens for i in range(len(work))),
        }
        c = cells[method]
        rows.append([method, show(c["live"]), show(c["predicted"]),
                     show(c["live over predicted"]), f"{c['same rounds']}/{len(work)}",
                     f"{c['identical']}/{len(work)}"])  # fmt: skip
    text = (
        f"Speed-up over plain decoding from the second round on (the first also reads the prompt), "
        f"{len(work)} test prompts without penalties, greedy, batch 1, live and paired; and what "
        "replay of a trace "
        f"predicts from costs, measured anew before every {len(parts[0])} prompts. Rounds: prompts "
        "whose rounds and drafted tokens are the predicted ones (`auto` is given the same costs). "
        "Who "
        "drafts far in the first round has less left to gain, so the lines are not for comparison "
        "with each other.\n\n"
        + table(
            ["controller", "live", "predicted", "live / predicted", "rounds", "identical"], rows
        )
    )
    runtime = model.target.facts.executor
    name = "live" + "-long" * long + f"-{runtime}" * (runtime != "openvino")
    made = provenance(model, prompts=prompts, tokens=None if long else tokens)
    save(name, made, cells, text)


def _replayed(trace: Trace, method: str, cell: Cell) -> list[FloatArray]:
    """Of replay: speed-up and tokens from the second round on, rounds, drafted tokens."""
    watch = _Later(trace)
    if method == "auto":
        replayed = stream(trace, method, cell, np.arange(trace.prompts), watch)
    else:
        replayed = replay(trace, method, cell, watch)
    speedup = cell.plain * watch.tokens / np.where(watch.tokens > 0, watch.seconds, 1)
    return [speedup, watch.tokens, replayed.rounds, replayed.drafted]


def _later(done: forerun.Completion) -> tuple[float, int]:
    """Seconds and tokens of all rounds but the first; 1 s and no token if there are no others."""
    rounds = done.rounds[1:]
    seconds = sum(r.draft_seconds + r.verify_seconds + r.other_seconds for r in rounds)
    return seconds or 1.0, sum(r.committed for r in rounds)


class _Later:
    """A `watch` that adds up likewise."""

    def __init__(self, trace: Trace) -> None:
        self.seconds, self.tokens = np.zeros(trace.prompts), np.zeros(trace.prompts)
        self._sizes = trace.sizes

    def __call__(self, rounds: Rounds) -> None:
        on = rounds.at > 0
        prompt = rounds.prompt[on]
        self.seconds[prompt] += rounds.seconds[on]
        kept = np.minimum(rounds.accepted + 1, self._sizes[rounds.prompt] - rounds.at)
        self.tokens[prompt] += kept[on]


def hopeless(prompts: int, tokens: int) -> None:
    """`auto` on pairs made bad on purpose, against plain decoding; write `never-slower.json`."""
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.AutoConfig.from_pretrained(zoo.DRAFT)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / name).write_bytes((zoo.DRAFT / name).read_bytes())
        pairs = {
            "untrained draft": forerun.load(draft=folder, dtype="float32"),
            "draft as slow as the target (the target itself)": forerun.load(
                draft=zoo.TARGET, dtype="float32"
            ),
            "shipped pair": forerun.load(dtype="float32"),
            "shipped target, prompt lookup": forerun.load(draft="lookup", dtype="float32"),
        }
    methods: list[str | None] = [None, "auto", "fixed(5)", "gammatune+", None]
    rows, cells = [], {}
    for name, model in pairs.items():
        work = tasks(model, "test", prompts, tokens)
        for method in methods:
            generate(model, work[0], method)
        runs = interleaved(work, methods, lambda t, m, model=model: generate(model, t, m), name)
        cells[name] = {
            m or "plain again": geometric([r[0].stats.seconds / r[i].stats.seconds for r in runs])
            | {"total": sum(r[0].stats.seconds for r in runs)
               / sum(r[i].stats.seconds for r in runs)}
            for i, m in enumerate(methods) if i
        }  # fmt: skip
        sums = [f"{cells[name][m]['total']:.3f}" for m in ("auto", "plain again")]
        rows.append([name, *[show(c) for c in cells[name].values()], *sums])
    text = (
        f"Speed over plain decoding, greedy, batch 1, {len(work)} test prompts of up to {tokens} "
        "tokens, prefill of both models included, live and paired.\n\n"
        + table(["pair", *cells[name], "auto, summed time", "plain again, summed time"], rows)
    )
    save("never-slower", provenance(model, prompts=prompts, tokens=tokens), cells, text)
