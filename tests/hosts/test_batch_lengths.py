"""What decides lengths in vLLM, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.controllers.base import LengthPolicy
from forerun.errors import ForerunError
from forerun.hosts.batch_lengths import BatchLengths, StepCosts, controller_of, judged_round
from forerun.hosts.vllm_requests import CONTROLLER, RULE, differs, refusal, unsupported
from marks import spread


@dataclass(frozen=True)
class Failing(LengthPolicy):
    """A policy of somebody's that breaks after a few rounds."""

    def limit(self, state: Any) -> int:
        return 4 // (3 - len(state))

    def observe(self, state: Any, round: Any) -> Any:
        return (*state, 1)


def test_specs_are_checked() -> None:
    for good in ("gammatune", "auto", "goodput", "fixed(0)", "bounded(gammatune,low=1,high=3)"):
        controller_of(good)
    for bad in ("gamatune", "fixed(", "hf-threshold", "survival", 3):
        with pytest.raises(ForerunError):
            controller_of(bad)
        assert refusal(CONTROLLER, bad)
    assert refusal(CONTROLLER, "gammatune") is None
    assert "judges drafts by its own sampler" in str(refusal(RULE, "ears"))


def test_versions_and_methods_that_were_not_tested_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, good in (
        ("0.32.0+cpu", True),
        ("0.32.1", True),
        ("0.33.0", False),
        ("0.3", False),
    ):
        named = SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "vllm.version", named)
        assert (unsupported() is None) is good
    assert differs(BatchLengths.leave, BatchLengths.leave) is None
    assert "leave takes self, requests, not self, request," in str(
        differs(BatchLengths.leave, BatchLengths.join)
    )


def test_every_request_has_a_length_of_its_own() -> None:
    lengths = BatchLengths("fixed(3)", most=6)
    for name, spec in {"a": None, "b": "fixed(0)", "c": "fixed(9)", "d": "gammatune"}.items():
        lengths.join(name, spec, certain=True)
    left = dict.fromkeys("abcd", 50)
    asked = lengths.limits(left, 100.0)
    assert (asked["a"], asked["b"], asked["c"]) == (3, 0, 6)
    assert lengths.limits({**left, "a": 2}, 100.0)["a"] == 1
    for _ in range(8):
        judged = {"d": judged_round(asked["d"], 0, asked["d"])}
        lengths.observe(judged, 100.0, 6, None)
        asked = lengths.limits(left, 100.0)
    assert asked["d"] == 1
    lengths.leave(["a", "gone"])
    assert set(lengths.limits(dict.fromkeys("bcd", 50), 100.0)) == set("bcd")
    assert "a" not in lengths.names


def test_a_failing_policy_leaves_its_request_plain_and_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = BatchLengths("fixed(3)", most=6)
    monkeypatch.setattr("forerun.hosts.batch_lengths.controller_of", lambda spec: Failing())
    lengths.join("bad", "failing", certain=True)
    lengths.join("good", None, certain=True)
    left = {"bad": 50, "good": 50}
    got = []
    for _ in range(5):
        asked = lengths.limits(left, 10.0)
        got.append(asked["bad"])
        assert asked["good"] == 3
        lengths.observe({r: judged_round(n, n, n) for r, n in asked.items()}, 10.0, 4, None)
    assert got == [1, 2, 4, 0, 0]
    assert len([r for r in caplog.records if "decodes plainly" in r.message]) == 1


@dataclass
class VirtualRequest:
    """A text in a batch on a machine with made-up times."""

    rng: np.random.Generator
    """Of its own, so that it is the same request under every controller."""
    chance: float
    """That a drafted token is accepted."""
    left: int = 48
    asked: int = 0


def served(
    spec: str,
    rows: int,
    added: tuple[float, float],
    chances: Sequence[float] = (0.95, 0.85, 0.6, 0.3),
    drafts: float = 1.0,
    steps: int = 300,
    held_up: float = 0.0,
) -> float:
    """Tokens per second of so many steps, a plain one of a second, as is reading a prompt.

    Args:
        spec: of the controller.
        rows: requests at a time, of 48 tokens.
        added: seconds that drafting a token adds to a step, and judging one in every row.
        chances: of requests, that a drafted token is accepted.
        drafts: share of rounds in which the drafter has anything to propose.
        held_up: share of steps that the clock shows five times as long as they are.
    """
    lengths, joined, clock = BatchLengths(spec, most=8), 0, np.random.default_rng(9)
    running: dict[str, VirtualRequest] = {}
    tokens = seconds = 0.0
    for _ in range(steps):
        joins = rows - len(running)
        while len(running) < rows:
            joined += 1
            rng = np.random.default_rng([1, joined])
            running[str(joined)] = VirtualRequest(rng, rng.choice(chances))
            lengths.join(str(joined), None, certain=True)
        judged = {}
        for name, request in running.items():
            rng = request.rng
            drafted = min(request.asked, request.left - 1) * bool(rng.random() < drafts)
            kept = int((rng.random(drafted) < request.chance).cumprod().sum())
            judged[name] = judged_round(drafted, kept, request.asked)
        limits = lengths.limits({name: one.left for name, one in running.items()}, 100.0)
        longest, mean = max(limits.values()), sum(j.drafted for j in judged.values()) / rows
        took = 1 + added[0] * longest + added[1] * mean
        seconds += took + joins
        took *= 1 + 4 * bool(clock.random() < held_up)
        lengths.observe(judged, 100.0, longest, None if joins else took)
        for name, request in list(running.items()):
            tokens += judged[name].accepted + 1
            request.left -= judged[name].accepted + 1
            request.asked = limits[name]
            if request.left <= 0:
                lengths.leave([name])
                del running[name]
    return tokens / seconds


@pytest.mark.parametrize(
    ("added", "rows"), spread(3, [(0.04, 0.01), (0.25, 0.05), (0.9, 0.1)], [1, 4, 16])
)
def test_auto_is_never_slower(added: tuple[float, float], rows: int) -> None:
    """Of 60 requests that keep nothing: it may lose 16 tokens' time, and 1 % of what is written."""
    steps = 60 * 48 // rows
    auto, plain = (served(s, rows, added, [0.0], steps=steps) for s in ("auto", "fixed(0)"))
    assert auto >= 0.98 * plain


@pytest.mark.parametrize(
    ("rows", "added", "drafts"),
    [
        (1, (0.25, 0.03), 1), (4, (0.25, 0.03), 1), (8, (0.25, 0.03), 1), (16, (0.25, 0.03), 1),
        (8, (0.5, 0.05), 1), (4, (0.002, 0.05), 0.4),
    ],
)  # fmt: skip
def test_auto_is_the_best_length_of_a_mixed_batch(
    rows: int, added: tuple[float, float], drafts: float
) -> None:
    """A draft step is shared by all rows, what is judged is not; an n-gram draft costs no step."""
    fixed = [served(f"fixed({n})", rows, added, drafts=drafts) for n in (0, 1, 2, 4, 8)]
    assert served("auto", rows, added, drafts=drafts) >= max(0.95 * max(fixed), fixed[0])


def test_steps_that_the_machine_held_up_do_not_rest_a_batch() -> None:
    fixed = [served(f"fixed({n})", 16, (0.25, 0.03)) for n in (0, 1, 2)]
    assert served("auto", 16, (0.25, 0.03), held_up=0.03) >= 0.97 * max(fixed)


def test_costs_come_from_steps_of_their_shape() -> None:
    costs = StepCosts()
    assert costs.costs(1, 100.0).plain == 1.0
    for seconds in (9.0, 1.0, 1.1, 1.2):  # the first compiles
        costs.add(4, 100.0, 0.0, 0, seconds)
        for judged, drafts in ((3.0, 3), (0.0, 3), (1.5, 4), (3.0, 0)):
            costs.add(4, 100.0, judged, drafts, (1 + 0.3 * drafts + 0.1 * judged) * seconds)
    got = costs.costs(4, 100.0)
    assert (got.plain, got.draft) == (1.0, pytest.approx(0.3, abs=0.03))
    assert got.verify_seconds(2) == pytest.approx(1.1, abs=0.03)
    assert costs.costs(5, 5000.0).plain == 1.0
    assert costs.timed(4, 100.0)
    assert not costs.timed(5, 100.0)
    for shape, steps in ((4, 61), (5, 9)):  # one that was timed, and one that was not
        for _ in range(steps):
            assert not costs.costs(shape, 100.0).retime
            costs.add(shape, 100.0, 3.0, 3, 2.0)
        assert costs.costs(shape, 100.0).retime == "plain"
