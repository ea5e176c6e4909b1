"""Published EAGLE-3 heads: numbers of the package that made them, both layouts, exact text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.drafters import DRAFTERS
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.eagle3 import Eagle3
from forerun.engine.prefixes import Prefixes
from forerun.errors import ModelError, SettingError
from forerun.model import Model, drafter_spec
from forerun.runtime import Rows, torch_rows
from forerun.runtime.drafts import rounded
from forerun.runtime.eagle import HEAD, WHOLE, EagleHead, HeadForm
from forerun.runtime.eagle3 import Eagle3Head, depths_of, span_of
from forerun.testing import ScriptedModel
from forerun.training.eagle import (
    FLAGS,
    Eagle3Trainer,
    begin_copying,
    begin_linear,
    seen_by,
    unrolled,
)
from forerun.training.fit import Document
from forerun.training.settings import TrainingSettings
from test_eagle import written
from test_states import RUNTIMES, alone
from tiny import VOCAB, build, texts

DATA = Path(__file__).parent / "data" / "eagle3"
"""Made by dev/eagle3_heads.py."""
HEADS = ("llama", "qwen3", "whole")


def authors_layout(folder: Path, name: str = "llama", table: bool = False) -> str:
    """A head of `speculators` as EAGLE's authors lay theirs out; without its embeddings."""
    config = json.loads((DATA / name / "config.json").read_text())
    flat = {**config["transformer_layer_config"], "draft_vocab_size": config["draft_vocab_size"]}
    # The target has too few layers for the depths that theirs do not name.
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    tensors = load_file(DATA / name / "model.safetensors")
    if not table:
        del tensors["embed_tokens.weight"]
    named = {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(flat))
    save_file(named, folder / "model.safetensors")
    return str(folder)


def changed(folder: Path, **changes: Any) -> str:
    """A head of `speculators` with another configuration, its own or its layer's."""
    shutil.copytree(DATA / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    for key, value in changes.items():
        (layer if key in layer else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drafter_of(path: str, rows: Rows) -> EagleDrafter:
    made = drafter_spec(path).build(rows, None)
    assert isinstance(made, EagleDrafter)
    return made


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_speculators(name: str) -> None:
    """Of the first token of a draft at every place, and of two more, by its own outputs."""
    kept = load_file(DATA / f"{name}.safetensors")
    ids, states, wanted = kept["ids"].tolist(), kept["states"], kept["logits"]
    drafter = drafter_of(str(DATA / name), torch_rows(build("llama")))
    rows, head = drafter.rows, drafter._head
    with torch.inference_mode():
        for place in range(len(ids) - 2):
            rows.keep([])
            rows.join(1, 40)
            known = head.fused(states[: place + 1], 3)
            rows.executor.given = [torch.nn.functional.pad(known, (0, 0, 1, 0))]
            got = rows.feed([[5, *ids[: place + 1]]], [1])  # whatever the text's first token is
            for ahead in range(3):
                torch.testing.assert_close(got[0, 0], wanted[ahead, place], atol=1e-4, rtol=1e-4)
                if ahead < 2:
                    end = rows.lengths[0]
                    assert rows.executor.states is not None
                    rows.executor.given = [rows.executor.states.read(0, end - 1, end)]
                    got = rows.feed([[ids[place + 1 + ahead]]], [1])


def test_the_draft_reads_the_targets_three_depths() -> None:
    model, (text,) = build("llama"), texts(9)
    rows = torch_rows(model)
    drafter = drafter_of(str(DATA / "llama"), rows)
    rows.read([text], 20)
    drafter.join([text], 20)
    step = drafter.step([text], None)
    assert step.logits is not None
    with torch.inference_mode():
        again = drafter_of(str(DATA / "llama"), rows).rows
        again.join(1, 20)
        known = drafter._head.fused(alone(model, text)[:-1], 3)
        again.executor.given = [torch.nn.functional.pad(known, (0, 0, 1, 0))]
        wanted = again.feed([text], [1])[0, 0]
    torch.testing.assert_close(step.logits[0, drafter._tokens], wanted, atol=1e-4, rtol=1e-4)
    assert int((step.logits[0] > -torch.inf).sum()) == len(wanted) == 40


@pytest.mark.parametrize("name", [*HEADS, "authors"])
def test_greedy_text_is_plain(name: str, tmp_path: Path) -> None:
    model, prompts = build("qwen2"), texts(5, 1, 9)
    path = authors_layout(tmp_path / "own") if name == "authors" else str(DATA / name)
    rows = torch_rows(model)
    how: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    plain = Model(rows, DRAFTERS.make("none").build(None, None)).generate(prompts, **how)
    fast = Model(rows, drafter_of(path, rows))
    for controller in ("fixed(3)", "auto", "exllama-confidence"):
        done = fast.generate(prompts, controller=controller, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        if controller == "fixed(3)":
            assert sum(c.stats.drafted for c in done) > 60


@pytest.mark.parametrize(("span", "covered"), [(64, [0, 13, 25]), (8, [0, 0, 0])])
def test_a_prompt_in_parts_is_read_along_if_whole(
    span: int, covered: list[int], tmp_path: Path
) -> None:
    """As far as the target has come; of more tokens than the head has places its last ones, when
    it drafts. It says the same as one that reads them at once."""
    path = changed(tmp_path / "own", max_position_embeddings=span)
    rows, (text, other) = torch_rows(build("llama")), texts(30, 9)
    drafter, at_once = drafter_of(path, rows), drafter_of(path, rows)
    rows.join(2, 40)
    for own in (drafter, at_once):
        own.join([text, other], 40)
    done = []
    for end in (12, 24, 29):
        drafter.follow([text[:end], None])
        done.append(drafter.rows.lengths[0])
        held = {row: list(parts) for row, parts in drafter._states._held.items()}
        rows.feed([text[rows.lengths[0] : end], []], [0, 0])
    assert done == covered
    assert drafter.unread(0, text) == (5 if span == 64 else 8)
    if span == 8:
        assert held[0][0][0] == 12, "states of which none is to be read are gone"
    states = alone(build("llama"), text)
    said = []
    for own in (drafter, at_once):
        if own is at_once:
            own._states.note(0, 0, states)
        own._read([text, None], leave=99)
        said.append(own.step([text, None], None).logits)
    assert drafter.rows.begins == at_once.rows.begins == [30 - min(span, 30), 0]
    torch.testing.assert_close(said[0][0], said[1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("controller", ["fixed(3)", "auto"])
def test_long_prompts_are_written_as_plainly(
    controller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, read in parts, with and without texts read before."""
    monkeypatch.setattr("forerun.engine.loop.CHUNK", 12)
    rows, (shared, *more) = torch_rows(build("llama")), texts(36, 30, 20)
    prompts = [[*shared, 5], *more, [*shared, 6, 7]]
    how: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "batch_size": 3}
    plain = Model(rows, DRAFTERS.make("none").build(None, None)).generate(prompts, **how)
    along = []
    follow = EagleDrafter.follow

    def followed(self: EagleDrafter, read: Any) -> None:
        follow(self, read)
        along.append(sum(self.rows.lengths))

    monkeypatch.setattr(EagleDrafter, "follow", followed)
    for kept in ({}, {"prefixes": Prefixes(1 << 24)}):
        fast = Model(rows, drafter_of(str(DATA / "llama"), rows), **kept)
        for _ in range(2):
            done = fast.generate(prompts, controller=controller, **how)
            assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert controller == "auto" or max(along) > 12


def test_on_openvino_the_target_lends_its_embeddings(tmp_path: Path) -> None:
    model, prompts = build("llama"), texts(5, 9)
    how: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "controller": "fixed(3)"}
    rows, path = RUNTIMES["openvino"](model), authors_layout(tmp_path / "own")
    drafter = drafter_of(path, rows)
    assert torch.equal(drafter._head.table, model.get_input_embeddings().weight)
    plain = Model(rows, DRAFTERS.make("none").build(None, None)).generate(prompts, **how)
    done = Model(rows, drafter).generate(prompts, **how)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert sum(c.stats.drafted for c in done) > 20
    with pytest.raises(SettingError, match="does not show; use torch or openvino"):
        ScriptedModel(torch.eye(4)).embeddings()


def test_both_layouts_are_one_head(tmp_path: Path) -> None:
    rows = torch_rows(build("llama"))
    one = drafter_of(str(DATA / "llama"), rows)._head
    other = drafter_of(authors_layout(tmp_path / "own", table=True), rows)._head
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert torch.equal(one.table, other.table)
    shared = drafter_of(authors_layout(tmp_path / "shared"), rows)._head
    assert shared.table.data_ptr() == build_table(rows).data_ptr(), "not a copy"


def build_table(rows: Rows) -> torch.Tensor:
    table: torch.Tensor = rows.executor.module().get_input_embeddings().weight
    return table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "not read here: 2 layers; one is"),
        ({"hidden_act": "gelu"}, "the activation gelu; silu is"),
        ({"model_type": "mistral"}, "a layer of mistral; those of llama and qwen3 are"),
        ({"norm_before_fc": True}, r"fuse_norm\.weight is missing, wanted \(96,\)"),
        ({"norm_before_fc": True, "fc_norm": True}, "both norm_before_fc and fc_norm"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "rotary positions dynamic"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, r"fuse\.weight is \(32, 96\), wanted"),
        ({"intermediate_size": 40}, r"down\.weight is \(32, 48\), wanted \(32, 40\)"),
    ],
)  # fmt: skip
def test_other_forms_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        drafter_of(changed(tmp_path / "head", **changes), torch_rows(build("llama")))


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = str(DATA / "llama")
    with pytest.raises(ModelError, match=r"is of another target: it reads 97 tokens"):
        drafter_of(path, torch_rows(build("llama", vocab_size=120)))
    with pytest.raises(ModelError, match=r"fuse\.weight is \(32, 96\), wanted \(32, 192\)"):
        drafter_of(path, torch_rows(build("llama", hidden_size=64)))
    own = authors_layout(tmp_path / "own")
    with pytest.raises(ModelError, match="embeddings of 64 for a layer of 32"):
        drafter_of(own, torch_rows(build("llama", hidden_size=64)))
    deep = changed(tmp_path / "deep", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    with pytest.raises(SettingError, match="depths must rise from 1 to at most the target's 3"):
        drafter_of(deep, torch_rows(build("llama")))
    with pytest.raises(SettingError, match="does not give; use torch or openvino"):
        Eagle3(path).build(Rows(ScriptedModel(torch.eye(4))), None)
    tensors = load_file(DATA / "llama" / "model.safetensors")
    shutil.copytree(DATA / "llama", tmp_path / "odd")
    save_file({**tensors, "fc.bias": torch.ones(32)}, tmp_path / "odd" / "model.safetensors")
    with pytest.raises(ModelError, match=r"not read here: the tensor fc\.bias"):
        drafter_of(str(tmp_path / "odd"), torch_rows(build("llama")))
    tensors["norm.weight"][3] = torch.nan
    save_file(tensors, tmp_path / "odd" / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm\.weight holds NaN or infinity"):
        drafter_of(str(tmp_path / "odd"), torch_rows(build("llama")))
    (tmp_path / "odd" / "model.safetensors").rename(tmp_path / "odd" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        drafter_of(str(tmp_path / "odd"), torch_rows(build("llama")))
    for bad in ("", 3):
        with pytest.raises(SettingError, match="eagle3 path"):
            Eagle3(bad)  # type: ignore[arg-type]


def test_a_head_in_its_targets_folder_is_found_and_may_be_in_8_bits(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none comes with this one.*train-draft eagle3"):
        Eagle3().build(torch_rows(build("llama")), None)
    shutil.copytree(DATA / "llama", tmp_path / "eagle3")
    rows, file = torch_rows(build("llama")), tmp_path / "eagle3" / "model.safetensors"
    rows.facts = replace(rows.facts, name=str(tmp_path))
    whole = Eagle3().build(rows, None)
    save_file(rounded(load_file(file)), file)
    eighth = Eagle3().build(rows, None)
    x = torch.randn(5, 32)
    near, far = (d._head.logits(x) for d in (whole, eighth))
    assert 0 < float((near - far).abs().max()) < 0.02 * float(near.abs().max())


def test_depths_and_places_are_the_folders_own() -> None:
    assert depths_of({}, 32) == [2, 16, 29]
    assert span_of({}) == span_of({"max_position_embeddings": "2k"}) == WHOLE
    assert span_of({"max_position_embeddings": 2048}) == 2048
    assert span_of({"transformer_layer_config": {"max_position_embeddings": 64}}) == 64
    assert depths_of({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, 32) == [1, 5]
    assert VOCAB == 97, "as of the heads that are kept"


# Learning


@pytest.fixture(scope="module")
def taught() -> tuple[Any, Eagle3Trainer, list[Document]]:
    model = build("llama")
    documents = written(model)
    settings = TrainingSettings("eagle3", steps=150, batch=10, vocab=60, lr=0.03)
    trainer = Eagle3Trainer(torch_rows(model), settings, documents)
    log = list(trainer.train(documents))
    # Half of what is learned are prompts, which are noise here.
    assert log[-1]["loss"] < 0.85 * log[0]["loss"]
    return model, trainer, documents


def test_a_head_begins_as_the_linear_map_of_texts_that_follow_one() -> None:
    documents = written(build("llama"))[:20]
    trainer = Eagle3Trainer(torch_rows(build("llama")), TrainingSettings("eagle3"), documents)
    assert trainer.vocabulary is not None
    assert len(trainer.vocabulary) == VOCAB // 3
    head = trainer.head
    turn = torch.linalg.qr(torch.randn(head.width, head.width)).Q
    made = []
    for document in documents:
        states = [torch.nn.functional.normalize(torch.randn(head.width), dim=0)]
        for _ in document.ids[1:]:
            states.append(turn @ states[-1])
        made.append((torch.tensor(document.ids[1:]), torch.stack(states)))
    begin_linear(head, made)
    linear = head.out.weight @ head.qkv.weight[-head.width :]
    wanted = torch.cat([torch.zeros_like(turn), turn - torch.eye(head.width)], 1)
    torch.testing.assert_close(linear, wanted, atol=0.02, rtol=0)
    ids, states = made[0]
    with torch.inference_mode():
        x = head.layer(ids[None], states[None, :-1], torch.arange(len(ids))[None], alone_attended)
    near = torch.nn.functional.cosine_similarity(x[0], states[1:])
    assert float(near.min()) > 0.7, "but for what is random, the next state"


def test_a_head_begins_by_copying() -> None:
    """One attention head sees the place behind the token's earlier occurrence."""
    torch.manual_seed(0)
    width, vocab, depths = 2 * HEAD, 40, 2
    form = HeadForm(width, 96, heads=2, key_heads=2)
    head = Eagle3Head(form, FLAGS, torch.randn(vocab, width), vocab, depths * width)
    mix = torch.randn(width, depths * width) * width**-0.5
    texts = []
    for _ in range(30):
        half = torch.randperm(vocab)[:20]
        ids = torch.cat([half, half])
        noise = 0.3 * torch.randn(len(ids), depths * width)
        texts.append((ids, head.table[ids] @ mix + noise))
    query, key = begin_copying(head, texts, depths)
    for ids, states in texts[:5]:
        with torch.inference_mode():
            own = head.entered(ids[1:], head.fused(states, depths)[:-1])[1]
            seen = seen_by(head, own, query, key)
        # Place p of the second half finds p − 20 and sees p − 19; place 0 is not read.
        seen, behind = seen[20:38, :width], own[1:19, :width]
        assert float(torch.nn.functional.cosine_similarity(seen, behind).mean()) > 0.8


def alone_attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every place sees itself."""
    return v


def test_what_is_learned_is_what_is_drafted(taught: Any, tmp_path: Path) -> None:
    """Each unrolled step at each place says what the drafter says there, in three steps."""
    model, trainer, documents = taught
    trainer.export(tmp_path, 1, {})
    rows, text = torch_rows(model), documents[0].ids[:20]
    (states,) = trainer._states.of([Document(text)])
    drafter = drafter_of(str(tmp_path), rows)
    head: Any = drafter._head
    with torch.inference_mode():
        known = states.flatten(1)[None]
        steps = [head.logits(x)[0] for x in unrolled(head, torch.tensor([text]), known, 3)]
        for place in (4, 9, 16):
            drafter.rows.keep([])
            drafter.rows.join(1, 40)
            rows.keep([])
            rows.read([text[: place + 1]], 20)
            for ahead in range(3):
                step = drafter.step([text[: place + 1 + ahead]], None)
                assert step.logits is not None
                got, wanted = step.logits[0, drafter._tokens], steps[ahead][place + ahead]
                torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
            drafter._restore()
            drafter._newest.clear()


def test_a_taught_head_is_right(taught: Any, tmp_path: Path) -> None:
    model, trainer, documents = taught
    measured = trainer.agreement(documents)
    about = trainer.export(tmp_path, len(documents), measured)
    assert about.kind == "eagle3"
    assert drafter_of(str(tmp_path), torch_rows(model))._head.span == EagleHead.span
    assert measured["tokens_per_round"] > 1.5
    rows = torch_rows(model)
    prompts = [d.ids[: d.start + 1] for d in documents[:8]]
    how: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "controller": "fixed(3)"}
    done = Model(rows, drafter_of(str(tmp_path), rows)).generate(prompts, **how)
    assert [c.tokens for c in done] == [d.ids[d.start + 1 :] for d in documents[:8]]
    live = sum(c.stats.tokens for c in done) / sum(c.stats.rounds for c in done)
    assert live == pytest.approx(measured["tokens_per_round"], rel=0.25)
