"""The meter finds what rounds cost, whatever happens on a shared machine."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.costs import Costs
from forerun.engine.meter import PLAIN_GUESS, RATIO, STALE, Lap, Meter


def test_nothing_is_known_before_a_round_was_timed():
    meter = Meter()
    assert meter.wants(1) == meter.wants(4) == "draft"
    costs = meter.costs(1)
    assert costs.verify_seconds(2) / costs.draft == pytest.approx(RATIO)
    assert costs.plain == pytest.approx(PLAIN_GUESS * costs.verify_seconds(2))
    meter.tell(Lap(1, 0, verify_seconds=0.01))
    assert meter.wants(1) == "draft"
    assert meter.costs(1).plain == 0.01


def test_a_round_that_drafted_for_nothing_is_no_plain_one() -> None:
    meter = Meter()
    meter.tell(Lap(1, 0, verify_seconds=0.010))
    before = meter.costs(1)
    meter.tell(Lap(1, 0, 1, 0.002, 0.002, 0.005))
    assert meter.costs(1) == before


def test_given_costs_never_change():
    costs = Costs.synthetic(7, 0.1)
    meter = Meter.given(costs)
    for width in range(20):
        meter.tell(Lap(1, width, width, 0.5, 0.1, 0.2))
        assert meter.costs(1) is meter.costs(9) is costs
        assert meter.wants(1) is meter.wants(16) is None


def test_costs_are_found_and_outliers_are_not():
    meter, rng = Meter(), np.random.default_rng(0)
    for i in range(200):
        drafted = int(rng.integers(0, 9))
        slow = 20.0 if i % 9 == 5 else 1.0  # also another task's turn on the machine
        verify = (0.010 + (drafted > 0) * 0.003 + 0.0004 * drafted) * slow
        meter.tell(Lap(1, drafted, drafted, 0.002 * drafted * slow, 0.0, verify))
    costs = meter.costs(1)
    assert costs.draft == pytest.approx(0.002, rel=0.01)
    assert costs.plain == pytest.approx(0.010, rel=0.01)
    assert costs.verify_seconds(2) == pytest.approx(0.0134, rel=0.05)
    assert costs.widening == pytest.approx(0.0004, rel=0.5)


def test_a_first_step_that_is_slower_is_told_apart():
    meter = Meter()
    for width in (1, 2, 5, 3, 1, 4, 8):
        meter.tell(Lap(1, width, width, 0.002 + 0.001 * (width - 1), 0.002, 0.010, 0.5))
    costs = meter.costs(1)
    assert costs.draft == pytest.approx(0.001)
    assert costs.first == pytest.approx(0.001)
    assert costs.catch_up == 0.5
    assert costs.one == pytest.approx(0.012, rel=0.02)
    # Only first steps were seen: later ones are taken to be faster.
    meter = Meter()
    meter.tell(Lap(1, 1, 1, 0.002, 0.002, 0.010))
    assert 0 < meter.costs(1).draft < 0.002
    # Not even that: the one step caught up.
    meter = Meter()
    meter.tell(Lap(1, 1, 0, 0.0, 0.0, 0.010, 0.1))
    assert meter.costs(1).ratio == pytest.approx(RATIO * PLAIN_GUESS)


def test_a_slow_pass_or_step_does_not_end_drafting_before_others_were_timed():
    meter = Meter(5.0, passes=((1, 1.0), (2, 1.2), (4, 1.2)), levels=(4,))
    for _ in range(8):
        meter.tell(Lap(1, 0, verify_seconds=0.010))
    for _ in range(2):
        meter.tell(Lap(1, 2, 2, 0.101, 0.001, 0.070))
    assert meter.costs(1).verify_seconds(2) == pytest.approx(0.024), "twice as slow as when warm"
    other = Meter(5.0)
    for draft in (0.101, 0.003, 0.003):
        other.tell(Lap(1, 0, verify_seconds=0.010))
        other.tell(Lap(1, 0, verify_seconds=0.010))
        other.tell(Lap(1, 2, 2, draft, 0.001, 0.014))
        assert other.costs(1).draft <= 0.004, "twice what sizes say"
    for _ in range(3):
        meter.tell(Lap(1, 2, 2, 0.101, 0.001, 0.070))
    assert meter.costs(1).verify_seconds(2) == pytest.approx(0.070), "it is slow, then"
    assert meter.costs(1).draft == pytest.approx(0.1)


def test_one_slow_first_step_does_not_end_drafting_in_a_batch():
    meter = Meter()
    meter.tell(Lap(4, 3, 3, 0.044 + 2 * 0.0007, 0.044, 0.010))
    assert meter.costs(4).draft == pytest.approx(0.0007)
    assert meter.costs(4).draft_seconds(1) == pytest.approx(0.002), "twice what is usual"
    meter.tell(Lap(4, 3, 3, 0.044 + 2 * 0.0007, 0.044, 0.010))
    assert meter.costs(4).draft_seconds(1) == pytest.approx(0.044), "it is slow, then"


def test_a_busy_start_is_forgotten():
    meter, draft = Meter(), lambda slow: Lap(1, 2, 2, 0.002 * slow, 0.001 * slow, 0.014)
    for slow in (20, 20, 20):
        meter.tell(draft(slow))
    assert meter.wants(1) is None
    assert meter.costs(1).draft > 0.01
    for _ in range(STALE + 1):  # it rests
        meter.tell(Lap(1, 0, verify_seconds=0.010))
    assert meter.wants(1) is None
    meter.tell(draft(1.5))  # a probe: its graph has left the caches
    assert meter.wants(1) == "draft"
    meter.tell(draft(1))
    assert meter.costs(1).draft == pytest.approx(0.001)
    assert meter.wants(1) is None
    meter.tell(Lap(1, 0, verify_seconds=0.010))
    meter.tell(draft(1.5))
    assert meter.wants(1) is None, "what is known is new"
    assert meter.costs(1).draft == pytest.approx(0.001)


def test_a_probe_that_only_caught_up_leaves_the_cost_ratio_as_it_was():
    meter, draft = Meter(), Lap(1, 3, 3, 0.030, 0.010, 0.014)
    for _ in range(8):
        meter.tell(Lap(1, 0, verify_seconds=0.010))
        meter.tell(draft)
        meter.tell(draft)
    assert meter.costs(1).draft == pytest.approx(0.010)
    for _ in range(STALE + 1):
        meter.tell(Lap(1, 0, verify_seconds=0.010))
    meter.tell(Lap(1, 1, 0, 0.0, 0.0, 0.014, catch_up_seconds=0.3))
    assert meter.costs(1).draft == pytest.approx(0.010, rel=0.1)


def test_a_draft_as_large_as_the_target_is_not_taken_for_a_small_one():
    for sizes, ratio in ((1.0, 1.0), (100.0, RATIO)):
        costs = Meter(sizes).costs(1)
        assert costs.verify_seconds(2) / costs.draft == pytest.approx(ratio)


def test_a_row_alone_is_timed_after_its_own_kind_though_batches_are_known():
    meter, draft = Meter(), Lap(1, 2, 2, 0.002, 0.001, 0.014)
    laps(meter, 8, 0.3, 20)
    assert meter.wants(1) is None, "batches tell enough to begin with"
    for _ in range(2):  # the first comes after no draft and is replaced by the second
        meter.tell(draft)
        assert meter.wants(1) == "draft"
    meter.tell(draft)
    assert meter.wants(1) is None


def test_where_the_text_decides_when_there_is_a_draft_both_kinds_cost_what_changing_does():
    slow, fast = Lap(1, 4, 4, 0.004, 0.0, 0.010), Lap(1, 4, 4, 0.004, 0.0, 0.006)
    plain = Lap(1, 0, verify_seconds=0.004)
    for alternates, seconds in ((False, 0.006), (True, 0.010)):
        meter = Meter(alternates=alternates)
        for lap in (fast, fast, *[plain, slow] * 7):
            meter.tell(lap)
        assert meter.costs(1).verify_seconds(5) == pytest.approx(seconds, rel=0.01)


def test_all_that_one_drafted_token_takes_is_counted():
    meter = Meter()
    for _ in range(5):
        meter.tell(Lap(1, 3, 3, 0.006, 0.003, 0.010))
    assert meter.costs(1).draft_seconds(1) == pytest.approx(0.003)
    for _ in range(11):  # 0.002 of each besides the step
        meter.tell(Lap(1, 1, 1, 0.005, 0.003, 0.010))
    assert meter.costs(1).draft == pytest.approx(0.0015)
    assert meter.costs(1).draft_seconds(1) == pytest.approx(0.005)


def test_more_tokens_never_take_less_time():
    meter = Meter()
    for _ in range(5):
        meter.tell(Lap(1, 0, verify_seconds=0.02))
        meter.tell(Lap(1, 3, 3, 0.003, 0.001, 0.01))
    assert meter.costs(1).plain <= meter.costs(1).verify_seconds(2)


def laps(meter, rows, slope, rounds, draft=0.2, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        width = int(rng.integers(0, 7))
        first = draft * (width > 0)
        meter.tell(Lap(rows, width, width, draft * width, first, 1 + slope * width))


def test_costs_are_known_per_size_of_the_batch():
    meter = Meter()
    laps(meter, 8, 0.3, 100)
    laps(meter, 2, 0.05, 100)
    small, large = meter.costs(2), meter.costs(8)
    assert small.widening == pytest.approx(0.05, rel=0.3)
    assert large.widening == pytest.approx(0.3, rel=0.3)
    assert [meter.costs(rows) for rows in (5, 6, 7)] == [large] * 3  # share their costs
    assert meter.wants(8) is meter.wants(2) is meter.wants(1) is None
    assert meter.wants(4) == "plain"  # to compare with
    new = meter.costs(4)
    assert new.draft == pytest.approx(0.2)
    share = new.widening / new.verify_seconds(2)
    assert share > small.widening / small.verify_seconds(2)
    meter.tell(Lap(4, 0, verify_seconds=1.1))
    assert meter.wants(4) is None
    assert meter.costs(4).plain == pytest.approx(1.1)


def test_a_plain_round_of_a_batch_says_nothing_of_what_drafts_cost():
    meter = Meter()
    meter.tell(Lap(3, 0, 0, 0.0, 0.0, 0.015))
    assert meter.wants(3) == "draft"
    assert meter.costs(3).ratio == pytest.approx(RATIO)


def test_reading_prompts_is_charged_per_token_of_all_rows():
    meter = Meter()
    for width in (2, 3, 4) * 4:
        meter.tell(Lap(4, width, width, 0.002 * width, 0.0, 0.010))
    meter.finished(30, 10)
    assert meter.costs(4).reading == 0  # how long a drafter reads is not known
    for _ in range(3):
        meter.caught_up(4, 0.002 + 0.006, 60)  # a step, and 0.1 ms a token
    charged = meter.costs(4)
    assert charged.reading == pytest.approx(4 * 0.0001 * 3)
    assert meter.costs(4) is charged
    meter.finished(32, 10)  # hardly more
    assert meter.costs(4) is charged, "all that follows from them would be computed anew"
    meter.finished(26, 10)
    assert meter.costs(3).reading == pytest.approx(3 * 0.0001 * 3, rel=0.1)
    assert (charged.draft, charged.verify) == (0.002, meter.costs(3).verify)
    meter.caught_up(4, 0.001, 60)  # less than a step says nothing
    assert meter.costs(4).reading == pytest.approx(charged.reading)
    for _ in range(40):
        meter.finished(0, 10)  # their prompts were all cached
    assert meter.costs(4).reading < 0.02 * charged.reading


def test_passes_of_levels_cost_what_they_did_relative_to_each_other():
    levels, rng = (1, 4, 5, 8), np.random.default_rng(0)
    timed = ((1, 2.2), (2, 2.5), (4, 2.5), (5, 3.4), (6, 4.0), (8, 4.0), (16, 6.0))
    meter = Meter(passes=timed, levels=levels)
    assert meter.costs(1).verify_seconds(8) / meter.costs(1).verify_seconds(3) == 4.0 / 2.5
    for drafted in (3, 7, 3, 5, 0, 0, 0, 1, 3, 3, 12):  # the machine is twice as slow now
        width = next((level for level in levels if level > drafted), drafted + 1)
        seconds = 0.002 * float(np.interp(width, *zip(*timed, strict=True)))
        seconds *= float(rng.uniform(0.97, 1.03)) * (5 if drafted == 5 else 1)  # one is disturbed
        meter.tell(Lap(1, drafted, drafted, 0.0004 * drafted, 0.0, seconds))
    costs = meter.costs(1)
    assert costs.levels == levels
    for width, seconds in timed:
        assert costs.verify_seconds(width) == pytest.approx(0.002 * seconds, rel=0.04)
    assert meter.costs(4).levels == (), "what rows of a batch share is another size every time"


def test_a_level_that_was_timed_wrongly_at_the_start_is_found_out():
    meter = Meter(passes=((1, 2.2), (2, 4.6), (4, 4.6), (5, 4.8), (8, 4.8)), levels=(1, 4, 8))
    for _ in range(6):
        for drafted, seconds in ((3, 0.0025), (7, 0.004), (7, 0.004), (3, 0.0025)):
            meter.tell(Lap(1, drafted, drafted, 0.0004 * drafted, 0.0, seconds))
    costs = meter.costs(1)
    assert [costs.verify_seconds(n) for n in (2, 4, 5, 8)] == [0.0025, 0.0025, 0.004, 0.004]
    for _ in range(STALE):
        meter.tell(Lap(1, 3, 3, 0.0012, 0.0, 0.0025))
    for seconds in (0.1, 0.2, 0.3, 0.4) * 2:  # hardly, but with the machine busy all the while
        meter.tell(Lap(1, 7, 7, 0.0028, 0.0, seconds))
    assert meter.costs(1).verify_seconds(8) == 0.005, "no longer than two passes of four"


def test_what_a_draft_costs_that_is_thrown_away():
    meter = Meter()
    for _ in range(2):
        meter.tell(Lap(1, 1, 1, 0.002, 0.0, 0.014, catch_up_seconds=0.003))
    for _ in range(4):
        meter.tell(Lap(1, 0, verify_seconds=0.010))
    assert meter.costs(1).catch_up == 0.003
    assert meter.costs(1).cold == 0
    for _ in range(4):
        meter.tell(Lap(1, 0, 1, 0.002, 0.002, 0.013))
        meter.tell(Lap(1, 0, verify_seconds=0.011))  # behind a draft
        meter.tell(Lap(1, 0, verify_seconds=0.010))
    costs = meter.costs(1)
    assert costs.plain == 0.010
    assert costs.cold == pytest.approx(0.003)
    assert costs.judging[0] == pytest.approx(0.001)
    assert costs.prefill
    assert not {"prefill", "catch_up"} & set(costs.to_json())


def test_a_pass_behind_a_draft_of_its_own_layers_takes_less_than_a_plain_one():
    meter, other = Meter(shares_layers=True), Meter()
    for each_meter in (meter, other):
        for _ in range(4):
            each_meter.tell(Lap(1, 2, 2, 0.002, 0.0, 0.008))
        for _ in range(4):
            each_meter.tell(Lap(1, 0, 1, 0.001, 0.001, 0.0075))  # it could not say a token
        for _ in range(4):
            each_meter.tell(Lap(1, 0, verify_seconds=0.010))
    costs = meter.costs(1)
    assert costs.plain == 0.010
    assert costs.cold == -costs.draft, "never as if the step had taken less than no time"
    assert costs.round_seconds(1, 1) == pytest.approx(0.010)
    assert costs.judging[0] == pytest.approx(max(costs.verify_seconds(2) - 0.009, 0))
    assert other.costs(1).plain < 0.008, "elsewhere more tokens never take less"


def test_cold_caches_cost_the_same_at_any_width_and_a_faster_machine_is_so_in_proportion():
    timed = ((1, 2.0), (2, 2.5), (4, 2.5), (5, 4.0), (8, 4.0))
    for narrow, wide in ((4.5, 6.0), (1.25, 2.0)):
        for drafted, taken in ((3, narrow), (7, wide)):  # one of them is timed, the other follows
            meter = Meter(passes=timed, levels=(1, 4, 8))
            for _ in range(2):
                meter.tell(Lap(1, drafted, drafted, 0.3 * drafted, 0.0, taken))
            costs = meter.costs(1)
            assert costs.verify_seconds(4) == pytest.approx(narrow)
            assert costs.verify_seconds(8) == pytest.approx(wide)
