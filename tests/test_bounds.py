"""Bounds on a trace: nothing beats the oracle, and the informed policy sees no future."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shares import Clock, clocked, regret
from forerun.lab.bounds import bounds
from forerun.lab.bounds.acceptance import PAST, Acceptance, Past, TracePositions
from forerun.lab.bounds.bounds import (
    Bound,
    best_fixed,
    follow,
    oracle,
    paths,
    reach,
    tree_oracle,
    tuned,
)
from forerun.lab.bounds.informed import GRID, Stopper, Study, columns
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.replay import replay
from forerun.lab.traces.trace import SIGNALS, Trace
from made_traces import judged_greedily
from marks import spread

SOME = ("fixed(3)", "hf-threshold(threshold=0.5,length=4)", "svip(threshold=0.5,keep=false)")
CELLS = (
    Cell.synthetic(2),
    Cell.synthetic(4.2, slope=0.03, fixed=0.1),
    Cell.synthetic(40, slope=0.2),
    Cell(1.0, ((1, 9.0), (2, 4.0), (4, 4.5))),  # measured badly: two tokens cheaper than one
)


def random_trace(seed: int, prompts: int = 5, longest: int = 9, depth: int = 4, honest=0.0):
    """Runs from neighbouring positions agree while on the true path.

    `honest` is how well the signals tell hits from misses, 0 not at all and 1 for certain.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest + 1, prompts)
    ended = rng.random(prompts) < 0.6
    budgets = np.where(ended, sizes + rng.integers(0, 4, prompts), sizes)
    ease = rng.choice([0.3, 0.7, 0.95], prompts)
    places = np.arange(longest)
    hits = (rng.random((prompts, longest)) < ease[:, None]) & (places < sizes[:, None])
    sure = np.where(hits, 0.5 + honest / 2, 0.5 - honest / 2) + rng.normal(0, 0.1, hits.shape)
    tokens = np.where(places < sizes[:, None], rng.integers(3, 9, hits.shape), 0)
    tokens[ended, sizes[ended] - 1] = 2
    matches = np.zeros(hits.shape, np.int64)
    for p in range(longest):
        matches[:, p] = [
            next((i for i in range(depth) if p + i >= longest or not hits[r, p + i]), depth)
            for r in range(prompts)
        ]
    ends = np.full(hits.shape, depth + 1)
    shape = (prompts, longest, depth)
    top1 = np.clip(0.5 - honest / 2 + rng.normal(0, 0.1, shape), 0.01, 0.99)
    drafted = np.full(shape, 1)
    for r in range(prompts):
        for p in range(sizes[r]):
            n = matches[r, p]
            drafted[r, p, :n] = tokens[r, p : p + n]
            here = sure[r, p : p + min(n + 1, depth)]
            top1[r, p, : len(here)] = np.clip(here, 0.01, 0.99)
            if ended[r] and n == sizes[r] - p:
                ends[r, p] = n
            elif n < depth and rng.random() < 0.2:
                ends[r, p] = n + 1  # the draft believes the text ends here
                drafted[r, p, n] = 2
    on_text = places < sizes[:, None]
    doubt = -np.log(top1)
    signals = {
        "top1": top1, "chosen": top1, "entropy": doubt, "normalized_entropy": doubt / 5,
        "logit_margin": 4 * top1, "softmax_margin": top1,
    }  # fmt: skip
    kept = (np.arange(depth) < matches[..., None]).astype(float)
    judged = judged_greedily((kept * on_text[..., None]).astype(bool))
    judged["target_rank"] = rng.integers(1, 3, shape).astype(float)
    return Trace(
        families=tuple("ab"[i % 2] for i in range(prompts)),
        ids=tuple(str(i) for i in range(prompts)),
        sizes=sizes, budgets=budgets, prompt_tokens=np.full(prompts, 3),
        tokens=tokens, draft_tokens=drafted * on_text[..., None], matches=matches * on_text,
        ends=ends * on_text, accept_prob=kept * on_text[..., None],
        signals={name: signals[name] * on_text[..., None] for name in SIGNALS},
        lengths=depth * on_text, stops=np.zeros_like(ends),
        judged=judged,
    )  # fmt: skip


LEAVES = {"one": lambda drafted: 1, "each": lambda drafted: drafted}


def cheapest(trace: Trace, cell: Cell, row: int, at: int = 0, leaves: str = "") -> float:
    """By trying everything; a tree has this many leaves by tokens drafted."""
    size = trace.sizes[row]
    if at >= size:
        return 0.0
    room = trace.budgets[row] - at - 1
    seconds = []
    for drafted in range(trace.depth + 1):
        if drafted <= min(room, trace.ends[row, at]) or drafted == 0:
            spent = drafted * cell.draft + float(cell.verify_seconds(drafted + 1)) + cell.fixed
            kept = min(drafted, trace.matches[row, at])
            seconds.append(spent + cheapest(trace, cell, row, at + kept + 1, leaves))
            if drafted and leaves:
                wide = drafted + 1 + LEAVES[leaves](drafted)
                spent += float(cell.verify_seconds(wide) - cell.verify_seconds(drafted + 1))
                rank = trace.judged["target_rank"][row, at, min(kept, trace.depth - 1)]
                more = kept < min(drafted, trace.sizes[row] - at) and rank == 1
                after = cheapest(trace, cell, row, at + kept + 1 + more, leaves)
                seconds.append(spent + cell.tree + after)
    return min(seconds)


TREES = Cell(0.1, ((1, 1.0), (2, 1.02), (5, 1.1), (6, 1.6), (12, 2.0)), 0.05, tree=0.03)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((TREES, *CELLS)), st.sampled_from(("one", "each")))
def test_the_oracle_of_trees_is_the_cheapest_of_all_paths(seed, cell, leaves):
    trace = random_trace(seed, longest=6, depth=3)
    wanted = [cheapest(trace, cell, row, 0, leaves) for row in range(trace.prompts)]
    best = tree_oracle(trace, cell, comb=leaves == "each")
    np.testing.assert_allclose(best, wanted, rtol=1e-12)
    assert (best <= oracle(trace, cell).seconds + 1e-12).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_no_second_choices_beat_one_that_is_right(seed, leaves):
    trace = random_trace(seed, honest=0.5)
    spent = replay(trace, f"auto(leaves={leaves})", TREES).seconds
    assert (spent >= tree_oracle(trace, TREES) - 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(CELLS))
def test_the_oracle_is_the_cheapest_of_all_paths(seed, cell):
    trace = random_trace(seed, longest=7, depth=3)
    best = oracle(trace, cell)
    wanted = [cheapest(trace, cell, row) for row in range(trace.prompts)]
    np.testing.assert_allclose(best.seconds, wanted, rtol=1e-12)
    assert (best.path.drafted >= 0).any(1).all()


def test_the_oracle_by_hand():
    trace = random_trace(1, prompts=1, longest=5, depth=4)
    keys = {
        "sizes": np.array([5]), "budgets": np.array([9]),
        "matches": np.array([[3, 2, 1, 0, 1]]), "ends": np.array([[5, 5, 5, 5, 1]]),
    }  # fmt: skip
    trace = Trace(**{**vars(trace), **keys})
    # Three drafted and the fourth token of the target's own; then plain, not to pay for a draft.
    best = oracle(trace, Cell.synthetic(4, fixed=0.5))
    assert best.path.drafted.tolist() == [[3, 0]]
    assert best.seconds.tolist() == [0.75 + 1.5 + 1.5]
    assert best.speedup.tolist() == [5 * 1.5 / 3.75]
    # With dear drafts it is plain decoding.
    assert oracle(trace, Cell.synthetic(0.9)).speedup.tolist() == [1.0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(CELLS),
    st.sampled_from((
        "fixed(0)", "fixed(2)", "fixed(9)", "hf-heuristic", "hf-threshold(dynamic=true)",
        "gammatune(length=3)", "gammatune+(keep=false)", "svip(keep=false)", "goodput",
        "adaedl(threshold=0.3)", "cm-asd", "cm-asd(two_pass=true)", "bandit", "exllama-ema",
        "exllama-confidence",
    )),
)  # fmt: skip
def test_no_controller_beats_the_oracle(seed, cell, spec):
    trace = random_trace(seed, honest=0.5)
    assert (replay(trace, spec, cell).seconds >= oracle(trace, cell).seconds - 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(CELLS))
def test_no_choice_of_lengths_beats_the_oracle(seed, cell):
    trace = random_trace(seed)
    wanted = np.random.default_rng(seed).integers(0, 6, trace.tokens.shape)
    spent = follow(trace, wanted).seconds(cell)
    assert (spent >= oracle(trace, cell).seconds - 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6), st.sampled_from(CELLS))
def test_fixed_lengths_are_those_of_replay(seed, length, cell):
    trace = random_trace(seed)
    path = follow(trace, np.full(trace.tokens.shape, length))
    real = replay(trace, f"fixed({length})", cell)
    assert ((path.drafted >= 0).sum(1) == real.rounds).all()
    assert (np.maximum(path.drafted, 0).sum(1) == real.drafted).all()
    np.testing.assert_allclose(path.seconds(cell), real.seconds)


def test_the_best_fixed_length_is_the_best():
    trace, cell = random_trace(3, prompts=40, longest=30, depth=6), CELLS[1]
    best, length = best_fixed(trace, cell)
    means = [
        np.exp(np.log(replay(trace, f"fixed({n})", cell).speedup).mean())
        for n in range(trace.depth + 1)
    ]
    assert length == np.argmax(means)
    assert best.mean == pytest.approx(max(means))
    assert best.name == f"fixed({length})"


def test_reach_ends_with_budget_end_of_text_and_depth():
    trace = random_trace(0, prompts=1, longest=5, depth=4)
    keys = {
        "sizes": np.array([4]), "budgets": np.array([5]),
        "ends": np.array([[5, 3, 1, 5, 0]]),
    }  # fmt: skip
    assert reach(Trace(**{**vars(trace), **keys})).tolist() == [[4, 3, 1, 1, 0]]


@pytest.mark.parametrize("spec", [*SOME, "gammatune", "cm-asd(two_pass=true)"])
def test_a_path_is_priced_as_replay_does(spec):
    trace = random_trace(5, prompts=12, longest=20, honest=0.6)
    prepared = paths(trace, [spec])
    for cell in CELLS:
        np.testing.assert_allclose(
            prepared[spec].seconds(cell), replay(trace, spec, cell).seconds, rtol=1e-12
        )


def test_every_spec_of_the_grid_can_be_replayed():
    trace = random_trace(5, prompts=2, longest=4)
    assert set(paths(trace, GRID)) == set(GRID)


def test_tuned_puts_the_best_first():
    trace = random_trace(5, prompts=12, longest=20, honest=0.6)
    ranked = tuned(trace, CELLS[1], paths(trace, SOME))
    assert {bound.name for bound in ranked} == set(SOME)
    assert [b.mean for b in ranked] == sorted((b.mean for b in ranked), reverse=True)


def test_clocks_of_a_controller_and_of_its_path_agree():
    trace, cell = random_trace(7, prompts=8, longest=15), CELLS[1]
    clock = Clock(trace)
    real = replay(trace, "fixed(3)", cell, clock)
    path = paths(trace, ["fixed(3)"])["fixed(3)"]
    bound = Bound.of("fixed(3)", path, trace, cell)
    np.testing.assert_allclose(clocked(bound, trace, cell), clock.seconds)
    assert (np.isnan(clock.seconds) == ~trace.valid).all()
    last = clock.seconds[np.arange(8), trace.sizes - 1]
    np.testing.assert_allclose(last, real.seconds)


def test_regret_ends_at_the_whole_loss():
    trace, cell = random_trace(7, prompts=8, longest=15), CELLS[1]
    clock = Clock(trace)
    real, best = replay(trace, "fixed(3)", cell, clock), oracle(trace, cell)
    lost = regret(clock.seconds, clocked(best, trace, cell))
    assert lost.shape == (15,)
    assert lost[-1] == pytest.approx((real.seconds - best.seconds).mean())
    assert (regret(clock.seconds, clock.seconds) == 0).all()


@cache
def study() -> Study:
    trace = random_trace(11, prompts=60, longest=40, depth=6, honest=0.5)
    return Study(trace, paths(trace, SOME))


def test_a_trace_without_a_kept_token_has_bounds():
    trace = random_trace(3)
    nothing = replace(
        trace,
        matches=np.zeros_like(trace.matches),
        accept_prob=np.zeros_like(trace.accept_prob),
    )
    tried = Study(nothing, paths(nothing, ["fixed(0)", *SOME])).tried(CELLS[1])
    assert {bound.name for bound in tried} == {"fixed(0)", *SOME}, "nothing was fitted"
    assert tried[0].name == "fixed(0)"
    assert tried[0].seconds == pytest.approx(oracle(nothing, CELLS[1]).seconds)


@pytest.mark.parametrize("cell", spread(3, CELLS[:3]))
def test_the_informed_bound_lies_between_what_was_tried_and_the_oracle(cell):
    trace = study().trace
    tried = study().tried(cell)
    means = {bound.name: bound.mean for bound in reversed(tried)}
    assert tried[0].mean == max(means.values())
    for spec in SOME:
        speed = np.exp(np.log(replay(trace, spec, cell).speedup).mean())
        assert means[spec] == pytest.approx(speed)
    assert (tried[0].seconds >= oracle(trace, cell).seconds - 1e-9).all()


def test_with_telling_signals_the_fitted_policy_beats_every_fixed_length():
    bound = study().tried(CELLS[1])[0]
    assert bound.name not in SOME
    assert bound.mean > 1.02 * best_fixed(study().trace, CELLS[1])[0].mean


def test_it_drafts_nothing_where_that_never_pays():
    bound = study().tried(Cell.synthetic(0.5))[0]
    np.testing.assert_allclose(bound.speedup, 1.0)
    assert bound.path.steps.max() == 0


def test_decisions_do_not_depend_on_what_is_not_yet_drafted():
    prepared, model = study().prepared, study().acceptance
    rng = np.random.default_rng(0)
    stopper = Stopper(model, rng.normal(size=12 + 2 * PAST), np.full(6, 0.3))
    index, past = np.arange(50), rng.normal(size=(50, PAST))
    before = stopper.gain(prepared, index, past)
    for depth in range(6):
        trace = study().trace
        changed = {k: v.copy() for k, v in trace.signals.items()}
        for values in changed.values():
            values[..., depth:] = rng.random(values[..., depth:].shape)
        other = model.prepare(TracePositions(Trace(**{**vars(trace), "signals": changed})))
        after = stopper.gain(other, index, past)
        np.testing.assert_allclose(after[:, : depth + 1], before[:, : depth + 1])
        if depth < 5:
            assert not np.allclose(after[:, depth + 1 :], before[:, depth + 1 :])


def test_the_past_holds_only_what_was_judged():
    chance = np.random.default_rng(0).random((2, 5))
    one, two = Past(2), Past(2)
    rows, drafted, matches = np.arange(2), np.array([4, 2]), np.array([1, 5])
    one.note(rows, chance, drafted, matches)
    hidden = chance.copy()
    hidden[0, 2:] = 0.5  # beyond the first miss nothing is judged
    hidden[1, 2:] = 0.5  # nothing is drafted there
    two.note(rows, hidden, drafted, np.array([1, 2]))
    place = np.array([2, 3])
    np.testing.assert_array_equal(one.features(rows, place), two.features(rows, place))


def test_the_past_fades_token_by_token():
    chance = np.random.default_rng(0).random((1, 5))
    row, whole = np.array([0]), Past(1)
    whole.note(row, chance, np.array([4]), np.array([3]))
    split = Past(1)
    split.note(row, chance, np.array([2]), np.array([3]))
    split.note(row, np.roll(chance, -2, 1), np.array([2]), np.array([1]))
    for name in ("surprise", "hits", "weight", "judged", "cut"):
        np.testing.assert_allclose(getattr(whole, name), getattr(split, name))
    untouched = split.features(row, np.array([4]))
    split.note(row, chance, np.array([0]), np.array([3]))
    # A plain round judges nothing and is only counted.
    changed = split.features(row, np.array([4])) != untouched
    assert np.flatnonzero(changed[0]).tolist() == [2 * 3 + 4]


def test_acceptance_is_calibrated_where_it_was_fitted():
    prepared, trace = study().prepared, study().trace
    assert isinstance(study().acceptance, Acceptance)
    texts = prepared.texts
    can = texts.reach > 0
    hit = texts.matches[can] > 0
    assert prepared.chance[can, 0].mean() == pytest.approx(hit.mean(), abs=0.05)
    assert prepared.chance[can, 0][hit].mean() > prepared.chance[can, 0][~hit].mean() + 0.2
    assert len(texts.row) == trace.sizes.sum()


def test_columns_begin_with_a_look_ahead():
    kept, after = np.array([[1.0, 0.5]]), np.array([[0.8, 0.4]])
    x = columns(kept, after, np.zeros((1, PAST)), np.array([0.1, 0.2]))
    np.testing.assert_allclose(x[0, :, :2], [[0.1, 0.8], [0.2, 0.2]])


def test_the_maker_of_traces_is_consistent():
    trace = random_trace(2, prompts=30, longest=20, honest=0.5)
    for row in range(trace.prompts):
        for at in range(trace.sizes[row]):
            n = trace.matches[row, at]
            assert (trace.draft_tokens[row, at, :n] == trace.tokens[row, at : at + n]).all()
            for i in range(1, min(n, trace.sizes[row] - at - 1) + 1):
                if i < trace.depth:
                    same = [
                        trace.signals["top1"][row, at, i],
                        trace.signals["top1"][row, at + i, 0],
                    ]
                    assert same[0] == same[1]
    assert bounds.reach(trace).max() <= trace.depth
