"""Constraints: the same mask on target and draft, and forced tokens for nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from forerun.controllers import CONTROLLERS, LengthPolicy
from forerun.controllers.fixed import FixedLength
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Engine, Request, Sampling
from forerun.engine.results import Origin
from forerun.errors import SettingError
from forerun.rules import RULES
from forerun.testing import ScriptedModel, engine
from forerun.types import RoundOutcome
from marks import slow_but, spread

V, EOS = 6, 5
Moves = dict[int, dict[int, int]]
LANGUAGE: Moves = {
    0: {0: 1, 1: 4, 2: 0},
    1: {3: 2}, 2: {4: 3}, 3: {0: 4},  # after 0 come 3 4 0
    4: {1: 5, 4: 0, EOS: 9},
    5: {2: 0, 3: 5},
}  # fmt: skip
"""Per state what may come next and where it leads; the text ends where EOS may come."""


@dataclass
class Walk:
    """A place in an automaton."""

    moves: Moves
    forces: bool
    states: list[int] = field(default_factory=lambda: [0])
    asked: int = 0

    def allowed(self) -> NDArray[np.bool_]:
        self.asked += 1
        mask = np.zeros(V, dtype=np.bool_)
        mask[[token for token in self.moves[self.states[-1]] if token != EOS]] = True
        return mask

    def complete(self) -> bool:
        return EOS in self.moves[self.states[-1]]

    def advance(self, token: int) -> bool:
        after = self.moves[self.states[-1]].get(token)
        if after is None or token == EOS:
            return False
        self.states.append(after)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self.states)
        del self.states[-count:]

    def forced(self) -> list[int]:
        out: list[int] = []
        state = self.states[-1]
        while self.forces and len(moves := self.moves[state]) == 1:
            ((token, state),) = moves.items()
            out.append(token)
        return out


@dataclass(frozen=True)
class Automaton:
    forces: bool = True
    moves: Any = field(default_factory=lambda: LANGUAGE)

    def begin(self) -> Walk:
        return Walk(self.moves, self.forces)


@cache
def chaotic(seed: int) -> Any:
    @cache
    def script(context: tuple[int, ...]) -> torch.Tensor:
        key = hash((seed, len(context) % 5, *context[-3:])) % (1 << 31)
        return torch.randn(V, generator=torch.Generator().manual_seed(key)) * 2

    return script


@cache
def near(context: tuple[int, ...]) -> torch.Tensor:
    return chaotic(1)(context) + 0.5 * chaotic(2)(context)


def allowed(tokens: list[int]) -> bool:
    walk = Automaton().begin()
    return all(walk.advance(t) or (t == EOS and walk.complete()) for t in tokens)


DRAFTERS = {
    "model": lambda: ModelDrafter(ScriptedModel(near), V),
    "lookup": lambda: LookupDrafter(2, 1),
    "none": NullDrafter,
}


@pytest.mark.parametrize(
    ("drafter", "forces", "spec", "sampling"),
    spread(
        2,
        list(DRAFTERS),
        [True, False],
        ["fixed(4)", "gammatune", "svip", "cm-asd(two_pass=True)", "auto", "sglang-ema"],
        [{}, {"temperature": 0.9, "seed": 2, "rule": "gumbel"}],
    ),
)
def test_equals_masked_plain_decoding(
    drafter: str, forces: bool, spec: str, sampling: dict[str, Any]
) -> None:
    prompts = [[0], [3, 4, 3, 4], [1, 2], [2]]
    how: dict[str, Any] = {"max_new_tokens": 24, "constraint": Automaton(forces), **sampling}
    plain = engine(ScriptedModel(chaotic(1)), eos=[EOS])(prompts, controller="fixed(0)", **how)
    target = ScriptedModel(chaotic(1))
    done = engine(target, DRAFTERS[drafter](), eos=[EOS])(prompts, controller=spec, **how)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert all(allowed(c.tokens) for c in done)
    assert any(c.finish_reason == "eos" for c in done)
    forced = sum(p.origin is Origin.GRAMMAR for c in done for p in c.pieces)
    assert (forced > 0) is forces
    assert not any(p.origin is Origin.GRAMMAR for c in plain for p in c.pieces)


@pytest.mark.parametrize(
    ("rule", "more"),
    slow_but(
        [("standard", {}), ("block", {}), ("gumbel", {}), ("standard", {"top_k": 2}),
         ("standard", {"frequency_penalty": 0.8})],
        lambda rule, more: rule == "gumbel" or "frequency_penalty" in more,
    ),
)  # fmt: skip
def test_sampled_text_has_the_masked_distribution(rule: str, more: dict[str, Any]) -> None:
    """As in `test_engine`: false alarms below 3e-7 per case."""
    draws, how = 1200, {"temperature": 1.3, "max_new_tokens": 5, **more}
    run = engine(ScriptedModel(chaotic(1)), ScriptedModel(near), eos=[EOS], max_rows=250)
    done = run([[0]] * draws, controller="fixed(1)", rule=rule, constraint=Automaton(), **how)
    counts = Counter(tuple(c.tokens) for c in done)
    exact = _exact(how)
    assert counts.keys() <= exact.keys()
    distance = 0.5 * sum(abs(counts[o] / draws - p) for o, p in exact.items())
    assert distance < 0.5 * np.sqrt(len(exact) / draws) + 0.08
    assert any(p.origin is Origin.GRAMMAR for c in done for p in c.pieces)


def _exact(how: dict[str, Any]) -> dict[tuple[int, ...], float]:
    from forerun.engine.sampling import Sampler

    sampler = Sampler([Sampling(**how)], [frozenset()])
    out: dict[tuple[int, ...], float] = {}

    def walk(tokens: tuple[int, ...], state: int, prob: float) -> None:
        if len(tokens) == how["max_new_tokens"] or tokens[-1:] == (EOS,):
            out[tokens] = prob
            return
        logits = torch.full((1, 1, V), -torch.inf)
        raw = chaotic(1)((0, *tokens))
        for token in LANGUAGE[state]:
            logits[0, 0, token] = raw[token]
        text: Any = SimpleNamespace(context=[0, *tokens], prompt=1)
        probs = sampler.process(logits, [text], [[]])[0, 0].softmax(-1).tolist()
        for token, after in LANGUAGE[state].items():
            if probs[token]:
                walk((*tokens, token), after, prob * probs[token])

    walk((), 0, 1.0)
    assert sum(out.values()) == pytest.approx(1)
    return out


@dataclass(frozen=True)
class Noting(FixedLength):
    """Keeps what it is told."""

    seen: list[RoundOutcome] = field(default_factory=list, hash=False, compare=False)

    def observe(self, state: Any, round: RoundOutcome) -> Any:
        self.seen.append(round)
        return state


def test_controllers_do_not_learn_from_forced_tokens() -> None:
    noting: LengthPolicy = Noting(2)
    moves = {i: {(3 * i + 1) % EOS: i + 1} for i in range(40)} | {40: {}}
    draft = ScriptedModel(near)
    made = Engine(ScriptedModel(chaotic(1)), ModelDrafter(draft, V), eos=frozenset([EOS]))
    sampling = Sampling(max_new_tokens=20, constraint=Automaton(True, moves))
    made.submit(Request([0], sampling, noting, RULES.make("standard"), stream=True))
    (done,) = [e.completion for e in made.run() if e.completion]
    assert len(done.tokens) == 20
    origins = [p.origin for p in done.pieces]
    assert origins[0] is Origin.PLAIN
    assert origins.count(Origin.GRAMMAR) == 18  # all that fit before the target's own
    assert draft.passes == []  # no room was left for a draft
    assert [r.drafted for r in noting.seen] == [0, 0]  # type: ignore[attr-defined]
    assert done.rounds[1].counters["forced"] == done.rounds[1].accepted == 18


def test_the_drafter_goes_on_behind_forced_tokens() -> None:
    target, draft = ScriptedModel(chaotic(1)), ScriptedModel(chaotic(1))
    noting: LengthPolicy = Noting(2)
    made = Engine(target, ModelDrafter(draft, V), eos=frozenset([EOS]))
    sampling = Sampling(max_new_tokens=30, constraint=Automaton(), temperature=1.0, seed=3)
    made.submit(Request([0], sampling, noting, RULES.make("standard")))
    (done,) = [e.completion for e in made.run() if e.completion]
    both = [r for r in done.rounds if 0 < r.counters.get("forced", 0) < r.drafted]
    assert both
    seen = noting.seen  # type: ignore[attr-defined]
    assert sum(r.drafted for r in seen) + sum(
        r.counters.get("forced", 0) for r in done.rounds
    ) == sum(r.drafted for r in done.rounds)
    assert all(len(r.accept_prob) == r.drafted for r in seen)


def test_a_mask_is_computed_once_for_draft_and_target() -> None:
    walks: list[Walk] = []

    class Once(Automaton):
        def begin(self) -> Walk:
            walks.append(super().begin())
            return walks[-1]

    run = engine(ScriptedModel(chaotic(1)), ScriptedModel(chaotic(1)), eos=[EOS])
    done = run([4], controller="fixed(4)", constraint=Once(False), max_new_tokens=24)
    assert len(done.tokens) > 5
    assert walks[0].asked <= len(done.tokens) + 1  # the same model drafts: nothing is rejected


def test_masks_are_computed_while_the_target_runs() -> None:
    begun, ended = threading.Event(), threading.Event()

    class Beside(Walk):
        def allowed(self) -> NDArray[np.bool_]:
            assert begun.wait(10)
            mask = super().allowed()
            ended.set()
            return mask

    class Waiting(ScriptedModel):
        """Its passes end when a mask was computed since they began."""

        def run(self, *args: Any, **kwargs: Any) -> Any:
            begun.set()
            assert ended.wait(10)
            out = super().run(*args, **kwargs)
            begun.clear()
            ended.clear()
            return out

    class Language(Automaton):
        def begin(self) -> Walk:
            return Beside(self.moves, forces=False)

    how: dict[str, Any] = {"controller": "fixed(0)", "max_new_tokens": 12}
    plain = engine(ScriptedModel(chaotic(1)), eos=[EOS])([4], constraint=Automaton(), **how)
    done = engine(Waiting(chaotic(1)), eos=[EOS])([4], constraint=Language(), **how)
    assert done.tokens == plain.tokens


class Broken(Automaton):
    """A constraint that fails on the way."""

    def begin(self) -> Walk:
        walk = super().begin()
        walk.rollback = walk.advance = None  # type: ignore[assignment]
        return walk


def test_a_constraint_that_breaks_ends_its_request_alone() -> None:
    made = Engine(
        ScriptedModel(chaotic(1)), ModelDrafter(ScriptedModel(near), V), eos=frozenset([EOS])
    )
    ids = [
        made.submit([0], Sampling(max_new_tokens=9, constraint=c), CONTROLLERS.make("fixed(3)"),
                    RULES.make("standard"))
        for c in (Broken(), None, Automaton())
    ]  # fmt: skip
    done = {e.request: e.completion for e in made.run() if e.completion}
    assert done[ids[0]].finish_reason == "error"
    assert "TypeError" in (done[ids[0]].error or "")
    for i, constraint in ((1, None), (2, Automaton())):
        alone = engine(ScriptedModel(chaotic(1)), eos=[EOS])(
            [0], controller="fixed(0)", max_new_tokens=9, constraint=constraint
        )
        assert done[ids[i]].tokens == alone.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prediction_is_followed_as_far_as_it_is_allowed(temperature: float) -> None:
    how: dict[str, Any] = {"constraint": Automaton(False), "max_new_tokens": 12}
    how |= {"temperature": temperature, "seed": 2}
    run = engine(ScriptedModel(chaotic(1)), eos=[EOS])
    plain = run([4], controller="fixed(0)", rule="gumbel", **how)
    wrong = [*plain.tokens[:6], 3, 3, 3, 3]
    made = Engine(ScriptedModel(chaotic(1)), NullDrafter(), eos=frozenset([EOS]))
    length, rule = CONTROLLERS.make("fixed(3)"), RULES.make("gumbel")
    request = Request([4], Sampling(**how), length, rule, prediction=wrong)
    made.submit(request)
    (done,) = [e.completion for e in made.run() if e.completion]
    assert done.tokens == plain.tokens
    assert done.stats.accepted >= 3


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(SettingError, match="constraint must be"):
        Sampling(constraint="json")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="ignore_eos"):
        Sampling(constraint=Automaton(), ignore_eos=True)


def test_a_dead_end_is_said_to_be_one() -> None:
    run = engine(ScriptedModel(chaotic(1)), eos=[EOS])
    done = run([[0]], constraint=Automaton(True, {0: {1: 1}, 1: {}}), max_new_tokens=5)[0]
    assert done.finish_reason == "error"
    assert "the constraint leave" in done.error


@dataclass
class Slow(Walk):
    """A grammar whose masks take long from the tenth on, or that one alone."""

    once: bool = False

    def allowed(self) -> NDArray[np.bool_]:
        if self.asked == 9 or (self.asked > 9 and not self.once):
            end = time.thread_time() + 0.06
            while time.thread_time() < end:
                pass
        return super().allowed()


@dataclass(frozen=True)
class SlowAutomaton(Automaton):
    once: bool = False

    def begin(self) -> Walk:
        return Slow(self.moves, forces=False, once=self.once)


@pytest.mark.parametrize("once", [False, True])
def test_a_constraint_that_takes_too_long_ends_its_request_alone(once: bool) -> None:
    """One long round is forgiven, whatever took the time: the collector of garbage, say."""
    moves: Moves = {0: dict.fromkeys(range(V - 1), 0)}
    made = Engine(ScriptedModel(chaotic(1)), NullDrafter(), eos=frozenset([EOS]))
    length, rule = CONTROLLERS.make("fixed(0)"), RULES.make("standard")
    slow = Sampling(max_new_tokens=20, constraint=SlowAutomaton(False, moves, once))
    ids = [made.submit([0], how, length, rule) for how in (slow, Sampling(max_new_tokens=20))]
    done = {e.request: e.completion for e in made.run() if e.completion}
    assert done[ids[1]].finish_reason in ("length", "eos")
    if once:
        assert (done[ids[0]].error, len(done[ids[0]].tokens)) == (None, 20)
    else:
        assert done[ids[0]].error_type is SettingError
        assert "takes too long" in (done[ids[0]].error or "")
        assert 8 <= len(done[ids[0]].tokens) <= 11


def test_costly_constraints_take_turns_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of 30 ms, 50 a pass: each pass one of four rows has its mask, and a fifth its token."""
    now, asked = [0.0], [0]

    class Costly(Walk):
        def allowed(self) -> NDArray[np.bool_]:
            now[0] += 0.03
            asked[0] += 1
            return super().allowed()

    class Language(Automaton):
        def begin(self) -> Walk:
            return Costly(self.moves, forces=False)

    clock = SimpleNamespace(thread_time=lambda: now[0])
    monkeypatch.setattr("forerun.engine.constraint.time", clock)
    plain = engine(ScriptedModel(chaotic(1)), eos=[EOS])
    prompts, count = [[0], [4], [1, 2], [2]], 12
    made = Engine(ScriptedModel(chaotic(1)), NullDrafter(), eos=frozenset([EOS]))
    length, rule = CONTROLLERS.make("fixed(0)"), RULES.make("standard")
    free = made.submit([0], Sampling(max_new_tokens=60, ignore_eos=True), length, rule)
    moves: Moves = {0: dict.fromkeys(range(V - 1), 0)}
    held = Sampling(max_new_tokens=count, constraint=Language(False, moves))
    ids = [made.submit(prompt, held, length, rule) for prompt in prompts]
    made.step()
    assert asked[0] == 4  # nobody knew
    done, wrote = {}, Counter(dict.fromkeys(ids, 1))
    while len(done) < 4:
        before, events = asked[0], made.step()
        assert asked[0] == before + 1
        assert free in [event.request for event in events]
        wrote.update(event.request for event in events if event.request != free)
        done |= {e.request: e.completion for e in events if e.completion}
        assert max(wrote.values()) - min(wrote.values()) <= 1
    for i, prompt in zip(ids, prompts, strict=True):
        how: dict[str, Any] = {"max_new_tokens": count, "constraint": Automaton(False, moves)}
        assert done[i].tokens == plain([prompt], controller="fixed(0)", **how)[0].tokens
