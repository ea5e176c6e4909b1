"""Costs come from the load, and from the clock of rounds; nothing that is slow once lives on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.costs import Costs
from forerun.engine.meter import ABOVE, EVERY, HELD_UP, SAMPLES, STALE, Lap, Meter
from forerun.runtime.timing import Times

LEVELS = (1, 4, 8)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Costs are summed after every round."""
    monkeypatch.setattr("forerun.engine.meter.EVERY", 1)


def times(*steps):
    """Of the target passes of a row; of the draft those of one token, and of more."""
    passes = {1: 1.0, 2: 1.2, 4: 1.2, 5: 2.0, 8: 2.0, 16: 3.0}
    target = {(1, n): seconds for n, seconds in passes.items()}
    return Times(target, {(1, n): seconds for n, seconds in steps}, set(target))


def lap(drafted=0, rows=1, plain=1.0, wide=1.2, step=0.2, **changes):
    how = {
        "rows": rows,
        "width": drafted + 1,
        "steps": drafted,
        "draft_seconds": drafted * step,
        "first_step_seconds": step if drafted else 0.0,
        "verify_seconds": wide if drafted else plain,
    }
    return Lap(**{**how, **changes})


def fed(meter, *laps):
    for one in laps:
        meter.add(one)
    return meter


def test_the_load_is_believed_from_the_first_round_on():
    meter = Meter(3.0, times((1, 0.1), (8, 0.4)), LEVELS)
    costs = meter.costs(1)
    assert (costs.plain, costs.draft) == (1.0, 0.1)
    assert [costs.verify_seconds(n) for n in (2, 4, 5, 8, 16)] == [1.2, 1.2, 2.0, 2.0, 3.0]
    assert costs.levels == LEVELS
    assert meter.timed(1)
    # Rows that share a pass are like a row of as many tokens.
    four = meter.costs(4)
    assert four.plain == 1.2
    assert four.verify_seconds(4) == 3.0
    assert four.draft == pytest.approx(0.1 + 3 / 7 * 0.3)
    assert not meter.timed(4)


def test_without_a_load_nothing_is_in_seconds_until_a_plain_pass_was_timed():
    meter = Meter(2.5)
    assert meter.costs(1).ratio == 2.5
    assert not meter.timed(1)
    fed(meter, *[lap(2, step=0.002, wide=0.02)] * 4)
    assert meter.costs(1).plain == 1.0, "plain is never derived from wide passes"
    assert meter.costs(1).retime == "plain"
    fed(meter, lap(plain=0.01), lap(plain=0.01))
    assert meter.timed(1)
    costs = meter.costs(1)
    assert (costs.plain, costs.draft, costs.verify_seconds(3)) == (0.01, 0.002, 0.02)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_first_pass_of_a_shape_is_no_sample(rows):
    """It compiles, captures or pages in."""
    meter = Meter()
    fed(meter, lap(rows=rows, plain=100.0), *[lap(rows=rows)] * 3)
    fed(meter, lap(3, rows, wide=100.0, step=20.0), *[lap(3, rows)] * 3)
    fed(meter, lap(2, rows, wide=100.0), *[lap(2, rows)] * 3)
    costs = meter.costs(rows)
    assert costs.plain == 1.0
    assert costs.draft == pytest.approx(0.2)
    assert [costs.verify_seconds(n) for n in (3, 4)] == [1.2, 1.2]


def test_what_is_slow_now_and_then_is_not_believed():
    meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), *[lap()] * 20)
    fed(meter, *[lap(plain=5.0) if n % 2 else lap() for n in range(40)])
    assert meter.costs(1).plain == 1.0
    fed(meter, *[lap(plain=1.5)] * SAMPLES)  # but a machine that got slower is
    assert meter.costs(1).plain == 1.5


def test_a_draft_thrown_away_is_no_plain_pass():
    meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), *[lap()] * 5)
    looks = [lap(1, width=1, verify_seconds=1.3)] * 5
    costs = fed(meter, *looks).costs(1)
    assert costs.plain == 1.0
    assert costs.cold == pytest.approx(0.3)


def test_the_arm_that_was_not_chosen_is_timed_anew():
    meter = Meter(3.0, times((1, 0.1)), LEVELS)
    assert meter.costs(1).retime == ""
    fed(meter, *[lap(2)] * (STALE + 1))
    assert meter.costs(1).retime == "plain"
    fed(meter, lap())
    assert meter.costs(1).retime == ""
    fed(meter, *[lap()] * (STALE + 1))
    assert meter.costs(1).retime == "judged"


def test_a_pass_that_reads_a_prompt_is_no_sample_but_says_what_reading_takes():
    meter = Meter(3.0, times((1, 0.1)), LEVELS)
    before = meter.costs(1)
    drafted = lap(1, step=0.1, wide=3.5, read_tokens=100)
    assert (before.prefill, meter.booked(drafted)) == (None, (None, 0.0)), "none was timed yet"
    fed(meter, *[lap(plain=3.0, read_tokens=100)] * 3)
    assert meter.costs(1) == replace(before, prefill=0.02)
    assert meter.booked(drafted) == (pytest.approx(0.1 + 3.5 - 2.0), 0.0)
    fed(meter, *[lap(2, wide=5.2, read_tokens=100)] * 20)
    assert replace(meter.costs(1), prefill=None) == before
    assert meter.costs(1).prefill == pytest.approx(0.04), "less what judging takes"


def test_what_a_shape_takes_at_first_is_neither_a_sample_nor_booked():
    meter = Meter(3.0, times((1, 0.1)), LEVELS)
    wide = lap(2, rows=4, wide=100.0, reading_seconds=60.0, reading_tokens=100)
    assert meter.booked(wide) == (None, 0.0)
    fed(meter, *[lap(rows=4)] * 2, wide)
    assert meter.booked(wide) == (pytest.approx(100.4), 0.0), "was the machine busy?"
    assert meter.costs(4).reading == 0, "or it would never read again"
    usual = lap(2, rows=4, reading_seconds=0.6, reading_tokens=100)
    assert fed(meter, *[usual] * 3).costs(4).reading == pytest.approx(0.006)
    assert meter.booked(usual)[1] == 0.6
    assert meter.booked(wide)[1] == pytest.approx(HELD_UP * 0.6), "the machine was busy"


def test_noise_of_the_clock_is_no_loss_of_drafts():
    """Costs are low quantiles, and the middle of what is timed is above them."""
    drafted, noisy = lap(2, wide=2.4), [lap(plain=1.0), lap(plain=1.4)]
    quiet = [lap(plain=1.0), lap(plain=1.1)]
    for laps, noise in (
        (quiet * 20, 1.0), (noisy * 3, 1.0), (noisy * 5, 1.4**ABOVE),
        (noisy * 40, 1.2), (quiet * 40, 1.05),
    ):  # fmt: skip
        meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), lap(), lap(2), *laps)
        assert meter.booked(drafted)[0] == pytest.approx(drafted.seconds / noise)


def test_what_is_lost_while_passes_are_cold_counts_in_plain_passes_of_the_load():
    """They get warm later for every draft before."""
    drafted, faster = lap(2, wide=4.0), [lap(plain=4.0 * 0.95**n) for n in range(25)]
    meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), lap(), lap(2), *faster)
    plain = meter.costs(1).verify_seconds(1)
    assert plain > 1.2
    assert meter.booked(drafted)[0] == pytest.approx(plain * drafted.seconds)
    fed(meter, *[lap(plain=2.0)] * STALE)
    assert meter.booked(drafted)[0] == pytest.approx(drafted.seconds), "the machine is slower"
    unknown = fed(Meter(3.0), lap(), lap(2), *faster)
    assert unknown.booked(drafted)[0] == pytest.approx(drafted.seconds)


def test_of_a_batch_one_round_that_the_machine_held_up_is_booked_as_others_are():
    meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), lap(rows=4), lap(2, rows=4))
    usual, slow = lap(2, rows=4), lap(2, rows=4, wide=1000.0)
    fed(meter, *[lap(rows=4)] * 3)
    assert meter.booked(slow)[0] == pytest.approx(slow.seconds), "at first passes are cold"
    fed(meter, *[lap(rows=4)] * STALE)
    for _ in range(7):
        booked = meter.booked(usual)[0]
    assert booked == meter.booked(slow)[0] == pytest.approx(usual.seconds)
    for _ in range(7):
        booked = meter.booked(slow)[0]
    assert booked == pytest.approx(slow.seconds), "the drafts themselves are slow"


def test_what_a_graph_takes_to_be_made_is_neither_a_sample_nor_booked():
    """A text that outgrows its columns, or a cache that grew: the shape has run before."""
    meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), *[lap()] * 2, lap(2))
    costs = meter.costs(1)
    slow = lap(2, wide=100.0, step=50.0, compiled=True, reading_seconds=60.0, reading_tokens=9)
    assert meter.booked(slow) == (None, 0.0)
    assert fed(meter, slow).costs(1) == costs
    fed(meter, *[lap(plain=100.0, read_tokens=10, compiled=True)] * 3)
    assert meter.costs(1) == costs


def kept(wide=1.0, step=1.0):
    """A table of another start, which says this of passes that judge, and of draft steps."""
    target = {n: s * (wide if n[1] > 1 else 1) for n, s in times().target.items()}
    return Times(target, {(1, 1): 0.1 * step}, {(1, 1)})


def test_a_table_of_another_start_is_tried_soon_and_believed_less():
    meter = fed(Meter(3.0, kept(), LEVELS), lap())
    assert meter.costs(1).retime == "judged"
    fed(meter, *[lap(2, wide=2.4)] * 5)  # the first is new
    assert meter.costs(1).verify_seconds(4) == 2.4
    ours = fed(Meter(3.0, times((1, 0.1)), LEVELS), lap(), *[lap(2, wide=2.4)] * 5)
    assert ours.costs(1).verify_seconds(4) == 1.2


def test_what_rounds_take_corrects_wider_passes_too():
    meter = fed(Meter(3.0, kept(10.0), LEVELS), lap(), lap(2), lap(2))
    costs = meter.costs(1)
    assert [costs.verify_seconds(n) for n in (4, 8, 16)] == pytest.approx([1.2, 2.0, 3.0])


def test_a_draft_step_that_was_not_timed_here_costs_a_plain_pass_at_most():
    meter = fed(Meter(3.0, kept(step=50.0), LEVELS), lap())
    assert (meter.costs(1).draft, meter.costs(1).first) == (1.0, 0.0)
    fed(meter, *[lap(2, step=0.1)] * 2)
    assert meter.costs(1).draft == pytest.approx(0.1)


def test_a_pass_of_a_head_is_priced_once_for_all_that_it_writes():
    """None of its passes was timed at the load."""
    meter = Meter(5.0, times(), LEVELS)
    meter._ahead = 4
    assert [meter.costs(1).draft_seconds(n) for n in (1, 4)] == pytest.approx([0.2, 0.35])
    assert [meter.costs(2).draft_seconds(n) for n in (1, 4)] == pytest.approx([0.24, 0.96])


def test_passes_that_rows_share_are_timed_by_the_graphs_that_they_fill():
    """Of four rows here graphs are for 4, 6 and 9 tokens; the first pass of each is no sample."""
    meter = Meter(3.0, times(), LEVELS, packed=True, shared=lambda: (3, 4, 6, 9))
    taken = {1.0: 1.0, 1.25: 1.4, 1.5: 1.4, 1.75: 2.0, 2.25: 2.0}
    for width, seconds in taken.items():
        how = {"width": width, "verify_seconds": seconds}
        fed(meter, *[lap(drafted=int(width > 1), rows=4, **how)] * 3)
    costs = meter.costs(4)
    assert costs.levels == (1.0, 1.5, 2.25)
    assert [costs.verify_seconds(width) for width in taken] == pytest.approx([*taken.values()])
    assert costs.judging[:6] == pytest.approx([0.0, 0.4, 0.4, 1.0, 1.0, 1.0])


def test_given_costs_never_change():
    given = Costs.synthetic(7)
    meter = fed(Meter.given(given), *[lap(3)] * 5)
    assert meter.costs(1) == given
    assert meter.costs(9) == replace(given, batch=9)
    assert not meter.timed(1)
    by_rows = Meter.given(lambda rows: Costs.synthetic(rows))
    assert by_rows.costs(3).ratio == 3


def test_what_the_engine_adds_is_apart():
    costs = fed(Meter(3.0, times(), LEVELS), *[lap(other_seconds=0.2)] * 3).costs(1)
    assert (costs.fixed, costs.plain) == (0.2, 1.2)


def test_costs_are_summed_now_and_then(monkeypatch):
    monkeypatch.setattr("forerun.engine.meter.EVERY", EVERY)
    meter = fed(Meter(3.0, times((1, 0.1)), LEVELS), lap())
    known = meter.costs(1)
    assert fed(meter, lap()).costs(1) is not known, "in the first rounds at once"
    known = fed(meter, *[lap()] * (STALE - 3), lap(2)).costs(1)
    assert fed(meter, *[lap(plain=9.0)] * (EVERY - 1)).costs(1) is known
    assert fed(meter, lap()).costs(1) is not known
