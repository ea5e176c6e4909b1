"""The round and the loop, on scripted models."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.controllers import CONTROLLERS, LengthPolicy
from forerun.controllers.fixed import FixedLength
from forerun.costs import Costs
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Completion, Engine, Request, Sampling, loop
from forerun.engine.meter import Lap, Meter
from forerun.engine.results import Origin
from forerun.engine.row import error_line
from forerun.errors import NumericalError, PromptError, SettingError
from forerun.governors.renewal import Renewal
from forerun.rules import RULES
from forerun.runtime import Rows
from forerun.runtime.timing import Times
from forerun.testing import ScriptedModel, engine
from forerun.types import RoundOutcome, Stop, Token
from marks import spread

SPECS = [
    "fixed(0)", "fixed(1)", "fixed(5)", "hf-heuristic", "hf-threshold",
    "hf-threshold(dynamic=True)", "gammatune", "gammatune+", "gammatune+(keep=False)",
    "bounded(gammatune+,low=1,high=3)", "svip", "adaedl(keep=False)", "exllama-ema", "sglang-ema",
    "exllama-confidence(burn_in=4)",
    "goodput", "bandit(policy=thompson)", "cm-asd", "cm-asd(two_pass=True)",
    "bounded(cm-asd(two_pass=True),high=3)", "auto", "auto(high=3)",
]  # fmt: skip
V = 7
NEXT = torch.eye(V).roll(1, dims=1) * 9.0  # after t comes t + 1 (mod V)


def chaotic(seed: int, vocab: int = V) -> Any:
    """Logits that depend on the last three tokens, without cycles to settle into."""

    @cache
    def after(place: int, *last: int) -> torch.Tensor:
        key = hash((seed, place, *last)) % (1 << 31)
        return torch.randn(vocab, generator=torch.Generator().manual_seed(key)) * 2

    def script(context: tuple[int, ...]) -> torch.Tensor:
        return after(len(context) % 5, *context[-3:])

    return script


def noisy(script: Any, seed: int, noise: float) -> Any:
    other = chaotic(seed)
    return lambda context: script(context) + noise * other(context)


@pytest.mark.parametrize(
    ("spec", "drafter", "temperature"),
    spread(8, SPECS, ["same", "near", "far", "lookup", "none"], [0.0, 0.8]),
)
def test_speculative_equals_plain(spec: str, drafter: str, temperature: float) -> None:
    """Greedy, and drawn by noise."""
    script = chaotic(1)
    makers = {
        "same": lambda: ScriptedModel(script),
        "near": lambda: ScriptedModel(noisy(script, 2, 0.5)),
        "far": lambda: ScriptedModel(chaotic(3)),
        "lookup": lambda: LookupDrafter(3, 1),
        "none": NullDrafter,
    }
    prompts = [[0], [3, 4], [5, 1, 2], [6, 6, 6, 6]]
    how: dict[str, Any] = {"max_new_tokens": 40, "rule": "gumbel"}
    if temperature:
        how |= {"temperature": temperature, "top_p": 0.9, "frequency_penalty": 0.3, "seed": 5}
    plain = engine(ScriptedModel(script))(prompts, **how)
    fast = engine(ScriptedModel(script), makers[drafter]())(prompts, controller=spec, **how)
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    if drafter == "same":
        assert all(c.stats.accepted == c.stats.drafted for c in fast)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.floats(0, 3),
    length=st.integers(0, 6),
    budget=st.integers(1, 12),
    limit=st.integers(4, 24),
    rows=st.integers(1, 4),
    max_rows=st.integers(1, 3),
    eos=st.lists(st.integers(0, V - 1), max_size=2),
    temperature=st.sampled_from([0.0, 1.0]),
    rule=st.sampled_from(["standard", "gumbel"]),
)
def test_the_loop_keeps_its_promises(
    seed: int, noise: float, length: int, budget: int, limit: int, rows: int, max_rows: int,
    eos: list[int], temperature: float, rule: str,
) -> None:  # fmt: skip
    script = chaotic(seed)
    target, draft = ScriptedModel(script, limit), ScriptedModel(noisy(script, seed + 1, noise))
    run = engine(target, draft, eos=eos, max_rows=max_rows)
    prompts = [[(seed + r) % V] * (1 + r % 3) for r in range(rows)]
    how: dict[str, Any] = {"max_new_tokens": budget, "temperature": temperature, "seed": seed}
    how["rule"] = rule
    done = run(prompts, controller=f"fixed({length})", **how)
    for prompt, completion in zip(prompts, done, strict=True):
        stats = completion.stats
        assert sum(r.committed for r in completion.rounds) == len(completion.tokens)
        assert 1 <= len(completion.tokens) <= budget
        assert len(prompt) + len(completion.tokens) <= limit
        assert not set(completion.tokens[:-1]) & set(eos)
        ends = {"eos": completion.tokens[-1] in eos, "length": len(completion.tokens) == budget}
        ends["context"] = len(prompt) + len(completion.tokens) == limit
        assert ends[completion.finish_reason]
        for r in completion.rounds:
            assert 0 <= r.accepted <= r.drafted <= length
            assert r.committed in (r.accepted + 1, r.accepted) or completion.finish_reason == "eos"
        assert stats.accepted == sum(p.origin is Origin.DRAFT for p in completion.pieces)
        assert sum(stats.stopped_by.values()) == stats.rounds
    assert target.history == draft.history == []  # everybody left
    if not temperature or rule == "gumbel":
        alone = [engine(ScriptedModel(script, limit), eos=eos)(p, **how) for p in prompts]
        assert [c.tokens for c in done] == [c.tokens for c in alone]


def test_caches_cover_exactly_the_context_but_its_last_token() -> None:
    script = chaotic(4)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 5, 1.5))
    made = Engine(target, ModelDrafter(draft, V))
    fixed, standard = CONTROLLERS.make("fixed(3)"), RULES.make("standard")
    contexts = {made.submit(p, Sampling(max_new_tokens=30), fixed, standard): list(p)
                for p in ([1], [2, 3])}  # fmt: skip
    for _ in range(8):
        for event in made.step():
            contexts[event.request] += [p.token for p in event.pieces]
        for row, context in enumerate(contexts.values()):
            assert made.target.lengths[row] == len(context) - 1
            assert target.history[row][: len(context) - 1] == context[:-1]
            covered = made.drafter.rows.lengths[row]  # type: ignore[attr-defined]
            assert draft.history[row][:covered] == context[:covered]


@pytest.mark.parametrize("spec", SPECS)
def test_a_row_does_not_depend_on_its_neighbours(spec: str) -> None:
    script = chaotic(6)
    near = noisy(script, 7, 0.7)
    run = engine(ScriptedModel(script), ScriptedModel(near), eos=[2])
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_new_tokens": 25}
    together = run([[1], [3, 3], [4, 5, 6]], controller=spec, **how)
    for prompt, completion in zip([[1], [3, 3], [4, 5, 6]], together, strict=True):
        assert run(prompt, controller=spec, **how).tokens == completion.tokens


@pytest.mark.parametrize("rule", ["standard", "gumbel"])
def test_seeds(rule: str) -> None:
    script = chaotic(8)
    run = engine(ScriptedModel(script), ScriptedModel(noisy(script, 9, 1.0)))
    how: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 40, "rule": rule}
    first, again, other = (run([1], seed=s, **how) for s in (1, 1, 2))
    assert first.tokens == again.tokens != other.tokens
    unseeded = run([1], **how)
    assert run([1], seed=unseeded.seed, **how).tokens == unseeded.tokens


@pytest.mark.parametrize("logprobs", [None, 1])
def test_noise_coins_and_greedy_rows_share_a_pass(logprobs: int | None) -> None:
    """Each writes what it writes alone, also where neighbours join and leave."""
    script = chaotic(8)
    kinds = [("gumbel", 1.0), ("standard", 1.0), ("gumbel", 0.0), ("ears", 0.7), ("gumbel", 0.6)]

    def run(rows: int, chosen: list[int]) -> dict[int, Completion]:
        draft = ModelDrafter(ScriptedModel(noisy(script, 9, 0.5)), V)
        made = Engine(ScriptedModel(script), draft, max_rows=rows)
        ids = {}
        for i in chosen:
            rule, heat = kinds[i]
            how = Sampling(max_new_tokens=10 + 5 * i, temperature=heat, top_k=6, seed=i)
            length = CONTROLLERS.make("fixed(3)")
            request = Request([i, 2], how, length, RULES.make(rule), logprobs=logprobs)
            ids[made.submit(request)] = i
        return {ids[e.request]: e.completion for e in made.run() if e.completion}

    together = run(3, list(range(len(kinds))))
    for i in range(len(kinds)):
        alone = run(1, [i])[i]
        assert together[i].tokens == alone.tokens
        assert [r.accepted for r in together[i].rounds] == [r.accepted for r in alone.rounds]


def test_a_seeds_text_drawn_by_noise_goes_by_the_clock_and_stays() -> None:
    """`auto` is told what rounds cost, and may throw drafts away, as in greedy requests."""
    script = chaotic(8)

    def run(cost: float, rows: int, rule: str) -> list[Completion]:
        made = Engine(
            ScriptedModel(script), ModelDrafter(ScriptedModel(noisy(script, 9, 0.5)), V),
            max_rows=rows, meter=Meter.given(Costs.synthetic(cost, 0.05)),
        )  # fmt: skip
        auto = CONTROLLERS.make("auto")
        for prompt in ([1], [2, 3]):
            how = Sampling(max_new_tokens=60, temperature=1.0, seed=4)
            made.submit(Request(prompt, how, auto, RULES.make(rule), stream=rows == 2))
        done = {e.request: e.completion for e in made.run() if e.completion}
        return [done[0], done[1]]

    runs = [run(cost, rows, "gumbel") for cost, rows in ((0.5, 1), (30, 1), (30, 2))]
    texts = [[c.tokens for c in done] for done in runs]
    assert texts[0] == texts[1] == texts[2]
    drafted = [sum(c.stats.drafted for c in done) for done in runs]
    assert drafted[0] < drafted[1]
    by_coins = [sum(c.stats.drafted for c in run(cost, 1, "standard")) for cost in (0.5, 30)]
    assert by_coins[0] == by_coins[1]  # a seed's coins are tossed alike whatever rounds cost


def test_a_seed_makes_a_lossy_rules_text_repeatable() -> None:
    """Whatever rounds cost, and whoever shares them."""
    script = chaotic(8)

    def texts(cost: float, rows: int, **how: Any) -> list[list[int]]:
        made = Engine(
            ScriptedModel(script), ModelDrafter(ScriptedModel(noisy(script, 9, 1.0)), V),
            max_rows=rows, meter=Meter.given(Costs.synthetic(cost, 0.05)),
        )  # fmt: skip
        auto, rule = CONTROLLERS.make("auto"), RULES.make("spec-verification(tau=2)")
        for prompt in ([1], [2, 3]):
            made.submit(prompt, Sampling(max_new_tokens=40, **how), auto, rule)
        done = {e.request: e.completion.tokens for e in made.run() if e.completion}
        return [done[0], done[1]]

    assert texts(1, 1, seed=3) == texts(30, 2, seed=3)
    assert texts(1, 1) != texts(30, 1)


@pytest.mark.parametrize(
    "spec", ["no-bonus(cm-asd(tau=2))", "easd(entropy=0.5,overlap=0)", "no-bonus(ears(beta=1))"]
)
def test_without_a_bonus_greedy_text_is_the_same_however_far_is_drafted(spec: str) -> None:
    script = chaotic(8)
    run = engine(ScriptedModel(script), ScriptedModel(noisy(script, 9, 1.0)))
    how: dict[str, Any] = {"max_new_tokens": 60}
    texts = {
        tuple(run([1], controller=c, rule=spec, **how).tokens)
        for c in ("fixed(1)", "fixed(3)", "fixed(8)", "gammatune", "hf-threshold")
    }
    assert len(texts) == 1
    # A drafter that has read its last token already (the next one was left out) reads it again.
    kept = run([1], controller="gammatune+(threshold=0.5,keep=False)", rule=spec, **how)
    assert kept.finish_reason == "length"
    assert any(r.accepted == r.drafted == r.committed > 0 for r in kept.rounds)
    done = run([1], controller="fixed(3)", rule=spec, **how)
    assert any(r.accepted == r.drafted == 3 == r.committed for r in done.rounds)
    assert (done.tokens != run([1], controller="fixed(0)", **how).tokens) == ("ears" not in spec)


def test_with_a_bonus_a_lossy_rules_text_depends_on_how_far_is_drafted() -> None:
    script = chaotic(8)
    run = engine(ScriptedModel(script), ScriptedModel(noisy(script, 9, 1.0)))
    spec = "easd(entropy=0.5,overlap=0,bonus=untested)"
    texts = [
        run([1], controller=f"fixed({n})", rule=spec, max_new_tokens=60).tokens for n in (1, 3)
    ]
    assert texts[0] != texts[1]


@dataclass(frozen=True)
class Counting(LengthPolicy):
    """Drafts as many tokens as requests came before."""

    def start(self, certain: bool = True, before: Any = None) -> tuple[int]:
        return (1 if before is None else before[0] + 1,)

    def limit(self, state: tuple[int]) -> int:
        return state[0]


class Listening(Meter):
    """Notes the laps."""

    def __init__(self) -> None:
        super().__init__()
        self.laps: list[Lap] = []

    def add(self, lap: Lap) -> None:
        if not lap.read_tokens:
            self.laps.append(lap)
        super().add(lap)


def test_a_request_starts_from_the_newest_that_left() -> None:
    script = chaotic(1)
    drafter, meter = ModelDrafter(ScriptedModel(script), V), Listening()
    made = Engine(ScriptedModel(script), drafter, max_rows=2, meter=meter)
    for tokens in (4, 2, 9, 9):  # the third joins when the second has left
        made.submit([1], Sampling(max_new_tokens=tokens), Counting(), RULES.make("exact"))
    firsts: dict[int, int] = {}
    for event in made.run():
        firsts.setdefault(event.request, event.round.drafted)
    assert firsts == {0: 1, 1: 1, 2: 2, 3: 2}
    made.submit([1], Sampling(max_new_tokens=9), Counting(), RULES.make("exact"))
    assert next(iter(made.run())).round.drafted == 3
    # A batch drafts as long as its longest row.
    assert {lap.rows for lap in meter.laps} == {1, 2}
    assert all(lap.steps == lap.width - 1 for lap in meter.laps)
    assert all((lap.draft_seconds > 0) == (lap.width > 1) for lap in meter.laps)


def test_what_tokens_of_a_drafter_without_a_model_take_is_timed() -> None:
    meter = Listening()
    made = Engine(ScriptedModel(torch.eye(3).roll(1, 1)), LookupDrafter(3, 1), meter=meter)
    how = Sampling(max_new_tokens=40)
    made.submit([0, 1, 2, 0], how, CONTROLLERS.make("fixed(5)"), RULES.make("exact"))
    list(made.run())
    drafted = [lap for lap in meter.laps if lap.width > 1]
    assert [lap.steps for lap in drafted[:3]] == [5] * 3
    assert all(lap.steps == lap.width - 1 and lap.draft_seconds > 0 for lap in drafted)


@pytest.mark.parametrize("own", [True, False])
def test_torch_leaves_the_cores_to_passes_on_other_threads(own: bool) -> None:
    class Noting(ScriptedModel):
        own_threads = own

        def run(self, *args: Any) -> torch.Tensor:
            threads.add(torch.get_num_threads())
            return super().run(*args)

    threads: set[int] = set()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = engine(Noting(chaotic(1)), LookupDrafter(3, 1))
        run([1, 2], controller="fixed(1)", max_new_tokens=4)
        assert threads == {1 if own else 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_meter_is_told_what_drafts_read() -> None:
    """Of each prompt of 20 all but the newest, and the one more that another row is behind."""
    read: list[tuple[int, int]] = []

    class Reading(Meter):
        def add(self, lap: Lap) -> None:
            if lap.reading_tokens:
                assert lap.reading_seconds > 0
                read.append((lap.rows, lap.reading_tokens))
            super().add(lap)

    drafter = ModelDrafter(ScriptedModel(chaotic(1)), V)
    made = Engine(ScriptedModel(chaotic(1)), drafter, max_rows=2, meter=Reading())
    for tokens in (12, 4, 9):  # the third joins when the second has left
        how = Sampling(max_new_tokens=tokens)
        made.submit([1] * 20, how, CONTROLLERS.make("fixed(3)"), RULES.make("exact"))
    list(made.run())
    assert read == [(2, 38), (2, 20)]


@pytest.mark.parametrize(("reading", "reads"), [(1e-3, True), (0.5, False)])
def test_a_long_prompt_is_read_along_only_where_that_may_pay(
    monkeypatch: pytest.MonkeyPatch, reading: float, reads: bool
) -> None:
    """Of two prompts of 40 tokens read in parts of 8, the last of which a step feeds, by a draft
    that takes so many plain rounds for each token."""
    monkeypatch.setattr("forerun.engine.loop.CHUNK", 8)
    costs = replace(Costs.synthetic(5, 0.02), reading=reading)
    read: list[int] = []

    class Reading(Meter):
        def costs(self, rows: int) -> Costs:
            return costs

        def booked(self, lap: Lap) -> tuple[float | None, float]:
            read.append(lap.reading_tokens)
            return None, reading * lap.reading_tokens

    draft = ScriptedModel(chaotic(1))
    made = Engine(ScriptedModel(chaotic(1)), ModelDrafter(draft, V), meter=Reading())
    for _ in range(2):
        made.submit(
            [1] * 40, Sampling(max_new_tokens=8), CONTROLLERS.make("auto"), RULES.make("exact")
        )
    list(made.run())
    assert sum(read) == (2 * 32 if reads else 0)
    assert bool(draft.passes) == reads


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_in_a_batch_whose_rows_come_and_go(temperature: float) -> None:
    script = chaotic(16)
    draft = ScriptedModel(noisy(script, 17, 0.5))
    made = Engine(ScriptedModel(script), ModelDrafter(draft, V), max_rows=5)
    auto, rule = CONTROLLERS.make("auto"), RULES.make("standard")
    lengths = [3, 40, 12, 1, 25, 60, 7, 33, 18, 50, 5, 29]
    for tokens in lengths:  # every other sampled request has a seed, hence costs that are given
        seed = tokens if tokens % 2 else None
        how = Sampling(max_new_tokens=tokens, temperature=temperature, seed=seed)
        made.submit([1, tokens % V], how, auto, rule)
    done = {e.request: e.completion for e in made.run() if e.completion}
    assert [len(done[i].tokens) for i in range(len(lengths))] == lengths
    assert max(r.drafted for c in done.values() for r in c.rounds) > 1
    alone = engine(ScriptedModel(script), draft)
    for i, tokens in enumerate(lengths):
        if temperature == 0 or tokens % 2:
            seed = tokens if tokens % 2 else None
            how = {"max_new_tokens": tokens, "temperature": temperature, "seed": seed}
            assert done[i].tokens == alone([1, tokens % V], controller="auto", **how).tokens


def test_a_seed_makes_sampled_text_repeatable_whatever_came_before() -> None:
    script = chaotic(1)
    memory: Any = {}

    def run(seed: int | None) -> list[int]:
        made = Engine(
            ScriptedModel(script), ModelDrafter(ScriptedModel(noisy(script, 2, 1.0)), V),
            memory=memory,
        )  # fmt: skip
        how = Sampling(temperature=1.0, max_new_tokens=60, seed=seed)
        made.submit([1], how, CONTROLLERS.make("auto"), RULES.make("standard"))
        return [p.token for event in made.run() for p in event.pieces]

    first = run(7)
    for _ in range(3):
        run(None)
        assert run(7) == first
    auto = CONTROLLERS.make("auto")
    assert set(memory) == {auto, ("pace", auto)}


@pytest.mark.parametrize("rule", ["standard", pytest.param("ears", marks=pytest.mark.slow)])
def test_neither_neighbours_nor_the_clock_change_a_seeds_text(rule: str) -> None:
    """Fifty seeds, each alone and in an engine that others use, under a clock that is noise."""
    script, auto = chaotic(3), CONTROLLERS.make("auto")

    def served(noise: random.Random) -> Engine:
        meter = Meter(times=Times({(1, 1): 1e-3, (1, 8): 2e-3}, taken={(1, 1), (1, 8)}))
        times = itertools.accumulate(iter(lambda: noise.expovariate(1e3), None))
        meter.clock = lambda: next(times)
        draft = ModelDrafter(ScriptedModel(noisy(script, 4, 0.7)), V)
        return Engine(ScriptedModel(script), draft, max_rows=3, meter=meter)

    def text(made: Engine, seed: int, others: int) -> list[int]:
        how = {"max_new_tokens": 24, "temperature": 1.0}
        for other in range(others):
            made.submit([other % V, seed % V], Sampling(**how), auto, RULES.make(rule))
        mine = made.submit([1], Sampling(**how, seed=seed), auto, RULES.make(rule))
        return next(
            e.completion.tokens for e in list(made.run()) if e.request == mine and e.completion
        )

    shared = served(random.Random(0))
    for seed in range(50):
        alone = text(served(random.Random(seed + 1)), seed, 0)
        assert text(shared, seed, seed % 5) == alone


def test_requests_with_their_own_controller_rule_and_sampling_share_a_batch() -> None:
    script = chaotic(10)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 11, 0.5))
    made = Engine(target, ModelDrafter(draft, V))
    asked = [
        ("fixed(4)", "exact", Sampling(max_new_tokens=20)),
        ("gammatune+", "standard", Sampling(max_new_tokens=12, temperature=1.0, seed=3)),
        ("fixed(0)", "standard", Sampling(max_new_tokens=20)),
        ("hf-threshold(dynamic=True)", "standard", Sampling(max_new_tokens=5, seed=1)),
    ]
    ids = [made.submit([1, 2], how, CONTROLLERS.make(c), RULES.make(r)) for c, r, how in asked]
    done = {e.request: e.completion for e in made.run() if e.completion}
    for i, (controller, rule, how) in zip(ids, asked, strict=True):
        alone = Engine(ScriptedModel(script), ModelDrafter(draft, V))
        alone.submit([1, 2], how, CONTROLLERS.make(controller), RULES.make(rule))
        (only,) = [e.completion for e in alone.run() if e.completion]
        assert done[i].tokens == only.tokens
        assert [r.drafted for r in done[i].rounds] == [r.drafted for r in only.rounds]


def test_requests_join_and_leave_between_rounds() -> None:
    script = chaotic(12)
    target = ScriptedModel(script)
    made = Engine(target, ModelDrafter(ScriptedModel(noisy(script, 13, 1.0)), V), max_rows=2)
    fixed, exact = CONTROLLERS.make("fixed(2)"), RULES.make("exact")
    first = made.submit([1], Sampling(max_new_tokens=6), fixed, exact)
    made.step()
    second = made.submit([2, 2], Sampling(max_new_tokens=9), fixed, exact)
    third = made.submit([3, 3], Sampling(max_new_tokens=4), fixed, exact)
    made.step()
    assert len(target.history) == 2
    gone = made.cancel(second)
    assert gone is not None
    assert gone.finish_reason == "cancelled"
    assert made.cancel(99) is None
    done = {e.request: e.completion for e in made.run() if e.completion}
    assert set(done) == {first, third}
    alone = engine(ScriptedModel(script))
    assert done[first].tokens[:6] == alone([1], max_new_tokens=6).tokens
    assert done[third].tokens == alone([3, 3], max_new_tokens=4).tokens
    assert gone.tokens == alone([2, 2], max_new_tokens=9).tokens[: len(gone.tokens)]


def work(call: Callable[[], object]) -> int:
    """Byte codes of the loop's own file that a call runs."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != loop.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("scored", [False, True])
def test_nobody_looks_at_all_who_wait(scored: bool) -> None:
    """What a round takes does not grow with the queue, and what it takes that all of it leave grows
    no faster than it, whoever leaves first."""

    def taken(count: int) -> tuple[int, int]:
        made = Engine(ScriptedModel(NEXT), NullDrafter(), max_rows=2)
        plain, exact = CONTROLLERS.make("fixed(0)"), RULES.make("exact")
        request = Request([1, 2, 3], Sampling(max_new_tokens=50), plain, exact)
        running = [made.submit(request) for _ in range(2)]
        if scored:  # one has a row beside those that write
            made.submit(Request.to_score([1] * 200, 0))
            request = Request.to_score([1, 2, 3], 0)
        waiting = [made.submit(request) for _ in range(count)]
        made.step()
        assert made.running.keys() >= set(running)
        a_round = work(made.step)
        leaving = work(lambda: [made.cancel(one) for one in reversed(waiting)])
        assert sum(event.completion is not None for event in made.run()) == 2 + scored
        return a_round, leaving

    (short_round, few), (long_round, many) = taken(40), taken(400)
    assert 0 < long_round <= 1.1 * short_round
    assert 0 < many <= 11 * few


def test_a_consumer_may_walk_away() -> None:
    target = ScriptedModel(chaotic(14))
    made = Engine(target, NullDrafter())
    fixed, exact = CONTROLLERS.make("fixed"), RULES.make("exact")
    made.submit([1], Sampling(max_new_tokens=50), fixed, exact)
    for _ in made.run():
        break
    assert target.history == []
    made.submit([1], Sampling(max_new_tokens=5), fixed, exact)
    assert sum(len(e.pieces) for e in made.run()) == 5


def test_origins_and_reasons() -> None:
    wrong = NEXT.clone()
    wrong[3] = NEXT[4]  # the draft errs after token 3
    run = engine(ScriptedModel(NEXT), ScriptedModel(wrong), eos=[6])
    completion = run([0], controller="fixed(2)", max_new_tokens=20)
    assert completion.tokens == [1, 2, 3, 4, 5, 6]
    got = [(r.drafted, r.accepted, r.committed, r.stopped_by) for r in completion.rounds]
    # 1 2 +3 | ✗5 6(end) → 4 | 5 6(end): after an end of text nothing is committed
    assert got == [(2, 2, 3, Stop.LIMIT), (2, 0, 1, Stop.END_OF_TEXT), (2, 2, 2, Stop.END_OF_TEXT)]
    assert [p.origin.value for p in completion.pieces] == [
        "draft", "draft", "bonus", "correction", "draft", "draft",
    ]  # fmt: skip
    assert completion.finish_reason == "eos"
    assert completion.stats.acceptance_rate == pytest.approx(4 / 5)


def test_budget_clips_the_draft_and_is_told_apart() -> None:
    run = engine(ScriptedModel(NEXT), ScriptedModel(NEXT))
    rounds = run([0], controller="fixed(4)", max_new_tokens=8).rounds
    assert [(r.drafted, r.stopped_by) for r in rounds] == [(4, Stop.LIMIT), (2, Stop.BUDGET)]


def test_ignore_eos_and_minimum_length() -> None:
    run = engine(ScriptedModel(NEXT), ScriptedModel(NEXT), eos=[2])
    assert run([0], max_new_tokens=9).tokens == [1, 2]
    assert len(run([0], max_new_tokens=9, ignore_eos=True).tokens) == 9
    longer = run([0], max_new_tokens=9, min_new_tokens=5)
    assert 2 not in longer.tokens[:5]
    assert run([0], max_new_tokens=9, eos=(4,)).tokens == [1, 2, 3, 4]


def test_a_full_context_ends_the_text() -> None:
    run = engine(ScriptedModel(NEXT, limit=6), ScriptedModel(NEXT))
    completion = run([0, 1], max_new_tokens=50)
    assert completion.finish_reason == "context"
    assert completion.tokens == [2, 3, 4, 5]


def test_a_draft_with_a_shorter_context_leaves_the_rest_to_plain_decoding() -> None:
    run = engine(ScriptedModel(NEXT), ScriptedModel(NEXT, limit=5))
    completion = run([0, 1], max_new_tokens=12, controller="fixed(2)")
    assert completion.tokens == [(2 + i) % V for i in range(12)]
    assert completion.rounds[-1].drafted == 0
    assert run([0] * 8, max_new_tokens=3).stats.drafted == 0  # the prompt alone is too long for it


@pytest.mark.parametrize("size", [V - 2, V + 3])
def test_a_draft_of_another_vocabulary_size_works_on_the_shared_ids(size: int) -> None:
    table = torch.full((max(size, V), size), -9.0)
    for token in range(max(size, V)):
        table[token, (token + 1) % size] = 9.0
    run = engine(ScriptedModel(NEXT), ScriptedModel(table))
    completion = run([0], max_new_tokens=20, controller="fixed(3)")
    assert completion.tokens == [(1 + i) % V for i in range(20)]
    assert completion.stats.accepted > 0
    sampled = run([0], max_new_tokens=20, temperature=1.0, seed=0, controller="fixed(3)")
    assert max(sampled.tokens) < V


def test_prompts_that_cannot_work() -> None:
    run = engine(ScriptedModel(NEXT, limit=4))
    made = Engine(ScriptedModel(NEXT, limit=4), NullDrafter())
    fixed, exact = CONTROLLERS.make("fixed"), RULES.make("exact")
    with pytest.raises(PromptError, match="the prompt is empty"):
        made.submit([], Sampling(), fixed, exact)
    with pytest.raises(PromptError, match="has 4 tokens and the context holds 4"):
        run([0, 1, 2, 3])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        run([V])
    for bad in ({"logit_bias": {V: 1.0}}, {"logit_bias": {-1: 1.0}}, {"eos": (V,)}):
        with pytest.raises(SettingError, match=f"outside the vocabulary of {V}"):
            run([0], **bad)
    with pytest.raises(SettingError, match="need a tokenizer"):
        run([0], stop=("x",))
    with pytest.raises(SettingError, match="batch size must be"):
        Engine(ScriptedModel(NEXT), NullDrafter(), max_rows=0)


def test_exact_refuses_sampling() -> None:
    with pytest.raises(SettingError, match="temperature 0"):
        engine(ScriptedModel(NEXT))([0], rule="exact", temperature=1.0)


@pytest.mark.parametrize(
    ("controller", "rule", "how"),
    [
        pytest.param("fixed(2)", "standard", {}, marks=pytest.mark.slow),
        pytest.param("fixed(2)", "standard", {"top_k": 2}, marks=pytest.mark.slow),
        ("fixed(2)", "standard", {"top_p": 0.7}),
        pytest.param("fixed(2)", "standard", {"frequency_penalty": 0.8}, marks=pytest.mark.slow),
        ("cm-asd(two_pass=True,high=2,alpha=1)", "standard", {}),
        ("fixed(2)", "block", {}),
        pytest.param("fixed(2)", "gumbel", {}, marks=pytest.mark.slow),
        ("auto", "gumbel", {}),
        pytest.param("fixed(2)", "gumbel", {"top_p": 0.7}, marks=pytest.mark.slow),
        pytest.param(
            "cm-asd(two_pass=True,high=2,alpha=1)",
            "gumbel",
            {"frequency_penalty": 0.8},
            marks=pytest.mark.slow,
        ),
        ("fixed(2)", "easd(entropy=inf,correction=residual)", {"top_k": 2}),
    ],
)
def test_sampled_output_has_the_targets_distribution(
    controller: str, rule: str, how: dict[str, Any]
) -> None:
    """Three tokens, 1 500 draws, every pair of settings against the exact joint distribution.

    Under the hypothesis the total-variation distance D of an empirical distribution over n = 27
    outcomes from N draws satisfies P(D > E[D] + t) ≤ exp(−2 N t²) with E[D] ≤ ½ √(n / N)
    (McDiarmid). With t = 0.08 the false-alarm probability is below 5e-9 per case.
    """
    vocab, draws = 3, 1500
    script = chaotic(20, vocab)
    draft = lambda context: script(context) + 1.5 * chaotic(21, vocab)(context)  # noqa: E731
    run = engine(ScriptedModel(script), ScriptedModel(draft), max_rows=250)
    done = run(
        [[0]] * draws, controller=controller, rule=rule, temperature=1.2, max_new_tokens=3, **how
    )
    counts = np.zeros((vocab,) * 3)
    for completion in done:
        counts[tuple(completion.tokens)] += 1

    from forerun.engine.sampling import Sampler

    sampler = Sampler([Sampling(temperature=1.2, **how)], [frozenset()])
    exact = np.zeros((vocab,) * 3)
    for a in range(vocab):
        for b in range(vocab):
            for c in range(vocab):
                context, prob = [0], 1.0
                for token in (a, b, c):
                    logits = script(tuple(context)).view(1, 1, -1)
                    text: Any = SimpleNamespace(context=context, prompt=1)
                    out = sampler.process(logits, [text], [[]])[0, 0]
                    prob *= float(out.softmax(-1)[token])
                    context = [*context, token]
                exact[a, b, c] = prob
    assert exact.sum() == pytest.approx(1)
    distance = 0.5 * np.abs(counts / draws - exact).sum()
    assert distance < 0.5 * np.sqrt(27 / draws) + 0.08
    assert 0 < sum(c.stats.accepted for c in done) < sum(c.stats.drafted for c in done)


def test_lookup_proposes_the_longest_latest_match() -> None:
    drafter = LookupDrafter(3, 1)
    drafter.join([[1]], 0)
    context = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]

    def proposed(text: list[int] | None) -> list[int]:
        return drafter.propose([text], [2], cast(Any, None)).tokens[0]

    assert proposed(context) == [4, 9]  # "1 2 3" beats the later "2 3"
    assert proposed([*context, 5, 2, 3]) == [5, 2]  # the latest of equals
    assert proposed([*context, 5, 2, 3, 7]) == []
    assert proposed(None) == []


def test_lookup_runs_on_through_periodic_text() -> None:
    cycle = [0, 1, 2]
    table = torch.zeros(3, 3)
    for token in cycle:
        table[token, (token + 1) % 3] = 9.0
    run = engine(ScriptedModel(table), LookupDrafter(2, 1))
    completion = run([0, 1, 2, 0], controller="fixed(8)", max_new_tokens=18)
    assert completion.stats.rounds == 2
    assert completion.stats.accepted == 16


def test_a_governor_is_asked_only_where_lookup_finds_something(monkeypatch) -> None:
    """Beginning a round takes it longer than lookup takes to find nothing."""
    begun, begin = [], Renewal.open

    def opened(self: Renewal, *about: Any) -> Any:
        begun.append(about)
        return begin(self, *about)

    monkeypatch.setattr(Renewal, "open", opened)
    run = engine(ScriptedModel(9 * torch.eye(12).roll(1, 1)), LookupDrafter(2, 2))
    completion = run([0], controller="auto(cost=10)", max_new_tokens=40)
    assert completion.tokens == [(1 + i) % 12 for i in range(40)]
    drafted = [round.drafted for round in completion.rounds]
    assert not any(drafted[:13])
    assert any(drafted[13:])
    assert len(begun) == len(drafted) - 13


def test_signals_know_the_penalties() -> None:
    """What is told is of the distribution that tokens come from, or it misleads."""
    table = torch.zeros(4, 4)
    table[:, 2] = 3.0
    seen: list[Token] = []

    class Hearing(FixedLength):
        def signals(self, certain: bool) -> frozenset[str]:
            return frozenset({"top1", "chosen", "id", "previous"})

        def observe(self, state: Any, round: RoundOutcome) -> Any:
            seen.extend(round.tokens)
            return super().observe(state, round)

    run = engine(target=ScriptedModel(table), draft=ScriptedModel(table))
    run([0], max_new_tokens=3, controller=Hearing(2), logit_bias={2: -100.0})
    assert [token.previous for token in seen] == [-1, seen[0].id]
    np.testing.assert_allclose(seen[0].chosen, 1 / 3, rtol=1e-4)  # three equal tokens are left
    np.testing.assert_allclose(seen[0].top1, 1 / 3, rtol=1e-4)


# --- what is no number --------------------------------------------------------------------------

LITTER = {
    "all NaN": lambda logits: logits.fill_(torch.nan),
    "one NaN": lambda logits: logits.index_fill_(0, torch.tensor([3]), torch.nan),
    "+inf": lambda logits: logits.index_fill_(0, torch.tensor([3]), torch.inf),
    "-inf": lambda logits: logits.fill_(-torch.inf),
}


def spoilt(script: Any, damage: str, when: Any) -> Any:
    """The script, with no numbers in the contexts for which `when` holds; "" is each in turn."""

    def broken(context: tuple[int, ...]) -> torch.Tensor:
        logits = script(context).clone()
        kind = damage or list(LITTER)[len(context) // 4 % len(LITTER)]
        return LITTER[kind](logits) if when(context) else logits

    return broken


@pytest.mark.parametrize("spec", spread(3, SPECS))
def test_a_draft_without_numbers_changes_nothing_and_says_nothing(spec: str) -> None:
    """Not even a warning of numpy's (the test run makes errors of them)."""
    script = chaotic(1)
    draft = ScriptedModel(spoilt(noisy(script, 2, 0.3), "", lambda c: len(c) % 4 == 2))
    prompts = [[0], [3, 4], [5, 1, 2]]
    plain = engine(ScriptedModel(script))(prompts, max_new_tokens=20)
    for more in ({}, {"repetition_penalty": 1.0001}):
        done = engine(ScriptedModel(script), draft)(
            prompts, controller=spec, max_new_tokens=20, **more
        )
        assert [c.tokens for c in done] == [c.tokens for c in plain]
    how: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_new_tokens": 20}
    for rule in ("standard", "block", "cm-asd", "easd"):
        done = engine(ScriptedModel(script), draft)(prompts, controller=spec, rule=rule, **how)
        assert all(c.finish_reason == "length" for c in done)
        for prompt, completion in zip(prompts, done, strict=True):
            at = len(prompt)
            for r in completion.rounds:
                # A text of n tokens with n % 4 == 2 is what the draft cannot continue.
                assert not any((at + i) % 4 == 2 for i in range(r.drafted))
                at += r.committed


@pytest.mark.parametrize(
    ("rule", "damage", "temperature"),
    spread(
        2, ["exact", "standard", "gumbel", "block", "ears", "fly", "cm-asd"], list(LITTER), [0, 0.9]
    ),
)
def test_a_target_without_numbers_ends_that_request_alone(
    rule: str, damage: str, temperature: float
) -> None:
    if temperature and rule == "exact":
        pytest.skip("greedy requests only")
    script = chaotic(1)
    target = spoilt(script, damage, lambda c: c[0] == 3 and len(c) > 8)
    prompts = [[0], [3, 4], [5, 1, 2], [3]]
    how: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_new_tokens": 20}
    runs = []
    for model, drafter in ((target, chaotic(7)), (target, target), (target, None), (script, None)):
        draft = None if drafter is None else ScriptedModel(drafter)
        if drafter is None and rule in ("cm-asd",):
            draft = ScriptedModel(script)
        made = ScriptedModel(model)
        runs.append(engine(made, draft)(prompts, controller="fixed(3)", rule=rule, **how))
        assert made.history == []
    *broken, sound = runs
    for run in broken:
        assert [c.finish_reason for c in run] == ["length", "error", "length", "error"]
        assert [len(c.tokens) for c in run] == [20, 7, 20, 8]  # up to where numbers end
        assert "after 7 new tokens the target's logits are no numbers" in run[1].error
        assert run[0].error is None
        assert run[1].to_json()["error"] == run[1].error
    if rule == "gumbel" or (not temperature and rule in ("exact", "standard", "block", "ears")):
        for run in broken:
            assert [c.tokens for c in run] == [
                c.tokens[: len(b.tokens)] for c, b in zip(sound, run, strict=True)
            ]


def test_a_request_that_excludes_every_token_ends_alone() -> None:
    run = Engine(ScriptedModel(NEXT), ModelDrafter(ScriptedModel(NEXT), V))
    fixed, rule = CONTROLLERS.make("fixed(2)"), RULES.make("standard")
    for temperature in (0.0, 1.0):
        nothing = Sampling(
            logit_bias=dict.fromkeys(range(V), -float("inf")), temperature=temperature
        )
        ids = [run.submit([0], how, fixed, rule) for how in (nothing, Sampling(max_new_tokens=5))]
        done = {e.request: e.completion for e in run.run() if e.completion}
        assert done[ids[0]].finish_reason == "error"
        assert "leave no token to choose" in done[ids[0]].error
        assert done[ids[0]].error_type is SettingError
        assert done[ids[1]].tokens == [1, 2, 3, 4, 5]


def test_a_rule_for_greedy_requests_refuses_others_when_they_are_submitted() -> None:
    made = Engine(ScriptedModel(NEXT), NullDrafter())
    fixed, exact = CONTROLLERS.make("fixed"), RULES.make("exact")
    made.submit([0], Sampling(max_new_tokens=3), fixed, exact)
    with pytest.raises(SettingError, match=r"needs temperature 0, got 0\.5"):
        made.submit([0], Sampling(temperature=0.5), fixed, exact)
    assert sum(len(e.pieces) for e in made.run()) == 3


def test_checking_refuses_what_submitting_refuses_and_queues_nothing() -> None:
    made = Engine(ScriptedModel(torch.eye(5)), NullDrafter())
    length, rule = CONTROLLERS.make("fixed(0)"), RULES.make("standard")
    made.check(Request([1], Sampling(), length, rule))
    wrong: list[tuple[list[int], list[int]]] = [([], []), ([7], []), ([1], [9])]
    for prompt, prediction in wrong:
        request = Request(prompt, Sampling(), length, rule, prediction=prediction)
        for refuse in (made.check, made.submit):
            with pytest.raises(PromptError):
                refuse(request)
    with pytest.raises(SettingError, match="lossless"):
        made.check(Request([1], Sampling(), length, RULES.make("typical"), prediction=[1]))
    assert list(made.run()) == []


def test_events_carry_the_logprobs_of_their_pieces() -> None:
    made = Engine(ScriptedModel(torch.eye(5).roll(1, dims=1) * 2), NullDrafter())
    length, rule = CONTROLLERS.make("fixed(0)"), RULES.make("standard")
    for top in (None, 2):
        made.submit(Request([0], Sampling(max_new_tokens=3), length, rule, logprobs=top))
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    done: dict[int, Any] = {}
    for event in made.run():
        streamed[event.request] += event.logprobs
        done[event.request] = event.completion or done.get(event.request)
    assert streamed[0] == []
    assert streamed[1] == done[1].logprobs
    assert len(streamed[1]) == 3
    assert done[0].logprobs is None


def test_an_error_has_its_class() -> None:
    def broken(context: tuple[int, ...]) -> torch.Tensor:
        if len(context) > 1:
            raise ValueError("no")
        return torch.zeros(3)

    done = engine(ScriptedModel(broken))([0], max_new_tokens=3)
    assert (done.error, done.error_type) == ("ValueError: no", ValueError)
    nan = engine(ScriptedModel(torch.full((3, 3), torch.nan)))([0], max_new_tokens=3)
    assert nan.error_type is NumericalError


def test_a_round_enters_inference_mode_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering it takes as long as the engine does with a drafted token."""
    entered, enter = [], torch.inference_mode.__enter__
    monkeypatch.setattr(
        torch.inference_mode, "__enter__", lambda mode: entered.append(1) or enter(mode)
    )
    table = torch.eye(7).roll(1, dims=1) * 9
    run = engine(ScriptedModel(table), ScriptedModel(table))
    done = run([0], max_new_tokens=20, controller="fixed(4)", ignore_eos=True)
    assert len(entered) == len(done.rounds) == 4
    rows = Rows(ScriptedModel(table))
    rows.join(1)
    assert not torch.is_inference_mode_enabled()
    assert rows.feed([[1, 2]]).is_inference()


def test_the_reason_of_an_error_of_several_lines_is_in_its_line() -> None:
    error = RuntimeError("Exception from a.cpp:246:\n\nCheck failed:\nout of memory\n")
    assert error_line(error) == "RuntimeError: Exception from a.cpp:246: out of memory"
    assert error_line(ValueError("one line")) == "ValueError: one line"
    assert error_line(KeyError()) == "KeyError: KeyError"


@pytest.mark.parametrize(("spec", "reads"), [("auto", True), ("auto(reserve=0)", False)])
def test_a_draft_reads_along_only_where_somebody_may_draft(spec: str, reads: bool) -> None:
    """A prompt of several chunks, beside which nothing is drafted while the target reads it."""
    target, draft = (ScriptedModel(chaotic(3)) for _ in range(2))
    rows, steps = Rows(target), Rows(draft)
    engine = Engine(rows, ModelDrafter(steps, V))
    engine.submit(
        [1] * 1200, Sampling(max_new_tokens=4), CONTROLLERS.make(spec), RULES.make("exact")
    )
    engine.step()
    assert (rows.passes, steps.passes) == (1, int(reads))
