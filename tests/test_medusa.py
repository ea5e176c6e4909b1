"""Medusa: heads on the target's last hidden state, what they read, how they learn; exactness."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forerun.drafters import DRAFTERS
from forerun.drafters.medusa import Medusa, MedusaDrafter
from forerun.errors import ForerunWarning, ModelError, SettingError
from forerun.model import Model, drafter_spec
from forerun.runtime import Rows, torch_rows
from forerun.runtime.drafts import ABOUT, WEIGHTS, About, read_about, save_draft
from forerun.runtime.heads import MedusaHeads, load_medusa, new_heads
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import dense
from forerun.testing import ScriptedModel
from forerun.training.fit import Document
from forerun.training.heads import MedusaTrainer
from forerun.training.settings import TrainingSettings
from marks import spread
from sourced import build as build_encoder_decoder
from tiny import CONFIGS, VOCAB, build, texts

WIDTH = 32


def plainly(model: Any, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    plain = Model(torch_rows(model), DRAFTERS.make("none").build(None, None))
    return [c.tokens for c in plain.generate(prompts, ignore_eos=True, **how)]


def medusa(model: Any, heads: MedusaHeads) -> Model:
    rows = torch_rows(model)
    return Model(rows, MedusaDrafter(rows, LayerAccess(model), heads, heads.count))


# Heads


def test_heads_are_the_papers_formula_and_begin_as_the_models_own() -> None:
    model = build("llama")
    heads, hidden = new_heads(model, 2, layers=1), torch.randn(3, WIDTH)
    for head in range(2):
        torch.testing.assert_close(heads.logits(head, hidden), model.lm_head(hidden))
    first, second = torch.randn(WIDTH, WIDTH), torch.randn(VOCAB, WIDTH)
    heads.weights |= {"1.0.weight": first, "1.unembedding": second}
    wanted = (F.silu(hidden @ first.T) + hidden) @ second.T
    torch.testing.assert_close(heads.logits(1, hidden), wanted)
    few = new_heads(model, 2, layers=2, tokens=torch.tensor([5, 9, 40]))
    torch.testing.assert_close(few.logits(0, hidden), model.lm_head(hidden)[:, [5, 9, 40]])
    assert (few.count, few.layers, few.logits(1, hidden).shape) == (2, 2, (3, 3))


def saved(model: Any, folder: Path, heads: MedusaHeads, target: str = "x") -> str:
    form = {"layers": heads.layers, "width": heads.count}
    tokens = {} if heads.tokens is None else {"tokens": heads.tokens.to(torch.int32)}
    save_draft(folder, About("medusa", target, form), {**heads.weights, **tokens})
    return str(folder)


def test_heads_come_back_from_disk(tmp_path: Path) -> None:
    model = build("llama")
    heads = new_heads(model, 3, tokens=torch.tensor([3, 4, 50]))
    path = saved(model, tmp_path, heads)
    with pytest.warns(ForerunWarning, match="trained for another target"):
        back = load_medusa(model, path)
    assert (read_about(path).kind, back.layers, back.count) == ("medusa", 1, 3)
    assert back.tokens is not None
    assert back.tokens.tolist() == [3, 4, 50]
    for name, tensor in heads.weights.items():
        torch.testing.assert_close(dense(back.weights[name]), tensor, atol=0.01, rtol=0.01)
    assert isinstance(drafter_spec(path), Medusa), "the folder alone names the drafter"


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    path = saved(model, tmp_path / "heads", new_heads(model, 2))
    with pytest.raises(ModelError, match="does not fit this target"):
        load_medusa(build("llama", hidden_size=64), path)
    wrong = new_heads(model, 2, tokens=torch.tensor([3, VOCAB]) - 1)
    wrong.tokens = torch.tensor([3, VOCAB])
    with pytest.raises(ModelError, match="does not fit this target"):
        load_medusa(model, saved(model, tmp_path / "wrong", wrong))
    with pytest.raises(ModelError, match="forerun train-draft makes one"):
        load_medusa(model, tmp_path)
    (tmp_path / "heads" / WEIGHTS).write_text("x")
    with pytest.raises(ModelError, match="cannot read the weights"):
        load_medusa(model, path)
    about = json.loads((tmp_path / "heads" / ABOUT).read_text()) | {"kind": "shared"}
    (tmp_path / "heads" / ABOUT).write_text(json.dumps(about))
    with pytest.raises(ModelError, match="for the drafter 'shared', not 'medusa'"):
        load_medusa(model, path)


def test_targets_that_give_no_states_are_refused() -> None:
    with pytest.raises(SettingError, match="medusa runs on torch, and this target on scripted"):
        Medusa().build(Rows(ScriptedModel(torch.eye(4))), None)
    with pytest.raises(SettingError, match="decoder-only targets, and this one has an encoder"):
        Medusa().build(torch_rows(build_encoder_decoder("marian", decoder_layers=2)), None)
    with pytest.raises(SettingError, match="make one with forerun train-draft medusa"):
        Medusa().build(torch_rows(build("llama")), None)
    for bad in ({"heads": 0}, {"heads": 1.5}, {"path": ""}, {"path": 3}):
        with pytest.raises(SettingError, match="medusa "):
            Medusa(**bad)  # type: ignore[arg-type]


def test_a_targets_own_heads_are_found_in_its_folder(tmp_path: Path) -> None:
    model = build("llama")
    saved(model, tmp_path / "medusa", new_heads(model, 3))
    model.save_pretrained(tmp_path)
    model.name_or_path = str(tmp_path)
    with pytest.warns(ForerunWarning):
        drafter = Medusa(heads=2).build(torch_rows(model), None)
    assert isinstance(drafter, MedusaDrafter)
    assert drafter._width == 2


# Learning, and what is learnt


def written(model: Any, count: int = 60) -> list[Document]:
    """What a model writes on random prompts."""
    prompts = texts(*[6] * count, seed=3)
    return [
        Document(prompt + tokens, len(prompt) - 1)
        for prompt, tokens in zip(prompts, plainly(model, prompts, max_new_tokens=30), strict=True)
    ]


@pytest.fixture(scope="module")
def taught() -> tuple[Any, MedusaTrainer, list[Document]]:
    model = build("llama")
    documents = written(model)
    trainer = MedusaTrainer(
        torch_rows(model),
        TrainingSettings("medusa", width=3, steps=150, batch=16, lr=0.01, vocab=40),
        documents,
    )
    list(trainer.train(documents))
    return model, trainer, documents


def test_a_head_learns_the_token_behind_the_next(taught: Any) -> None:
    """Goals by hand, and an agreement that rises far above that of the model's own head."""
    model, trainer, documents = taught
    hidden, ahead = trainer._both([Document([5, 6, 7, 8, 9], 1)])
    assert ahead.tolist() == [[8, 9, -1], [9, -1, -1], [-1, -1, -1]], "places 1, 2 and 3"
    with torch.no_grad():
        wanted = model.base_model(torch.tensor([[5, 6, 7, 8, 9]]))[0][0, 1:4]
    torch.testing.assert_close(hidden, wanted, atol=1e-5, rtol=1e-4)
    fresh = MedusaTrainer(torch_rows(model), trainer.settings, documents)
    before, after = (t.agreement(documents) for t in (fresh, trainer))
    assert after["accepted"] > 2 * before["accepted"] + 0.05
    assert after["top1"] == after["by_depth"][0] > 2 * before["top1"]
    assert len(after["by_depth"]) == 3
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("controller", "batch_size"),
    spread(2, ["fixed(3)", "fixed(9)", "cm-asd", "auto", "svip"], [1, 4]),
)
def test_greedy_text_is_plain_and_takes_fewer_rounds(
    taught: Any, controller: str, batch_size: int
) -> None:
    model, trainer, _ = taught
    prompts = texts(6, 6, 6, 6, seed=3)  # it has learnt from what the target says of these
    done = medusa(model, trainer.heads).generate(
        prompts, controller=controller, max_new_tokens=25, ignore_eos=True, batch_size=batch_size
    )
    assert [c.tokens for c in done] == plainly(model, prompts, max_new_tokens=25)
    if controller.startswith("fixed"):
        assert sum(c.stats.rounds for c in done) < 92
        assert max(r.drafted for c in done for r in c.rounds) == 3, "as many as there are heads"


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_is_plain_in_every_family(family: str) -> None:
    model, prompts = build(family), texts(5, 1, 9)
    heads = new_heads(model, 4)
    fast = medusa(model, heads).generate(
        prompts, controller="fixed(4)", max_new_tokens=16, ignore_eos=True
    )
    assert [c.tokens for c in fast] == plainly(model, prompts, max_new_tokens=16)


def test_sampled_text_is_distributed_as_the_targets(taught: Any) -> None:
    """All texts of three tokens out of two each. False alarm: 1e-6 (χ² with 7 degrees)."""
    model, trainer, _ = taught
    (prompt,) = texts(6, seed=3)
    fast, count, seen = medusa(model, trainer.heads), 1000, Counter[tuple[int, ...]]()
    drafted = 0
    for _ in range(count // 250):
        done = fast.generate([prompt] * 250, controller="fixed(2)", max_new_tokens=4, top_k=2,
                             temperature=1.5, ignore_eos=True, batch_size=250)  # fmt: skip
        seen.update(tuple(c.tokens[:3]) for c in done)
        drafted += sum(c.stats.drafted for c in done)
    assert drafted > count
    squares = 0.0
    for picks in itertools.product(range(2), repeat=3):
        expected, text = float(count), list(prompt)
        for pick in picks:
            with torch.no_grad():
                top = model(torch.tensor([text])).logits[0, -1].double().topk(2)
            expected *= float((top.values / 1.5).softmax(-1)[pick])
            text.append(int(top.indices[pick]))
        squares += (seen[tuple(text[6:])] - expected) ** 2 / max(expected, 1e-9)
    assert sum(seen.values()) == count
    assert squares < 42


def test_a_run_cut_in_two_is_the_run_in_one_piece(tmp_path: Path) -> None:
    model = build("llama")
    documents = written(model, 8)
    settings = TrainingSettings("medusa", width=2, steps=4, batch=3, vocab=20)
    whole, first, rest = (MedusaTrainer(torch_rows(model), settings, documents) for _ in range(3))
    assert len(list(whole.train(documents))) == 4
    for record in first.train(documents):
        if record["step"] == 2:
            break
    first.save(tmp_path / "training.pt")
    rest.load(tmp_path / "training.pt")
    assert [record["step"] for record in rest.train(documents)] == [3, 4]
    for name, value in whole.own.items():
        torch.testing.assert_close(rest.own[name], value, rtol=0, atol=0)
    others = MedusaTrainer(torch_rows(model), settings, documents[:2])  # other frequent tokens
    with pytest.raises(SettingError, match="begun with other settings"):
        others.load(tmp_path / "training.pt")


def test_texts_too_short_for_any_head_teach_nothing() -> None:
    model, short = build("llama"), [Document([5, 6])] * 4
    trainer = MedusaTrainer(torch_rows(model), TrainingSettings("medusa", width=2, steps=2), short)
    assert [record["loss"] for record in trainer.train(short)] == [0.0, 0.0]
    assert trainer.agreement(short) == {"top1": 0.0, "by_depth": [0.0, 0.0], "accepted": 0.0}


def test_only_heads_have_a_vocabulary_of_their_own() -> None:
    with pytest.raises(SettingError, match="vocab must be 0 for a draft of kind shared"):
        TrainingSettings("shared", vocab=5)
