"""Replay counts exactly what the live engine counts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import forerun
from forerun import Model, zoo
from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.drafters.model import ModelDrafter
from forerun.engine import Sampling
from forerun.engine.meter import Meter
from forerun.errors import SettingError
from forerun.governors import Governor
from forerun.lab.traces.record import Task, record
from forerun.lab.traces.replay import replay, stream
from forerun.lab.traces.results import Replay, Rounds, geometric, rate, summarise
from forerun.lab.traces.trace import Trace, concatenate
from forerun.testing import ScriptedModel
from forerun.types import RoundOutcome, Stop
from made_traces import random_trace, trace_of
from marks import slow_but
from test_engine import chaotic, noisy

NESTED = {
    "bounded": [
        "bounded(gammatune+,high=3)",
        "bounded(cm-asd(two_pass=true),high=6)",
        "bounded(survival,low=1,high=8)",
    ]
}
SETTINGS = {
    "auto": [
        "auto(cost=4,slope=0.05)",
        "auto(high=3)",
        "auto(cost=0.5)",
        "auto(calibrated)",
        "auto(leaves=1)",
        "auto(leaves=4,cost=4)",
    ],
    "fixed": ["fixed(0)", "fixed(1)", "fixed(40)"],
    "hf-heuristic": ["hf-heuristic(length=2,high=5)", "hf-heuristic(persistent=true)"],
    "hf-threshold": [
        "hf-threshold(threshold=0.7)",
        "hf-threshold(dynamic=true,history=20)",
        "hf-threshold(dynamic=true,history=20,persistent=true)",
    ],
    "gammatune": [
        "gammatune(literal=true)",
        "gammatune(length=20,eta=0.7)",
        "gammatune(expand=next,persistent=true)",
    ],
    "gammatune+": ["gammatune+(threshold=0.6,keep=false,early_stop=skip)"],
    "goodput": ["goodput(cost=20,slope=0)", "goodput(cost=1.2)", "goodput(survival)"],
    "survival": ["survival(threshold=0.7)"],
    "bandit": ["bandit(policy=thompson)"],
    "svip": ["svip(keep=false,threshold=0.2)"],
    "adaedl": ["adaedl(keep=false,threshold=0.8)"],
    "exllama-ema": ["exllama-ema(skip_ema=2,probe_interval=3)"],
    "exllama-confidence": ["exllama-confidence(high=12,burn_in=9,least=2,confidence=0.7)"],
    "sglang-ema": ["sglang-ema(length=0,candidate_steps='0,2,6',warmup_batches=0)"],
    "cm-asd": [
        "cm-asd(alpha=1,high=16)",
        "cm-asd(high=16,two_pass=true)",
        "cm-asd(entropy=0.5,margin=0,softmax=0.5,normalized=false)",
    ],
}
SPECS = [
    spec
    for name in CONTROLLERS.names()
    for spec in NESTED.get(name, [name, *SETTINGS.get(name, [])])
]
FEW = "auto", "svip", "gammatune"
"""On the models that ship."""
CELL = Costs.synthetic(10, slope=0.02, fixed=0.1)


def recorded(model: Model, tasks: list[Task], depth: int = 40, rule: str = "gumbel") -> Trace:
    return record(model, tasks, depth=depth, rule=rule)


def live(
    model: Model, tasks: list[Task], spec: str, rows: int = 16, rule: str = "gumbel"
) -> list[Any]:
    prompts, sampling = [t.tokens for t in tasks], [t.sampling for t in tasks]
    return model.generate(prompts, controller=spec, rule=rule, sampling=sampling, batch_size=rows)


def replayed(trace: Trace, spec: str, cell: Costs = CELL) -> tuple[Replay, list[Any]]:
    """As requests of one engine, one after another if they learn from each other.

    Also `(drafted, accepted, why it stopped)` of every round of every prompt.
    """
    rounds: list[list[tuple[int, ...]]] = [[] for _ in range(trace.prompts)]

    def watch(now: Rounds) -> None:
        counts = zip(now.drafted, now.accepted, now.stopped_by, strict=True)
        for i, what in zip(now.prompt, counts, strict=True):
            rounds[i].append(tuple(map(int, what)))

    return stream(trace, spec, cell, np.arange(trace.prompts), watch), rounds


def carries(spec: str) -> bool:
    """Whether a request starts from the one before."""
    controller = CONTROLLERS.make(spec)
    if isinstance(controller, Governor):
        return controller.given is None
    last = controller.observe(controller.start(), RoundOutcome(1, 0, [0.0], 0, [], 1.2))
    later, fresh = controller.start(True, last), controller.start(True)
    return later is last or repr(later) != repr(fresh)


def agree(model: Model, tasks: list[Task], trace: Trace, spec: str, rows: int) -> None:
    if carries(spec):  # neighbours would have a say
        rows = 1
    fresh = Model(model.target, model.drafter)
    fresh.eos, fresh.meter = model.eos, Meter.given(CELL)
    result, rounds = replayed(trace, spec)
    assert not result.capped.any(), "the trace is too shallow for an exact replay"
    for i, done in enumerate(live(fresh, tasks, spec, rows)):
        assert rounds[i] == [(r.drafted, r.accepted, int(r.stopped_by)) for r in done.rounds]
        stats = done.stats
        counts = (stats.rounds, stats.drafted, stats.accepted, stats.tokens)
        ours = (result.rounds[i], result.drafted[i], result.accepted[i], result.committed[i])
        assert ours == counts
        leaves = [stats.counters.get(name, 0) for name in ("leaves", "leaves_kept")]
        assert leaves == [result.leaves[i], result.leaves_kept[i]]


@pytest.fixture(scope="module", params=[0.0, 0.7])
def scripted(request: Any) -> Any:
    """Greedy texts, and texts drawn by noise."""
    script = chaotic(31)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 32, 0.4))
    model = Model(target, ModelDrafter(draft, target.vocab_size))
    model.eos = frozenset({3})
    prompts = [[i, 5] for i in range(7)] + [[3], [4, 5, 6]]
    tasks = [
        Task("ab"[i % 2], str(i), ids, Sampling(
            max_new_tokens=40, repetition_penalty=1.5 if i == 7 else 1.0,
            temperature=request.param, seed=i,
        ))
        for i, ids in enumerate(prompts)
    ]  # fmt: skip
    return model, tasks, recorded(model, tasks)


@pytest.fixture(scope="module")
def shipped() -> Any:
    model = forerun.load(device="cpu")
    tasks = []
    for family in zoo.families():
        prompt = zoo.prompts(family, "val", limit=1)[0]
        how = Sampling(
            max_new_tokens=min(16, prompt.max_new_tokens),
            repetition_penalty=1.2 if family == "stories" else 1.0,
        )
        tasks.append(Task(family, prompt.id, model.encode(prompt.prompt), how))
    return model, tasks, recorded(model, tasks, depth=16)


@pytest.mark.parametrize("spec", SPECS)
def test_scripted_rounds_are_those_of_the_live_engine(scripted: Any, spec: str) -> None:
    agree(*scripted, spec, rows=16)


@pytest.mark.parametrize("spec", slow_but(SPECS, FEW.__contains__))
def test_shipped_rounds_are_those_of_the_live_engine(shipped: Any, spec: str) -> None:
    agree(*shipped, spec, rows=1)


def test_every_controller_is_replayed() -> None:
    assert {spec.partition("(")[0] for spec in SPECS} == set(CONTROLLERS.names())


@pytest.mark.parametrize(
    "cell",
    [
        Costs(0.3, ((1, 1.0), (2, 1.3), (4, 1.4)), 0.1, first=0.2),
        Costs.synthetic(2.5, slope=0.15),
        Costs.synthetic(1.1, slope=0.3),
        Costs(0.1, ((1, 1.0), (2, 2.0), (4, 2.2)), 0.1, cold=0.2),
        Costs(0.1, ((1, 1.0), (2, 2.0), (4, 2.2)), 0.1, cold=0.2, prefill=0.1),
    ],
)
def test_auto_is_followed_at_any_costs(scripted: Any, cell: Costs) -> None:
    """Round for round, also what one request leaves to the next and where it rests."""
    model, tasks, trace = scripted
    fresh = Model(model.target, model.drafter)
    fresh.eos, fresh.meter = model.eos, Meter.given(cell)
    tasks, trace = tasks * 3, concatenate([trace] * 3)
    _, rounds = replayed(trace, "auto", cell)
    done = live(fresh, tasks, "auto", rows=1)
    assert rounds == [[(r.drafted, r.accepted, int(r.stopped_by)) for r in d.rounds] for d in done]


def test_a_prompt_does_not_depend_on_the_others(scripted: Any) -> None:
    _, _, trace = scripted
    for spec in ("gammatune+", "goodput", "hf-threshold(dynamic=true)"):
        whole = replay(trace, spec, CELL)
        for i in range(trace.prompts):
            alone = replay(trace.take([i]), spec, CELL)
            for f in fields(Replay):
                assert getattr(alone, f.name)[0] == getattr(whole, f.name)[i], f.name


def test_seconds_are_those_of_steps_widths_and_rounds(scripted: Any) -> None:
    _, _, trace = scripted
    for spec in ("fixed(3)", "gammatune+(keep=false)", "cm-asd(two_pass=true)"):
        seconds, steps = np.zeros(trace.prompts), np.zeros(trace.prompts, dtype=int)

        def watch(now: Rounds, seconds: Any = seconds, steps: Any = steps) -> None:
            verify = 1 + 0.02 * now.drafted
            seconds[now.prompt] += now.steps / 10 + verify + 0.1
            steps[now.prompt] += now.steps
            assert (now.steps >= now.drafted).all()
            assert (now.accepted <= now.drafted).all()

        result = replay(trace, spec, CELL, watch)
        assert result.seconds == pytest.approx(seconds)
        assert result.steps.tolist() == steps.tolist()
    assert (replay(trace, "cm-asd(two_pass=true)", CELL).wasted >= 0).all()


def test_plain_decoding_has_a_speedup_of_one(scripted: Any) -> None:
    result = replay(scripted[2], "fixed(0)", CELL)
    assert result.speedup == pytest.approx(1.0)
    assert result.rounds.tolist() == result.committed.tolist() == scripted[2].sizes.tolist()


def test_dropped_and_previewed_tokens_cost_their_steps(scripted: Any) -> None:
    """A greedy preview is kept as far as planned; a dropped token was drafted all the same."""
    _, _, trace = scripted
    dropped = replay(trace, "gammatune+(threshold=0.6,keep=false)", CELL)
    assert (dropped.steps > dropped.drafted).any()
    preview = replay(trace, "cm-asd(high=12,two_pass=true)", CELL)
    assert (preview.steps > preview.drafted).any()


def test_a_draft_that_ends_by_itself_costs_no_step_more() -> None:
    whole = random_trace()
    lengths = np.random.default_rng(1).integers(0, 4, whole.matches.shape)
    trace = replace(whole, lengths=lengths, matches=np.minimum(whole.matches, lengths))
    for spec in ("fixed(5)", "auto"):
        done = replay(trace, spec, CELL)
        wanted = done.rounds * 1.1 + 0.02 * done.drafted + done.steps / 10
        np.testing.assert_allclose(done.seconds, wanted)


def test_a_controller_that_is_asked_pays_for_it(scripted: Any) -> None:
    _, _, trace = scripted
    dear = replace(CELL, asking=0.5)
    for spec in ("fixed(4)", "hf-heuristic", "hf-threshold", "gammatune+"):
        free, paid = replay(trace, spec, CELL), replay(trace, spec, dear)
        assert paid.steps.tolist() == free.steps.tolist()
        asked = CONTROLLERS.make(spec).stops_early
        np.testing.assert_allclose(paid.seconds, free.seconds + 0.5 * asked * free.steps)
    assert replay(trace, "auto", dear).drafted.sum() < replay(trace, "auto", CELL).drafted.sum()


def test_a_draft_that_would_go_beyond_the_trace_is_cut_and_counted(scripted: Any) -> None:
    model, tasks, deep = scripted
    shallow = recorded(model, tasks, depth=4)
    result = replay(shallow, "fixed(9)", CELL)
    assert result.capped.any()
    assert not replay(shallow, "fixed(4)", CELL).capped.any()
    assert result.drafted.tolist() == replay(deep, "fixed(4)", CELL).drafted.tolist()
    # Cut from outside, so a full round teaches nothing.
    _, seen = replayed(shallow, "fixed(9)")
    assert {why for rounds in seen for _, _, why in rounds} <= {
        Stop.EXHAUSTED,
        Stop.BUDGET,
        Stop.END_OF_TEXT,
    }


def test_requests_of_a_stream_start_from_the_one_before(scripted: Any) -> None:
    _, _, trace = scripted
    order = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    both = stream(trace, "auto", CELL, order)
    assert both.rounds.shape == order.shape
    fresh = replay(trace, "auto", CELL)
    first = fresh.take(order[:, 0])
    assert both.take((slice(None), 0)).seconds.tolist() == first.seconds.tolist()
    long, useless = np.tile(order[0], 8), trace_of(np.zeros((4, 30)))  # which was learnt
    later = stream(useless, "auto", CELL, long)
    assert later.drafted[4:].sum() < 0.6 * replay(useless, "auto", CELL).drafted[long[4:]].sum()
    for row, one in zip(order, (both.take(0), both.take(1)), strict=True):
        alone = stream(trace, "auto", CELL, row)
        assert alone.seconds.tolist() == one.seconds.tolist()
    # These carry nothing on.
    for spec in ("gammatune(length=1)", "svip", "auto(cost=4)"):
        forgetful = stream(trace, spec, CELL, order)
        assert forgetful.drafted.tolist() == replay(trace, spec, CELL).drafted[order].tolist()


@pytest.mark.parametrize("order", [[], [[[0]]], [0.5], [-1], [99]])
def test_orders_that_cannot_be_served(scripted: Any, order: Any) -> None:
    with pytest.raises(SettingError, match="order must be"):
        stream(scripted[2], "fixed", CELL, order)


def test_sampled_replay_is_distributed_as_the_live_engine() -> None:
    """Mean accepted per round of many texts; each test below raises a false alarm in 1 of 10⁵.

    The seeds are fixed, so it is one draw of many: z is standard normal if all is well.
    """
    script = chaotic(5)
    model = Model(ScriptedModel(script), ModelDrafter(ScriptedModel(noisy(script, 6, 0.7)), 7))
    model.eos = frozenset()
    tasks = [
        Task("a", str(i), [1, 2], Sampling(max_new_tokens=12, temperature=1.0, seed=i))
        for i in range(150)
    ]
    trace = recorded(model, tasks, depth=6, rule="standard")
    again = [replace(t, sampling=replace(t.sampling, seed=10_000 + i)) for i, t in enumerate(tasks)]
    for spec in (
        "fixed(4)",
        "gammatune(length=2,high=6)",
        "gammatune+(threshold=0.3,length=4,high=6)",
    ):
        result, done = replay(trace, spec, CELL), live(model, again, spec, rule="standard")
        for ours, theirs in (
            (result.rounds, [c.stats.rounds for c in done]),
            (result.drafted, [c.stats.drafted for c in done]),
            (result.accepted, [c.stats.accepted for c in done]),
        ):
            spread = np.sqrt((np.var(ours) + np.var(theirs)) / len(done))
            assert abs(np.mean(ours) - np.mean(theirs)) < 4.42 * spread


def test_only_greedy_drafts_are_thrown_away() -> None:
    """Also where greedy and sampled texts are in one trace."""
    script = chaotic(5)
    model = Model(ScriptedModel(script), ModelDrafter(ScriptedModel(noisy(script, 6, 0.7)), 7))
    model.eos = frozenset()
    dear = Costs(0.1, ((1, 1.0), (2, 2.0), (4, 2.2)), cold=0.2)
    traces = []
    for temperature in (0.0, 1.0):
        how = Sampling(max_new_tokens=40, temperature=temperature, seed=1)
        tasks = [Task("a", str(i), [1, 2 + i], how) for i in range(3)]
        traces.append(recorded(model, tasks, depth=6, rule="standard"))
    greedy, sampled = (replay(trace, "auto", dear) for trace in traces)
    assert (greedy.steps > greedy.drafted).any()
    assert (sampled.steps == sampled.drafted).all()
    both = replay(concatenate(traces), "auto", dear)
    assert both.steps.tolist() == [*greedy.steps.tolist(), *sampled.steps.tolist()]
    assert both.rounds.tolist() == [*greedy.rounds.tolist(), *sampled.rounds.tolist()]


def test_the_literal_form_of_cm_asd_is_for_certain_drafts() -> None:
    script = chaotic(5)
    model = Model(ScriptedModel(script), ModelDrafter(ScriptedModel(noisy(script, 6, 0.7)), 7))
    model.eos = frozenset()
    how = Sampling(max_new_tokens=12, temperature=1.0, seed=1)
    tasks = [Task("a", str(i), [1, 2 + i], how) for i in range(4)]
    for rule, same in (("standard", True), ("gumbel", False)):
        trace = recorded(model, tasks, depth=12, rule=rule)
        literal, other = (
            replay(trace, f"cm-asd(high=8{form})", CELL) for form in (",two_pass=true", "")
        )
        assert (literal.steps.tolist() == other.steps.tolist()) is same


def test_intervals() -> None:
    interval = geometric([1.0, 2.0, 4.0])
    assert interval["mean"] == pytest.approx(2.0)
    assert interval["low"] <= interval["mean"] <= interval["high"]
    total = rate([10, 30], [1.0, 1.0])
    assert (total["mean"], total["low"], total["high"], total["n"]) == (20.0, 10.0, 30.0, 2)
    with pytest.raises(SettingError, match="prompts must be at least one"):
        geometric([])


def test_summary_of_families(scripted: Any) -> None:
    _, _, trace = scripted
    result = replay(trace, "gammatune", CELL)
    groups = summarise(trace, result)
    assert list(groups) == ["all", "a", "b"]
    for key in ("prompts", "tokens", "rounds", "drafted", "accepted", "wasted", "seconds"):
        assert groups["all"][key] == pytest.approx(groups["a"][key] + groups["b"][key])
    a = np.array(trace.families) == "a"
    mean = float(np.exp(np.log(result.speedup[a]).mean()))
    assert groups["a"]["speedup"]["mean"] == pytest.approx(mean)
    twice = summarise(trace, result, batch=2)["all"]["tokens_per_second"]["mean"]
    assert twice == pytest.approx(2 * groups["all"]["tokens_per_second"]["mean"])


def test_a_controller_that_reads_what_no_trace_holds_is_refused() -> None:
    with pytest.raises(SettingError, match="in the trace; run it live"):
        replay(trace_of([[True]]), "cm-asd(entropy=0,margin=0,softmax=0,variance=1)", CELL)
