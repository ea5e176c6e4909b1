"""What decides lengths in vLLM, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from forerun.controllers.base import LengthPolicy
from forerun.errors import ForerunError
from forerun.hosts.batch_lengths import BatchLengths, StepCosts, controller_of, judged_round
from forerun.hosts.vllm_requests import CONTROLLER, RULE, differs, metadata, refusal, unsupported


@dataclass(frozen=True)
class Failing(LengthPolicy):
    """A policy of somebody's that breaks after a few rounds."""

    summary: ClassVar[str] = "breaks"
    paper: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""

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
        monkeypatch.setattr(metadata, "version", lambda name, found_as=version: found_as)
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


def simulated(accepts: float, added: float, steps: int = 400) -> tuple[float, float]:
    """Tokens per second of `auto`, and of plain decoding, on a machine with made-up times.

    Args:
        accepts: drafted tokens of a round that are accepted, at most.
        added: seconds that each drafted token adds to a step of one second.
    """
    lengths = BatchLengths("auto", most=8)
    lengths.join("a", None, certain=True)
    tokens = seconds = 0.0
    asked = drafted = 0
    for n in range(steps):
        before, asked = asked, lengths.limits({"a": 10_000}, 200.0)["a"]
        drafted = before
        accepted = min(drafted, int(accepts * (n + 1)) - int(accepts * n))
        took = 1 + added * (drafted + asked) / 2
        tokens, seconds = tokens + accepted + 1, seconds + took
        lengths.observe({"a": judged_round(drafted, accepted, before)}, 200.0, asked, took)
    return tokens / seconds, 1.0


@pytest.mark.parametrize("added", [0.05, 0.3, 1.0])
def test_auto_is_never_slower_and_drafts_where_it_pays(added: float) -> None:
    rejected, plain = simulated(0.0, added)
    assert rejected >= 0.94 * plain  # of 400 steps: the reserve is 16
    welcome, _ = simulated(6.0, added)
    best = 7 / (1 + 6 * added)
    assert welcome >= max(0.9 * best, 0.94)


def test_costs_come_from_steps_of_their_shape() -> None:
    costs = StepCosts()
    assert costs.costs(1, 100.0).plain == 1.0
    for seconds in (9.0, 1.0, 1.1, 1.2):  # the first compiles
        costs.add(4, 100.0, 0.0, 0, seconds)
        costs.add(4, 100.0, 3.0, 3, 2 * seconds)
        costs.add(4, 100.0, 0.0, 3, 99.0)  # drafts begin: no sample
    got = costs.costs(4, 100.0)
    assert (got.plain, got.verify_seconds(4)) == (1.0, 2.0)
    assert costs.costs(5, 5000.0).plain == 1.0
    assert costs.timed(4, 100.0)
    assert not costs.timed(5, 100.0)
    for _ in range(65):
        costs.add(4, 100.0, 3.0, 3, 2.0)
    assert costs.costs(4, 100.0).retime == "plain"
