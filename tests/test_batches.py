"""Replayed batches count exactly what the live engine counts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

import forerun
from forerun import Model, zoo
from forerun.controllers import CONTROLLERS, State
from forerun.controllers.fixed import FixedLength
from forerun.costs import Costs
from forerun.drafters.model import ModelDrafter
from forerun.engine import Sampling
from forerun.engine.meter import Meter
from forerun.errors import SettingError
from forerun.lab.traces.batches import replay_batches
from forerun.lab.traces.record import Task
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import Replay, Rounds
from forerun.lab.traces.trace import Trace
from forerun.runtime.base import CHUNK
from forerun.testing import ScriptedModel
from forerun.types import RoundOutcome
from marks import spread
from test_engine import chaotic, noisy
from test_replay import live, recorded

BY_ROWS = {
    1: Costs.synthetic(6, slope=0.02),
    4: Costs(0.3, ((1, 1.0), (2, 1.3), (4, 1.6)), 0.1, batch=4, first=0.2),
    16: Costs.synthetic(4, slope=0.12),
}


def costs(rows: int) -> Costs:
    """A batch gets dearer as it grows."""
    return BY_ROWS[1 if rows == 1 else 4 if rows <= 4 else 16]


def agree(model: Model, tasks: list[Task], trace: Trace, spec: str, rows: int) -> Replay:
    """The replay, after comparing its every round with a live run of the same batches."""
    fresh = Model(model.target, model.drafter)
    fresh.eos, fresh.meter = model.eos, Meter.given(costs)
    seen: list[list[tuple[int, ...]]] = [[] for _ in tasks]

    def watch(now: Rounds) -> None:
        for i, *counts in zip(now.prompt, now.drafted, now.accepted, now.stopped_by, strict=True):
            seen[i].append(tuple(map(int, counts)))

    result = replay_batches(trace, spec, costs, rows, watch=watch)
    assert not result.capped.any(), "the trace is too shallow for an exact replay"
    for i, done in enumerate(live(fresh, tasks, spec, rows)):
        assert seen[i] == [(r.drafted, r.accepted, int(r.stopped_by)) for r in done.rounds]
        stats = done.stats
        counts = (stats.rounds, stats.drafted, stats.accepted, stats.tokens)
        ours = (result.rounds[i], result.drafted[i], result.accepted[i], result.committed[i])
        assert ours == counts
    return result


@pytest.fixture(scope="module")
def scripted() -> Any:
    """25 requests of very different lengths, one with a prompt of several chunks."""
    script = chaotic(31)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 32, 0.4))
    model = Model(target, ModelDrafter(draft, target.vocab_size))
    model.eos = frozenset({3})
    tasks = [
        Task("ab"[i % 2], str(i), ids, Sampling(max_new_tokens=5 + 7 * i % 40))
        for i, ids in enumerate([[i % 7, 5, *[4] * (i % 3)] for i in range(25)])
    ]
    tasks[3] = Task("a", "3", [4, 5] * (CHUNK // 2) + [6, 5, 1], Sampling(max_new_tokens=20))
    return model, tasks, recorded(model, tasks)


def shipped(per_family: int) -> Any:
    """So many prompts of each family, greedy."""
    model = forerun.load(device="cpu")
    tasks = []
    for family in zoo.families():
        for prompt in zoo.prompts(family, "val", limit=per_family):
            how = Sampling(max_new_tokens=min(14, prompt.max_new_tokens))
            tasks.append(Task(family, prompt.id, model.encode(prompt.prompt), how))
    return model, tasks, recorded(model, tasks, depth=14)


SPECS = [
    *(n for n in CONTROLLERS.names() if n != "bounded"), "bounded(survival,low=1,high=8)",
    "auto(calibrated)", "auto(cost=4,slope=0.05)", "cm-asd(high=16,two_pass=true)",
    "gammatune+(threshold=0.6,keep=false)",
]  # fmt: skip


@pytest.mark.parametrize(("spec", "rows"), spread(2, SPECS, [1, 4, 16]))
def test_scripted_batches_are_those_of_the_live_engine(scripted: Any, spec: str, rows: int) -> None:
    agree(*scripted, spec, rows)


@pytest.mark.parametrize(
    ("rows", "per_family"), [(4, 1), pytest.param(16, 4, marks=pytest.mark.slow)]
)
def test_shipped_batches_are_those_of_the_live_engine(rows: int, per_family: int) -> None:
    model, tasks, trace = shipped(per_family)
    for spec in ("auto", "gammatune+"):
        agree(model, tasks, trace, spec, rows)


def test_a_batch_of_one_is_a_stream(scripted: Any) -> None:
    _, _, trace = scripted
    cell = Costs.synthetic(6, slope=0.02)
    for spec in ("auto", "gammatune", "cm-asd(two_pass=true)"):
        one = replay_batches(trace, spec, cell, rows=1)
        other = stream(trace, spec, cell, np.arange(trace.prompts))
        for f in fields(Replay):
            assert getattr(one, f.name) == pytest.approx(getattr(other, f.name)), f.name


def test_what_decides_for_itself_drafts_the_same_in_any_batch(scripted: Any) -> None:
    _, _, trace = scripted
    cell = Costs.synthetic(6, slope=0.02)
    wide = replay_batches(trace, "svip", cell, rows=8)
    alone = replay(trace, "svip", cell)
    assert wide.drafted.tolist() == alone.drafted.tolist()
    assert wide.steps.tolist() == alone.steps.tolist()


def test_seconds_of_all_prompts_are_the_time_of_all_rounds(scripted: Any) -> None:
    _, _, trace = scripted
    cell, spent = Costs.synthetic(10, slope=0.1, fixed=0.5), []

    def watch(now: Rounds) -> None:
        width = 1 + 0.1 * now.drafted.max()
        spent.append(now.steps.max() / 10 + width + 0.5)
        assert now.seconds.sum() == pytest.approx(spent[-1])

    result = replay_batches(trace.take([0, 1, 2, 4, 5, 6]), "fixed(3)", cell, 2, watch=watch)
    assert result.seconds.sum() == pytest.approx(sum(spent))
    given = replay_batches(trace, "fixed(0)", cell, 4)
    assert given.speedup == pytest.approx(1.0)
    again = replay_batches(trace, "fixed(3)", cell, 4, plain_seconds=given.seconds)
    assert again.plain_seconds.tolist() == given.seconds.tolist()


@dataclass(frozen=True)
class Broken(FixedLength):
    """Fails when it has seen a round."""

    def observe(self, state: State, round: RoundOutcome) -> State:
        raise ZeroDivisionError("of a policy")


def test_errors_of_a_controller_are_told(scripted: Any) -> None:
    with pytest.raises(ZeroDivisionError, match="of a policy"):
        replay_batches(scripted[2], Broken(3), Costs.synthetic(4), 2)


@pytest.mark.parametrize("rows", [0, 1.5])
def test_sizes_that_are_none(scripted: Any, rows: Any) -> None:
    with pytest.raises(SettingError, match="rows must be"):
        replay_batches(scripted[2], "fixed", Costs.synthetic(4), rows)
