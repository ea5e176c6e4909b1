"""Recording any drafter: the rounds of its replay are those of the live engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.costs import Costs
from forerun.engine import Sampling
from forerun.lab.bounds.bounds import oracle
from forerun.lab.traces.hosted import HostRecorder
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.trace import SIGNALS, Trace
from forerun.lab.traces.tune import tune
from forerun.model import Model
from marks import slow_but
from test_drafters import CASES

CELL = Costs.synthetic(10, slope=0.02)
REMEMBERS = {"lookahead", "model by text"}
"""What they draft depends on what was drafted before, or on how much is asked for."""
TWO = {"chain", "chain with eagle", "chain with medusa"}
"""Who drafts depends on how much is asked for."""
ALIKE = {"adadecode", "block", "chain with eagle", "chain with medusa", "eagle3", "mtp", "shared"}
"""Run what others run."""
SILENT = {"lookup", "rest", "lookahead", "model by text"}
"""Have no distribution."""


def recorded(name: str, temperature: float = 0.0) -> tuple[Model, list[Task], Trace]:
    case = CASES[name]()
    model = Model(case.target, case.drafter)
    tasks = [
        Task("ab"[i % 2], str(i), ids, Sampling(
            max_new_tokens=12 + 3 * i, temperature=temperature, seed=i, ignore_eos=True,
        ))
        for i, ids in enumerate(case.sources or case.prompts)
    ]  # fmt: skip
    return model, tasks, record(model, tasks, depth=21)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    slow_but([name for name in CASES if name != "none"], lambda name: name not in ALIKE),
)
def test_replayed_rounds_are_those_of_the_live_engine(name: str, temperature: float) -> None:
    model, tasks, trace = recorded(name, temperature)
    if name in SILENT:
        assert all(
            np.isnan(values[trace.lengths > 0, 0]).all() for values in trace.signals.values()
        )
    for spec in ("fixed(6)", "gammatune+(length=3,high=6)"):
        done = model.generate(
            [task.tokens for task in tasks], controller=spec, batch_size=1,
            sampling=[task.sampling for task in tasks],
        )  # fmt: skip
        ours = replay(trace, spec, CELL)
        assert [trace.tokens[i, : trace.sizes[i]].tolist() for i in range(len(done))] == [
            d.tokens for d in done
        ]
        if name in REMEMBERS | TWO:
            continue
        for field in ("rounds", "drafted", "accepted"):
            live = [getattr(d.stats, field) for d in done]
            assert getattr(ours, field).tolist() == live, (spec, field)


def test_what_another_engine_drafts_is_recorded_alike(tmp_path: Path) -> None:
    """Shown the drafts of a trace, in another order of texts."""
    _, _, trace = recorded("lookup")
    recorder = HostRecorder(str(tmp_path / "trace"), trace.depth, {"draft": {"name": "theirs"}})
    order = [*range(trace.prompts)][::-1]
    for i in order:
        recorder.add("never ended", 0, [1, 2])
        for place, length in enumerate(trace.lengths[i, : trace.sizes[i]]):
            recorder.add(str(i), place, [*trace.draft_tokens[i, place, :length].tolist(), -1])
    for i in order:
        counts = int(trace.prompt_tokens[i]), int(trace.budgets[i])
        recorder.end(str(i), trace.tokens[i, : trace.sizes[i]].tolist(), counts)
    recorder.write()
    again = Trace.read(tmp_path / "trace")
    assert [again.ids[i] for i in order] == list(trace.ids)
    assert again.about["blind"]
    for spec in ("fixed(2)", "gammatune+(length=3,high=6)", "auto(cost=10)"):
        ours, theirs = (replay(one, spec, CELL) for one in (trace, again.take(order)))
        for field in ("rounds", "drafted", "accepted"):
            assert getattr(ours, field).tolist() == getattr(theirs, field).tolist(), spec


@pytest.mark.parametrize("name", ["medusa", "kangaroo", "suffix", "lookup", "rest"])
def test_replayed_second_choices_are_those_of_the_live_engine(name: str) -> None:
    """Kangaroo's layers run no trees, those without a model have no distribution: no choices."""
    spec, (model, tasks, trace) = "auto(cost=10,leaves=2)", recorded(name)
    done = model.generate(
        [task.tokens for task in tasks], controller=spec, batch_size=1,
        sampling=[task.sampling for task in tasks],
    )  # fmt: skip
    ours = stream(trace, spec, CELL, np.arange(trace.prompts))
    assert ours.rounds.tolist() == [d.stats.rounds for d in done]
    assert ours.drafted.tolist() == [d.stats.drafted for d in done]
    assert ours.leaves.tolist() == [d.stats.counters.get("leaves", 0) for d in done]
    assert ours.leaves.any() == (name == "medusa")


@pytest.mark.parametrize("name", ["lookup", "suffix", "eagle"])
def test_bounds_tuning_and_auto_take_any_trace(name: str) -> None:
    trace = recorded(name)[2]
    best = oracle(trace, CELL)
    for spec in ("auto", "hf-threshold", "cm-asd", "goodput", "fixed(4)"):
        assert (replay(trace, spec, CELL).seconds >= best.seconds - 1e-9).all()
    assert tune(trace, CELL, ["fixed"], budget=7).best.after <= best.mean + 1e-9


def test_a_file_holds_what_was_not_said(tmp_path) -> None:
    trace = recorded("lookup")[2]
    trace.write(tmp_path / "t")
    again = Trace.read(tmp_path / "t")
    for name in SIGNALS:
        np.testing.assert_array_equal(again.signals[name], trace.signals[name])
    np.testing.assert_array_equal(again.lengths, trace.lengths)
    assert (trace.lengths[trace.valid] < 21).any()
