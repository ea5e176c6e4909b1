"""Passes are timed before the first round, robustly, within a bound, once for a machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

import forerun
from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.drafters.model import ModelDrafter
from forerun.engine import Sampling
from forerun.engine.loop import Engine
from forerun.engine.meter import Meter
from forerun.model import _warmed
from forerun.rules import RULES
from forerun.runtime import Rows
from forerun.runtime.timing import OFF, PLAIN, WIDEST, PassTimer
from forerun.testing import ScriptedModel

TABLE = torch.eye(5).roll(1, dims=1)
Cost = Callable[[int, int, int], float]
"""Seconds of the n-th pass of a shape, by n, rows and tokens in each."""


class Machine:
    """A clock that only passes of its models move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(ScriptedModel):
    """Takes the machine's time; the first pass of a shape takes `cold` times as long."""

    def __init__(
        self, machine: Machine, cost: Cost, limit: int = 1 << 20, cold: float = 10
    ) -> None:
        super().__init__(TABLE, limit)
        self._machine, self._cost, self._cold = machine, cost, cold
        self.shapes: list[tuple[int, int]] = []

    def run(self, starts: Any, pieces: Any, wanted: Any, parents: Any = ()) -> torch.Tensor:
        shape = len(pieces), max(map(len, pieces))
        cold = 1 if shape in self.shapes else self._cold
        self.shapes.append(shape)
        self._machine.now += cold * self._cost(len(self.shapes), *shape)
        return super().run(starts, pieces, wanted, parents)


def target_cost(n: int, rows: int, tokens: int) -> float:
    return 2e-4 * (0.9 + 0.1 * rows * tokens)


def draft_cost(n: int, rows: int, tokens: int) -> float:
    return 2e-5 * (0.9 + 0.1 * rows * tokens)


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))


def started(
    cost: Cost = target_cost,
    draft: Cost | None = draft_cost,
    limit: int = 1 << 20,
    cold: float = 10,
) -> tuple[PassTimer, Slow, Slow | None]:
    """A timer of a new process, and its models."""
    machine = Machine()
    target = Slow(machine, cost, limit, cold)
    drafts = None if draft is None else Slow(machine, draft)
    rows = None if drafts is None else Rows(drafts)
    return PassTimer(Rows(target), rows, machine), target, drafts


def test_what_passes_take_is_known_and_nothing_is_left_behind() -> None:
    timer, target, draft = started()
    times = timer.time()
    assert set(times.target) == {(1, n) for n in (1, 2, 4, 5, 8, 16)}
    assert set(times.draft) == {(1, 1), (1, 2), (1, WIDEST)}
    for (rows, n), seconds in times.target.items():
        assert seconds == pytest.approx(target_cost(0, rows, n)), "the first of a shape is none"
    assert times.draft[1, 1] == pytest.approx(2e-5)
    assert times.taken == set(times.target)
    for model in (target, draft):
        assert model is not None
        assert model.history == []


def test_a_pass_longer_than_any_graph_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the longest takes says nothing of a token more, whose shapes are open."""
    monkeypatch.setattr(Slow, "levels", (1, 4))
    machine = Machine()
    rows = Rows(Slow(machine, lambda n, rows, k: 2e-4 if k <= 4 else 3e-4 + 1e-5 * k))
    meter = Meter.of(rows, ModelDrafter(Rows(Slow(machine, draft_cost)), 5))
    meter.clock = machine
    meter.warm()
    costs = meter.costs(1)
    assert costs.levels == (1, 4)
    assert costs.judging[:5] == pytest.approx((0.0, 0.0, 0.0, 0.0, 1.5e-4))
    assert costs.widening == pytest.approx(1e-5)


def test_passes_before_all_graphs_are_there_are_timed_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"finished": False}
    monkeypatch.setattr(Slow, "finished", property(lambda _: state["finished"]))

    def finish(model: Slow) -> None:
        model._machine.now += 0 if state["finished"] else 4
        state["finished"] = True

    def cost(n: int, rows: int, tokens: int) -> float:
        return target_cost(n, rows, tokens) * (1 if state["finished"] else 1.3)

    monkeypatch.setattr(Slow, "finish", finish)
    slower = started(cost)[0].time().target
    assert slower[1, 4] == pytest.approx(1.3 * target_cost(0, 1, 4))
    timer, target, _ = started(cost)
    assert timer.time().target == pytest.approx(slower)
    assert len(target.shapes) == 2, "it was kept"
    assert not state["finished"]
    state["finished"] = True
    timer.correct({1: Costs(2e-5, ((1, 1.0), (16, 20.0)))})  # of other graphs than were timed
    state["finished"] = False
    assert started(cost)[0].time().target == pytest.approx(slower)
    shared = timer.time(2).target
    assert state["finished"], "rows will share passes"
    assert shared[1, 4] == pytest.approx(target_cost(0, 1, 4))
    assert {(2, 1), (2, 4)} <= set(shared), "what finishing takes is not taken from their time"
    assert started(cost)[0].time().target == pytest.approx(shared)


def test_passes_that_are_slow_by_accident_do_not_count() -> None:
    timer, *_ = started(lambda n, rows, k: target_cost(n, rows, k) * (5 if n % 3 == 0 else 1))
    times = timer.time()
    assert times.target[1, 5] == pytest.approx(target_cost(0, 1, 5))


def test_batches_are_timed_when_one_can_occur() -> None:
    timer, target, _ = started()
    timer.time()
    assert all(rows == 1 for rows, _ in target.shapes)
    times = timer.time(16)
    assert {rows for rows, _ in times.target} == {1, 2, 4, 8, 16}
    assert {n for rows, n in times.target if rows == 16} == {1, 4}
    assert times.target[16, 4] == pytest.approx(target_cost(0, 16, 4))
    few, target, _ = started(lambda n, rows, k: 1e-4, None)
    few.time(3)
    assert {rows for rows, _ in target.shapes} == {1, 2, 4}


def test_a_second_start_takes_a_plain_pass() -> None:
    first, *_ = started()
    known = first.time(16).target
    again, target, draft = started()
    times = again.time()
    assert times.target == known
    assert times.taken == {(1, 1)}
    assert target.shapes == [(1, 1), (1, 1)], "one that begins, and one that is timed"
    assert draft is not None
    assert draft.shapes == [(1, 1)]


@pytest.mark.parametrize("factor", [1.2 * OFF, 1 / (1.2 * OFF)])
def test_a_table_of_another_day_is_made_anew(factor: float) -> None:
    started()[0].time()
    busy, target, _ = started(lambda n, rows, k: factor * target_cost(n, rows, k))
    assert busy.time().target[1, 8] == pytest.approx(factor * target_cost(0, 1, 8))
    assert len(target.shapes) > 6
    near, target, _ = started(lambda n, rows, k: factor * 1.1 * target_cost(n, rows, k))
    near.time()
    assert len(target.shapes) == 2


def test_another_model_has_a_table_of_its_own() -> None:
    started()[0].time()
    timer, target, _ = started(limit=4096)
    timer.time()
    assert len(target.shapes) > 6


def test_a_large_model_is_timed_in_parts() -> None:
    """Within ten plain passes a start; what was timed stays, and more is added."""
    known: set[tuple[int, int]] = set()
    sizes = []
    for _ in range(5):
        timer, target, _ = started(lambda n, rows, k: 0.5 * (0.7 + 0.3 * k), None, cold=1)
        began = timer._clock()
        times = timer.time()
        assert timer._clock() - began <= PLAIN * 0.5 + 0.5
        assert known <= set(times.target)
        known = set(times.target)
        sizes.append(len(known))
    assert known == {(1, n) for n in (1, 2, 4, 5, 8)}, "16 tokens take too long, twice"
    assert sizes == sorted(sizes)
    assert sizes[0] >= 2
    assert len(target.shapes) == 2, "what cannot be had costs nothing"


def test_costs_are_true_from_the_first_round() -> None:
    machine = Machine()
    target, draft = Slow(machine, target_cost), Slow(machine, draft_cost)
    drafter = ModelDrafter(Rows(draft), 5)
    meter = Meter.of(Rows(target), drafter)
    meter.clock = machine
    assert not meter.timed(1)
    meter.expect(4)
    assert not target.shapes, "only where passes of one row were timed"
    meter.warm()
    costs = meter.costs(1)
    assert meter.timed(1)
    assert costs.plain == pytest.approx(2e-4)
    assert costs.draft == pytest.approx(2e-5)
    assert costs.verify_seconds(5) == pytest.approx(target_cost(0, 1, 5))
    assert costs.reading == pytest.approx(draft_cost(0, 1, WIDEST) / WIDEST)
    assert not meter.timed(4)
    meter.expect(4)
    assert meter.timed(4)
    assert meter.costs(4).verify_seconds(4) == pytest.approx(target_cost(0, 4, 4))
    assert meter.costs(3).plain == pytest.approx(target_cost(0, 3, 1)), "between two sizes"
    assert meter.costs(3).draft == pytest.approx(draft_cost(0, 3, 1))


@pytest.mark.parametrize("off", [0.5, 1.1, 2])
def test_what_is_kept_of_several_rows_is_checked_when_they_occur(off: float) -> None:
    """As after a change of passes that a plain one of one row does not show."""

    def cost(n: int, rows: int, tokens: int) -> float:
        return target_cost(n, rows, tokens) * (off if rows > 1 else 1)

    kept = started(cost)[0].time(16)
    timer, target, _ = started()
    timer.time()
    alone = len(target.shapes)
    times = timer.time(16)
    wanted = {n: s if n[0] > 1 and off < OFF and off > 1 else target_cost(0, *n)
              for n, s in kept.target.items()}  # fmt: skip
    assert times.target == pytest.approx(wanted)
    if 1 < off < OFF:
        assert target.shapes[alone:] == [(16, 1)] * 3, "one that feeds rows, and two plain ones"


@pytest.mark.parametrize("wide", [0.3, 1, 2, 10])
@pytest.mark.parametrize("step", [0.5, 1, 10])
def test_a_table_that_a_busy_machine_made_is_found_out(
    tmp_path: Any, wide: float, step: float
) -> None:
    """Plain passes take what is kept, wide ones and the draft's do not: from the second request on
    `auto` drafts as far as it would with a true table, and what is kept is corrected."""
    started()[0].time()
    (file,) = tmp_path.glob("timings/*.json")
    target, draft = json.loads(file.read_text())
    off = [[(rows, n, s * (wide if n > 1 else 1)) for rows, n, s in target],
           [(rows, n, s * step) for rows, n, s in draft]]  # fmt: skip
    file.write_text(json.dumps(off))
    machine = Machine()
    rows, steps = Rows(Slow(machine, target_cost)), Rows(Slow(machine, draft_cost))
    drafter = ModelDrafter(steps, 5)
    meter = Meter.of(rows, drafter)
    meter.clock = machine
    meter.warm()
    engine = Engine(rows, drafter, meter=meter)
    drafted = []
    for _ in range(4):
        how = Sampling(max_new_tokens=50), CONTROLLERS.make("auto"), RULES.make("exact")
        engine.submit([1], *how)
        done = [event.completion for event in engine.run() if event.completion]
        drafted.append(sum(round.accepted for round in done[0].rounds))
    assert min(drafted[1:]) >= 39, drafted
    target, draft = json.loads(file.read_text())
    for rows_, n, seconds in target:
        assert seconds == pytest.approx(target_cost(0, rows_, n), rel=OFF - 1), n
    assert draft[0][2] == pytest.approx(2e-5, rel=OFF - 1)


def test_the_first_request_after_all_graphs_are_there_times_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What rounds took before, passes no longer take."""
    state = {"finished": False}
    monkeypatch.setattr(Slow, "finished", property(lambda _: state["finished"]))
    machine = Machine()

    def cost(n: int, rows: int, tokens: int) -> float:
        return target_cost(n, rows, tokens) * (1 if state["finished"] or tokens == 1 else 20)

    rows = Rows(Slow(machine, cost))
    drafter = ModelDrafter(Rows(Slow(machine, draft_cost)), 5)
    meter = Meter.of(rows, drafter)
    meter.clock = machine
    meter.warm()
    engine = Engine(rows, drafter, meter=meter)

    def drafted() -> int:
        how = Sampling(max_new_tokens=50), CONTROLLERS.make("auto"), RULES.make("exact")
        engine.submit([1], *how)
        done = [event.completion for event in engine.run() if event.completion]
        return sum(round.accepted for round in done[0].rounds)

    assert [drafted() for _ in range(2)] == [0, 0]
    state["finished"] = True
    assert drafted() >= 39
    assert meter.costs(1).verify_seconds(5) == pytest.approx(target_cost(0, 1, 5))


def test_an_engine_times_batches_before_their_first_round() -> None:
    def sizes(controller: str, prompts: int) -> set[int]:
        machine = Machine()
        target, draft = Slow(machine, target_cost), Slow(machine, draft_cost)
        drafter = ModelDrafter(Rows(draft), 5)
        rows = Rows(target)
        meter = Meter.of(rows, drafter)
        meter.clock = machine
        meter.warm()
        engine = Engine(rows, drafter, meter=meter)
        target.shapes.clear()
        for _ in range(prompts):
            how = Sampling(max_new_tokens=2), CONTROLLERS.make(controller), RULES.make("exact")
            engine.submit([1], *how)
        done = [e.completion.tokens for e in engine.run() if e.completion]
        assert done == [[2, 3]] * prompts
        return {count for count, _ in target.shapes}

    assert sizes("auto", 1) == {1}
    assert sizes("fixed(1)", 4) == {4}, "who weighs nothing needs no costs"
    assert sizes("auto", 4) == {2, 4}


def test_a_model_that_is_loaded_knows_its_passes(monkeypatch: Any) -> None:
    """Other tests load without."""
    monkeypatch.setattr("forerun.model._warmed", _warmed)
    monkeypatch.setattr("forerun.runtime.timing.SECONDS", 60.0)
    times = forerun.load(device="cpu").meter._times
    assert {(1, n) for n in (1, 2, 4, 8)} <= times.target.keys()
    assert (1, 1) in times.draft


def test_reading_that_no_round_has_timed_is_not_kept_as_nothing() -> None:
    """A table that said a pass takes 0 s ended every later request."""
    timer, *_ = started()
    times = timer.time()
    timer.correct({1: Costs(9.0, ((1, 9.0), (16, 9.0)), reading=0.0)})
    assert timer.times.draft[1, 1] == 9.0
    assert timer.times.draft[1, WIDEST] == times.draft[1, WIDEST] > 0
    assert timer.times.draft_seconds(1) == 9.0


def test_a_checkout_that_is_not_installed_has_a_table_of_its_own(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    timer = PassTimer(Rows(ScriptedModel(TABLE)), None, Machine())
    installed = timer._name()
    monkeypatch.setattr("forerun.runtime.timing.version", missing)
    assert timer._name() != installed
