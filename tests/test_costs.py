"""Tables of costs: made up, measured, saved."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import Model
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.model import ModelDrafter
from forerun.errors import SettingError, UnknownNameError
from forerun.lab.traces import measuring
from forerun.lab.traces.costs import Cell, CostTable, passes
from forerun.lab.traces.measuring import _as_live, line, measure
from forerun.runtime import Rows, torch_rows
from tiny import LIMIT, build

MEASURED = Cell(0.1, ((1, 1.0), (2, 1.1), (4, 1.5)), 0.05, batch=2, context=512)


def test_verify_is_linear_in_between_and_beyond() -> None:
    seconds = [MEASURED.verify_seconds(width) for width in (1, 2, 3, 4, 6)]
    assert seconds == pytest.approx([1.0, 1.1, 1.3, 1.5, 1.9])
    assert passes(MEASURED, 3) == pytest.approx([1.05, 1.15, 1.35, 1.55])
    assert [Cell(0.1, ((1, 2.0),)).verify_seconds(width) for width in (1, 9)] == [2.0, 2.0]


def test_noise_does_not_make_wide_passes_free() -> None:
    cell = Cell(0.1, ((1, 1.0), (2, 1.2), (3, 1.1)))
    assert cell.verify_seconds(40) == pytest.approx(1.1)


def test_rounds() -> None:
    costs = Cell(0.1, ((1, 1.0), (2, 1.1), (4, 1.5)), 0.05, first=0.02)
    assert costs.draft_seconds(0) == 0
    assert costs.draft_seconds(np.array([0, 1, 3])) == pytest.approx([0, 0.12, 0.32])
    assert costs.round_seconds(3, 2) == pytest.approx(0.32 + 1.1 + 0.05)
    cold = replace(costs, cold=0.3)
    assert cold.round_seconds(1, 1) == pytest.approx(costs.round_seconds(1, 1) + 0.3)
    assert cold.round_seconds(0, 1) == costs.round_seconds(0, 1)
    assert cold.round_seconds(1, 2) == costs.round_seconds(1, 2)
    assert costs.widening == pytest.approx(0.2)  # from 2 to 4 tokens
    assert Cell(0.1, ((1, 1.0),)).widening == 0
    assert Cell(0.1, ((1, 1.0), (2, 1.2))).widening == pytest.approx(0.2)
    assert Cell(0.1, ((1, 1.0), (2, 1.2), (3, 1.1))).widening == 0


def test_levels_of_passes(tmp_path: Any) -> None:
    points = ((1, 1.0), (2, 1.4), (4, 1.2), (5, 2.0), (8, 2.6), (9, 2.2), (12, 2.8))
    costs = Cell(0.1, points, 0.05, first=0.02, levels=(1, 4, 8))
    level, wider = 1.3, (2.0 + 2.2 + 2.4 + 2.6) / 4  # means; 3, 6, 7 lie between
    judging = [level] * 3 + [wider] * 4 + [wider]  # less for more tokens is noise
    assert costs.passes == pytest.approx(judging)
    assert costs.widening == pytest.approx((2.8 - 2.2) / 3)
    added = [0.0, *[level - 1.0] * 3, *[wider - 1.0] * 5]
    assert costs.judging == pytest.approx(added)
    rounds = [0.12 + 0.1 * n + 0.05 for n in range(8)]
    seconds = [a + b for a, b in zip(rounds, judging, strict=True)]
    assert [costs.seconds(n) for n in range(1, 9)] == pytest.approx(seconds)
    assert costs.seconds(10) == pytest.approx(seconds[-1] + 2 * (0.1 + costs.widening))
    table = CostTable((costs,))
    table.write(tmp_path / "costs.json")
    assert CostTable.read(tmp_path / "costs.json").at().levels == (1, 4, 8)
    with pytest.raises(SettingError, match="levels"):
        Cell(0.1, points, levels=(4, 4))


def test_a_device_is_written_and_not_replaced(tmp_path: Any) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    CostTable((MEASURED,)).write(pipe)
    reader.join(10)
    assert json.loads(got[0])["cells"][0]["batch"] == 2
    assert pipe.is_fifo()


def test_what_a_meter_knows_besides_is_not_in_the_file(tmp_path: Any) -> None:
    CostTable((Cell(0.1, ((1, 1.0),), reading=0.5),)).write(tmp_path / "costs.json")
    (cell,) = json.loads((tmp_path / "costs.json").read_text())["cells"]
    names = {
        "draft", "verify", "fixed", "batch", "context", "first", "levels", "cold", "asking",
        "ratio", "spread", "tree",
    }  # fmt: skip
    assert cell.keys() == names
    assert CostTable.read(tmp_path / "costs.json").at().reading == 0


def test_plain_and_ratio() -> None:
    assert pytest.approx(1.05) == MEASURED.plain
    assert pytest.approx(10) == MEASURED.ratio


@given(
    c=st.floats(0.1, 100), slope=st.floats(0, 1), fixed=st.floats(0, 1), unit=st.floats(1e-4, 10),
    width=st.integers(1, 64),
)  # fmt: skip
def test_made_up_cells(c: float, slope: float, fixed: float, unit: float, width: int) -> None:
    cell = Cell.synthetic(c, slope, fixed, unit)
    assert cell.verify_seconds(width) == pytest.approx(unit * (1 + slope * (width - 1)))
    assert cell.ratio == pytest.approx(c)
    assert cell.plain == pytest.approx(unit * (1 + fixed))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"verify": ((2, 1.0),)}, "rising from 1"),
        ({"verify": ((1, 1.0), (3, 1.0), (2, 1.0))}, "rising from 1"),
        ({"verify": ()}, "rising from 1"),
        ({"verify": ((1, 0.0),)}, r"verify\(1\) must be a number of seconds above 0"),
        ({"draft": 0.0}, "draft must be"),
        ({"draft": float("nan")}, "draft must be"),
        ({"fixed": -1.0}, "fixed must be"),
        ({"batch": 0}, "batch must be"),
    ],
)
def test_cells_that_make_no_sense(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Cell(**{"draft": 0.1, "verify": ((1, 1.0),), **settings})


def test_the_nearest_cell() -> None:
    table = CostTable(
        tuple(Cell(0.1, ((1, 1.0),), batch=b, context=n) for b in (1, 4, 16) for n in (128, 512))
    )
    nearest = [table.at(b, n) for b, n in ((1, 128), (3, 200), (100, 5000), (2, 300))]
    where = [(cell.batch, cell.context) for cell in nearest]
    # 2 is as far from 1 as from 4, in ratio; the first wins.
    assert where == [(1, 128), (4, 128), (16, 512), (1, 512)]


def test_files_hold_everything(tmp_path: Any) -> None:
    spread = {
        "draft": [0.09, 0.11], "verify": [[0.9, 1.2], [1.0, 1.2], [1.4, 1.6]], "work": 0.01,
        "other": [[0, 0.1, 0.0, 0.2]],
    }  # fmt: skip
    for table in (
        CostTable((MEASURED,), {"by": "hand"}, (spread,)),
        CostTable((MEASURED,), {"x": [1]}),
    ):
        table.write(tmp_path / "costs.json")
        assert CostTable.read(tmp_path / "costs.json") == table
        assert CostTable.find(str(tmp_path / "costs.json")) == table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a table of costs"),
        ("[]", "not a table of costs"),
        ('{"schema": 1}', "not a table of costs"),
        ('{"schema": 2, "cells": []}', "costs schema 2"),
        ('{"schema": 1, "cells": [{}], "about": {}}', "damaged"),
        ('{"schema": 1, "cells": 3, "about": {}}', "damaged"),
        ('{"schema": 1, "cells": [], "about": {}}', "cells must be"),
        (
            json.dumps({"schema": 1, "about": {}, "cells": [
                {"draft": -1, "verify": [[1, 1]], "fixed": 0, "batch": 1, "context": 1,
                 "spread": None}]}),
            "draft must be",
        ),
    ],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Any, text: str, says: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=says):
        CostTable.read(path)


def test_made_up_in_one_line() -> None:
    assert CostTable.find("c=10, slope=0.02,fixed=0.1").at() == Cell.synthetic(10, 0.02, 0.1)
    assert CostTable.find("c=10,tree=0.1").at() == Cell.synthetic(10, tree=0.1)
    with pytest.raises(UnknownNameError, match="did you mean 'slope'"):
        CostTable.find("c=10,slop=1")
    for text, says in (
        ("slope=1", "c=RATIO"), ("c=ten", "c must be a number"), ("c=1,c=2", "given twice"),
        ("c=-4", "c must be above 0"),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=says):
            CostTable.find(text)
    with pytest.raises(SettingError, match="forerun costs -o FILE measures one"):
        CostTable.find("nowhere.json")


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.integers(0, 9), min_size=2, max_size=5, unique=True),
)
def test_a_line_is_found_again(start: float, slope: float, places: list[int]) -> None:
    fitted = line({x: start + slope * x for x in places})
    assert fitted == pytest.approx((start, slope), abs=1e-9)


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 1), min_size=1))
def test_lines_are_never_negative(points: dict[int, float]) -> None:
    assert min(line(points)) >= 0


@pytest.fixture(scope="module")
def model() -> Model:
    target = torch_rows(build("llama", num_hidden_layers=2))
    draft = torch_rows(build("llama", seed=1, num_hidden_layers=1))
    return Model(target, ModelDrafter(draft, target.vocab_size))


@pytest.mark.usefixtures("quick_costs")
def test_measuring(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    # A draft of n tokens takes 2 s, and 1 s each; the engine 0.5 s and 0.25 s each, or 0.25 s.
    def took(draft: float, other: float) -> Any:
        return SimpleNamespace(draft_seconds=draft, verify_seconds=1.0, other_seconds=other)

    times = {n: [took(2.0 + n, 0.5 + n / 4)] for n in (1, 2, 4, 8)}
    times[0] = [took(0.0, 0.25)]
    times = dict(sorted(times.items()))
    measured = []

    def live(*args: Any) -> Any:
        measured.append(real(*args))
        return times, 0.125

    real = measuring._live
    monkeypatch.setattr(measuring, "_live", live)
    grown = measure(model, [1, 2], [8, 15], widths=[4, 2], repeats=3, progress=done.append)
    *_, table = grown
    assert [(c.batch, c.context) for c in table.cells] == [(1, 8), (1, 15), (2, 8), (2, 15)]
    assert done == list(range(1, 13))
    for cell, spread in zip(table.cells, table.spread, strict=True):
        assert [width for width, _ in cell.verify] == [1, 2, 4]
        for (_, median), (low, high) in zip(cell.verify, spread["verify"], strict=True):
            assert 0 < low <= median <= high
        assert (cell.draft, *spread["draft"], spread["work"]) == pytest.approx((1.25, 1, 1, 0.25))
        assert cell.asking == 0.125
        assert cell.fixed == 0.25
        assert cell.first == pytest.approx(2 + 0.25), "a draft's first step, and its work"
        assert [drafted for drafted, *_ in spread["other"]] == [0, 1, 2, 4, 8]
    for seen, asking in measured:
        assert seen.keys() == {0, 1, 2, 4, 8}
        assert all(r.verify_seconds > 0 for rounds in seen.values() for r in rounds)
        assert all(r.draft_seconds > 0 for n, rounds in seen.items() if n for r in rounds)
        assert asking >= 0
    assert table.about["repeats"] == 3
    assert {"target", "draft", "cpu", "versions"} <= table.about.keys()
    assert model.target.lengths == [], "the caches are empty again"
    assert model.drafter.rows.lengths == []  # type: ignore[attr-defined]


@pytest.mark.usefixtures("quick_costs")
def test_a_round_in_which_others_read_their_prompts_is_not_timed() -> None:
    def rows(n: int, per_token: float) -> list[Any]:
        def took(verify: float) -> Any:
            return SimpleNamespace(
                drafted=n, draft_seconds=per_token * n, verify_seconds=verify, other_seconds=0.5
            )

        # The second row's prompt is read in the 9 s of the first one's second round.
        times = [0.0, 9.0, 1.0, 1.5], [0.0, 1.0, 1.5]
        return [SimpleNamespace(rounds=[took(t) for t in row]) for row in times]

    def generate(prompts: Any, controller: str, **_: Any) -> list[Any]:
        asked = controller.startswith("hf-threshold")
        return rows(int(controller.rpartition("=" if asked else "(")[2][:-1]), 0.1 + 0.03 * asked)

    fake: Any = SimpleNamespace(generate=generate)
    live, asking = measuring._live(fake, [[1], [2]], measuring.LIVE)
    assert live.keys() == set(measuring.LIVE)
    assert {r.verify_seconds for rounds in live.values() for r in rounds} == {1.0, 1.5}
    assert {r.draft_seconds for r in live[2]} == {0.2}
    assert {r.other_seconds for r in live[0]} == {0.5}
    assert asking == pytest.approx(0.03)


@pytest.mark.usefixtures("quick_costs")
def test_passes_of_each_level_are_run_live_if_a_row_is_alone(
    model: Model, monkeypatch: Any
) -> None:
    drafted: list[tuple[int, ...]] = []
    real = measuring._live

    def live(model: Model, prompts: Any, lengths: Any) -> Any:
        drafted.append(tuple(lengths))
        return real(model, prompts, lengths)

    monkeypatch.setattr(measuring, "_live", live)
    monkeypatch.setattr(model.target.executor, "levels", (1, 4, 8, 16))
    *_, table = measure(model, [1, 2], [8], widths=[4, 8], repeats=1)
    assert table.cells[0].levels == (1, 4, 8, 16)
    assert drafted == [(0, 1, 2, 3, 4, 7, 8), (0, 1, 2, 4, 8)], "16 is beyond the widths asked for"


@pytest.mark.usefixtures("quick_costs")
def test_forwards_are_timed_where_they_are_said_to_be(model: Model, monkeypatch: Any) -> None:
    fed: list[tuple[int, int, int]] = []
    real = Rows.feed

    def feed(self: Rows, pieces: Any, *rest: Any, **named: Any) -> Any:
        if self is model.target:
            fed.append((len(pieces), self.lengths[0], len(pieces[0])))
        return real(self, pieces, *rest, **named)

    monkeypatch.setattr(Rows, "feed", feed)
    list(measure(model, [2], [10], widths=[1, 3], repeats=2))
    assert fed.count((2, 10, 3)) >= 5  # two timings and the warm-up, each on a context of 10
    assert fed.count((2, 10, 1)) >= 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"contexts": [LIMIT - 10]}, "do not fit"),
        ({"batches": [0]}, "batch must be"),
        ({"batches": []}, "batch must be"),
        ({"widths": [0]}, "widths must be"),
        ({"repeats": 0}, "repeats must be"),
    ],
)
def test_measuring_what_cannot_be_measured(
    model: Model, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingError, match=says):
        list(measure(model, **{"contexts": [8], **settings}))
    other = Model(model.target, LookupDrafter(3, 1))
    with pytest.raises(SettingError, match="needs a draft model"):
        list(measure(other, contexts=[8]))


@pytest.mark.usefixtures("quick_costs")
def test_an_interruption_leaves_the_model_usable(model: Model) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(measure(model, contexts=[8], repeats=2, progress=stop))
    assert model.target.lengths == []
    [table] = measure(model, contexts=[8], repeats=1)
    assert np.isfinite(table.at().ratio)


def test_passes_are_brought_to_the_level_of_live_ones() -> None:
    turns = {1: [2.0, 4.0, 3.0], 2: [4.0], 4: [8.0], 8: [8.0]}
    scaled = _as_live(turns, {1: [1.5, 1.5, 9.0], 3: [6.0]})
    assert scaled == {1: [1.0, 2.0, 1.5], 2: [3.0], 4: [8.0], 8: [8.0]}
    assert _as_live(turns, {}) == turns
