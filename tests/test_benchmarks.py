"""What the benchmarks record and replay is exactly what the live engine does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from benchmarks.common import Task, geometric, recorded
from benchmarks.rouge import rouge

from forerun import Model
from forerun.drafters.model import ModelDrafter
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.replay import Rounds, replay
from forerun.testing import ScriptedModel
from test_engine import chaotic, noisy


@pytest.fixture(scope="module")
def model() -> Any:
    script = chaotic(31)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 32, 0.4))
    made = Model(target, ModelDrafter(draft, target.vocab_size))
    made.eos = frozenset({3})
    return made


@pytest.mark.parametrize(
    "spec",
    [
        "fixed(0)", "fixed(3)", "hf-heuristic(length=2)", "hf-threshold(threshold=0.5)",
        "gammatune", "gammatune(literal=true)", "gammatune+(threshold=0.5)",
        "gammatune+(threshold=0.6,keep=false,early_stop=skip)",
        "cm-asd(high=8)", "cm-asd(high=8,two_pass=true)", "svip", "adaedl", "exllama-ema",
        "sglang-ema", "goodput", "bandit", "bandit(policy=thompson)",
    ],
)  # fmt: skip
def test_replay_equals_the_live_engine(model: Any, spec: str) -> None:
    tokens = 40
    work = [
        *[Task("a", [i, 5], tokens) for i in range(7)],
        Task("b", [3], tokens, repetition_penalty=1.5),
        Task("a", [4, 5, 6], tokens),
    ]
    rounds: list[list[int]] = [[] for _ in work]

    def watch(now: Rounds) -> None:
        for i, drafted in zip(now.prompt, now.drafted, strict=True):
            rounds[i].append(int(drafted))

    found = replay(recorded(model, work), spec, Cell.synthetic(4), watch)
    for i, task in enumerate(work):
        live = model.generate(
            [task.tokens],
            controller=spec,
            max_new_tokens=tokens,
            repetition_penalty=task.repetition_penalty,
        )[0]
        assert found.rounds[i] == live.stats.rounds
        assert rounds[i] == [r.drafted for r in live.rounds]
        assert found.drafted[i] == live.stats.drafted


def test_geometric_mean_and_interval() -> None:
    cell = geometric([1.0, 2.0, 4.0])
    assert cell["mean"] == pytest.approx(2.0)
    assert cell["low"] <= cell["mean"] <= cell["high"]
    assert cell["n"] == 3


def test_rouge_by_hand() -> None:
    """Of 6 words 5 are shared, of 5 pairs 1; "the cat on mat" is in order."""
    found = rouge(["The cat sat on the mat."], ["the cat, on a mat the"])
    assert found == pytest.approx((100 * 5 / 6, 100 * 1 / 5, 100 * 4 / 6))
    assert rouge(["a b", "a"], ["", "A!"]) == (50.0, 0.0, 50.0)


def test_rouge_is_that_of_the_package() -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(
        ["rouge1", "rouge2", "rougeL"]
    )
    rng, words = random.Random(0), ["a", "b", "c", "The", "Cat,", "5", "Öl", "x-y", ";"]
    for _ in range(100):
        wanted, text = (" ".join(rng.choices(words, k=9)) for _ in "ab")
        one = scorer.score(wanted, text)
        assert rouge([wanted], [text]) == pytest.approx([100 * s.fmeasure for s in one.values()])
