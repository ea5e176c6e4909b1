"""Peers write what plain decoding writes, and leave the models as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import hugging_face
from benchmarks.peers.hugging_face import Assisted, EarlyExit, Plain, beside
from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.model import Model
from forerun.runtime import torch_rows
from forerun.testing import ScriptedModel
from tiny import LIMIT, build, texts

PROMPTS = texts(4, 9, 6)


@pytest.fixture
def model() -> Model:
    draft = build("llama", num_hidden_layers=1)
    return Model(torch_rows(build("llama")), ModelDrafter(torch_rows(draft), 97))


def everyone(model: Model) -> list[Plain]:
    return [
        beside(Plain, model),
        beside(Assisted, model, "constant", 3),
        beside(Assisted, model, "constant", 5, 0.1),
        beside(Assisted, model, "heuristic", 2),
        beside(EarlyExit, model, 1, 3),
    ]


def plain(model: Model, budget: int, **settings: Any) -> list[list[int]]:
    return [
        model.generate([p], plain=True, max_new_tokens=budget, **settings)[0].tokens
        for p in PROMPTS
    ]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_every_peer_writes_what_plain_decoding_writes(model: Model, penalty: float) -> None:
    right = plain(model, 12, repetition_penalty=penalty)
    for peer in everyone(model):
        assert peer.generate(PROMPTS, 12, penalty) == right, peer


def test_an_end_of_text_is_kept_and_the_padding_behind_it_is_not(model: Model) -> None:
    free = plain(model, 12, ignore_eos=True)
    end = free[1][3]
    model.eos = frozenset({end})
    right = plain(model, 12)
    assert right[1][-1] == end
    assert len({len(tokens) for tokens in right}) > 1
    for peer in everyone(model):
        assert peer.generate(PROMPTS, 12) == right, peer


def test_the_context_is_a_limit(model: Model) -> None:
    long = texts(LIMIT - 4)
    right = model.generate(long, plain=True, max_new_tokens=20, ignore_eos=True)[0]
    assert right.finish_reason == "context"
    model.eos = frozenset()
    for peer in everyone(model):
        assert peer.generate(long, 20) == [right.tokens], peer


def test_the_checkpoints_own_settings_do_not_count_and_come_back(model: Model) -> None:
    target: Any = model.target.executor.module()
    draft: Any = model.drafter.rows.executor.module()  # type: ignore[attr-defined]
    right = plain(model, 8)
    target.generation_config.repetition_penalty = 5.0
    target.generation_config.max_length = 7
    draft.generation_config.num_assistant_tokens = 1
    before = [m.generation_config.to_dict() for m in (target, draft)]
    for peer in everyone(model):
        assert peer.generate(PROMPTS, 8) == right, peer
        assert [m.generation_config.to_dict() for m in (target, draft)] == before


def test_an_interrupted_peer_leaves_the_model_whole(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    target: Any = model.target.executor.module()
    configs = [target.generation_config, model.drafter.rows.executor.module().generation_config]  # type: ignore[attr-defined]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    right = plain(model, 8)
    monkeypatch.setattr(AssistedCandidateGenerator, "_generate_candidates", stop)
    for peer in everyone(model)[1:]:
        with pytest.raises(KeyboardInterrupt):
            peer.generate(PROMPTS, 8)
        assert target.config.num_hidden_layers == 3
        assert target.generation_config is configs[0]
        assert model.drafter.rows.executor.module().generation_config is configs[1]  # type: ignore[attr-defined]
    assert plain(model, 8) == right


def test_the_schedule_reaches_transformers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.candidate_generator import AssistedCandidateGenerator as Theirs

    asked: list[int] = []
    own = Theirs._prepare_generation_args

    def spy(self: Any, ids: Any, low: int, high: int) -> Any:
        asked.append(high)
        return own(self, ids, low, high)

    monkeypatch.setattr(Theirs, "_prepare_generation_args", spy)
    model.eos = frozenset()
    for peer in (beside(Assisted, model, "constant", 3), beside(EarlyExit, model, 1, 3)):
        asked.clear()
        peer.generate(PROMPTS[:1], 30)
        assert set(asked[:-2]) == {3}, peer
    same = Model(model.target, ModelDrafter(torch_rows(build("llama")), 97))
    same.eos = frozenset()
    heuristic = beside(Assisted, same, "heuristic", 3)
    calls = []
    for _ in range(2):
        asked.clear()
        heuristic.generate(PROMPTS[:1], 14)
        calls.append(list(asked))
    assert calls[0][:2] == [3, 5]
    assert calls[1][0] > 3  # kept over calls, as transformers does


def test_who_cannot_run_says_why(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def reason(model: Model, *settings: Any) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is returned
            beside(*settings[:1], model, *settings[1:])
        return str(caught.value)

    scripted = Model(ScriptedModel(torch.eye(4)), NullDrafter())
    assert reason(scripted, Plain) == "the target is not a transformers model"
    alone = Model(model.target, NullDrafter())
    beside(Plain, alone)
    beside(EarlyExit, alone, 2)
    assert "in [1, 2], got 3" in reason(alone, EarlyExit, 3)
    assert "not a model" in reason(alone, Assisted)
    other = Model(model.target, ModelDrafter(torch_rows(build("llama", vocab_size=101)), 97))
    assert "[97, 101]" in reason(other, Assisted)
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    assert "scikit-learn" in reason(model, Assisted, "dynamic")
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: SimpleNamespace())
    beside(Assisted, model, "dynamic")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "constnat"}, "schedule must be one of"),
        ({"tokens": 0}, "tokens must be ≥ 1"),
        ({"threshold": 1.5}, "threshold must be in"),
    ],
)
def test_settings_out_of_range(model: Model, settings: Any, message: str) -> None:
    given = {"schedule": "constant", "tokens": 5, "threshold": None} | settings
    with pytest.raises(ValueError, match=message):
        beside(Assisted, model, *given.values())
    with pytest.raises(ValueError, match="layer must be"):
        beside(EarlyExit, model, 0)
