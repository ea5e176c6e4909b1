"""Requests: what is refused, what fails alone, how prompts are read, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.controllers.fixed import FixedLength
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Completion, Engine, Request, Sampling
from forerun.errors import PromptError, SettingError
from forerun.model import Model
from forerun.rules import RULES
from forerun.rules.standard import Standard
from forerun.runtime import base as base_module
from forerun.runtime import torch_rows
from forerun.testing import ScriptedModel
from forerun.types import Verdict
from test_engine import NEXT, V, chaotic, noisy
from tiny import build, texts

FIXED, STANDARD = CONTROLLERS.make("fixed(2)"), RULES.make("standard")


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, tokens: list[int], **how: Any) -> str:
        return "".join(chr(97 + token) for token in tokens)


STAGES = ["target", "draft", "reserve", "rule", "tokenizer"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("max_rows", [1, 4])
def test_an_error_ends_what_it_must_and_leaves_the_engine_usable(stage: str, max_rows: int) -> None:
    """A model's error ends the rows of that pass; a row's own part ends that row alone."""
    spoilt, after = 2, 3  # the request with a part of its own that breaks; calls before it does

    class Breaking(ScriptedModel):
        left = 1 << 30

        def run(self, *args: Any) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("out of memory")
            return super().run(*args)

        def reserve(self, rows: int, columns: int) -> None:
            if stage == "reserve" and self.left < 1 << 29:
                raise RuntimeError("out of memory")

    @dataclass(frozen=True)
    class BadRule(Standard):
        matches_greedy = False

        def judge(self, *args: Any) -> Verdict:
            raise ValueError("no such thing")

    class BadTokenizer(Letters):
        def decode(self, tokens: list[int], **how: Any) -> str:
            raise ValueError("no such thing")

    target, draft = Breaking(NEXT), Breaking(NEXT)
    made = Engine(target, ModelDrafter(draft, V), Letters(), max_rows=max_rows)
    how, fixed, standard = Sampling(max_new_tokens=9), FIXED, STANDARD
    ids = [made.submit([i], how, fixed, standard) for i in range(2)]
    rule = BadRule() if stage == "rule" else standard
    if stage == "tokenizer":
        made.tokenizer = BadTokenizer()
    ids.append(made.submit([spoilt], how, fixed, rule))
    made.tokenizer = Letters()
    ids += [made.submit([i], how, fixed, standard) for i in range(3, 6)]
    broken = {"target": target, "draft": draft, "reserve": draft}.get(stage)
    if broken is not None:
        broken.left = after
    done: dict[int, Completion] = {}
    while len(done) < len(ids):
        for event in made.step():
            if event.completion:
                done[event.request] = event.completion
                if event.completion.error and broken is not None:
                    broken.left = 1 << 30
    failed = [i for i in ids if done[i].error]
    if broken is None:
        assert failed == [spoilt]
        assert "no such thing" in str(done[spoilt].error)
    else:
        assert 1 <= len(failed) <= max_rows
        assert all("out of memory" in str(done[i].error) for i in failed)
    for i in ids:
        wanted = [(i + 1 + n) % V for n in range(9)]
        assert done[i].tokens == wanted[: len(done[i].tokens)]
        assert done[i].finish_reason == ("error" if i in failed else "length")
        assert done[i].error or len(done[i].tokens) == 9
    assert made.target.lengths == [] == target.history


def test_a_long_prompt_delays_others_by_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_module, "CHUNK", 8)
    monkeypatch.setattr("forerun.engine.loop.CHUNK", 8)
    monkeypatch.setattr("forerun.drafters.stepping.CHUNK", 8)
    script = chaotic(1)
    target, draft = ScriptedModel(script), ScriptedModel(noisy(script, 2, 0.5))
    made = Engine(target, ModelDrafter(draft, V))
    short = made.submit([1, 2], Sampling(max_new_tokens=30), FIXED, STANDARD)
    made.step()
    prompt = [i % V for i in range(50)]
    late, later = (
        made.submit([*prompt, last], Sampling(max_new_tokens=5), FIXED, STANDARD) for last in (1, 2)
    )
    firsts: dict[int, int] = {}
    rounds, done = 0, {}
    while len(done) < 3:
        rounds += 1
        for event in made.step():
            firsts.setdefault(event.request, rounds)
            if event.completion:
                done[event.request] = event.completion
    assert firsts[short] == 1  # it went on in every round
    assert firsts[late] == 7  # 51 tokens in chunks of 8
    assert firsts[later] <= 14
    widest = max(sum(fed) for fed in target.passes)
    assert widest <= 8 + 2 * 3  # a chunk, and what two others judge
    for request, text in ((short, [1, 2]), (late, [*prompt, 1]), (later, [*prompt, 2])):
        alone = Engine(ScriptedModel(script), NullDrafter())
        alone.submit(text, Sampling(max_new_tokens=len(done[request].tokens)), FIXED, STANDARD)
        (wanted,) = [e.completion for e in alone.run() if e.completion]
        assert done[request].tokens == wanted.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_pass_that_reads_the_prompt_gives_the_first_token(stream: bool) -> None:
    """With the first draft, where nobody waits; as soon as plainly, where somebody does."""
    target, draft = ScriptedModel(NEXT), ScriptedModel(NEXT)
    made = Engine(target, ModelDrafter(draft, V))
    made.submit(Request([0, 1, 2], Sampling(max_new_tokens=9), FIXED, STANDARD, stream=stream))
    (event,) = made.step()
    assert [piece.token for piece in event.pieces] == ([3] if stream else [3, 4, 5])
    assert len(target.passes) == 1
    assert len(draft.passes) == (0 if stream else 2)
    done = [e for e in made.run() if e.completion]
    assert len(target.passes) == len(done[0].completion.rounds)  # type: ignore[union-attr]


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_models_own(top: int, temperature: float) -> None:
    model, (prompt, other) = build("llama"), texts(6, 9)
    rows = torch_rows(model)
    made = Engine(rows, ModelDrafter(torch_rows(build("llama", seed=3)), rows.vocab_size))
    how = Sampling(max_new_tokens=12, temperature=temperature, seed=1, repetition_penalty=1.3)
    made.submit(Request(prompt, how, FIXED, STANDARD, logprobs=top))
    made.submit(Request(other, how, FIXED, STANDARD))
    asked, unasked = [e.completion for e in sorted(
        (e for e in made.run() if e.completion), key=lambda e: e.request)]  # fmt: skip
    assert unasked is not None
    assert unasked.logprobs is None
    assert asked is not None
    assert asked.logprobs is not None
    with torch.inference_mode():
        log = model(torch.tensor([[*prompt, *asked.tokens]])).logits[0].log_softmax(-1)
    for place, (token, got) in enumerate(zip(asked.tokens, asked.logprobs, strict=True)):
        row = log[len(prompt) - 1 + place]
        assert got.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t for t, _ in got.top] == row.topk(top).indices.tolist()
    assert asked.to_json()["logprobs"][0]["logprob"] == asked.logprobs[0].logprob


def test_a_text_is_scored_without_speculation() -> None:
    model, (text,) = build("llama"), texts(40)
    scores = Model(torch_rows(model), NullDrafter()).score(text, top=2)
    with torch.inference_mode():
        log = model(torch.tensor([text])).logits[0].log_softmax(-1)
    assert len(scores) == len(text) - 1
    for place, got in enumerate(scores):
        assert got.logprob == pytest.approx(float(log[place, text[place + 1]]), abs=1e-4)
        assert [t for t, _ in got.top] == log[place].topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": []}, PromptError, "the prompt is empty"),
        ({"prompt": [V]}, PromptError, f"outside the vocabulary of {V}"),
        ({"prompt": [1] * 50}, PromptError, "the prompt has 50 tokens and the context holds 40"),
        ({"logprobs": -1}, SettingError, "logprobs must be ≥ 0, got -1"),
        ({"rule": RULES.make("easd")}, SettingError, "reads the draft's distribution"),
        ({"sampling": Sampling(stop=("a",))}, SettingError, "stop strings need a tokenizer"),
        ({"source": [1]}, SettingError, "encoder"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = Engine(ScriptedModel(NEXT, limit=40), LookupDrafter(3, 1))
    asked = {"prompt": [1], "sampling": Sampling(), "controller": FIXED, "rule": STANDARD}
    with pytest.raises(error, match=message):
        made.submit(Request(**{**asked, **change}))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Unlucky(FixedLength):
    """A policy that breaks once it has learned something."""

    def observe(self, state: Any, round: Any) -> Any:
        raise ValueError("no such thing")


def test_a_policy_that_breaks_ends_its_request_alone() -> None:
    made = Engine(ScriptedModel(NEXT), ModelDrafter(ScriptedModel(NEXT), V))
    how = Sampling(max_new_tokens=9)
    for i in range(3):
        made.submit([i], how, Unlucky(2) if i == 1 else FIXED, STANDARD)
    done = {e.request: e.completion for e in made.run() if e.completion}
    assert [done[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert "no such thing" in str(done[1].error)
    assert done[1].tokens == [2, 3, 4]  # what was written before stands
