"""Exit heads: what they say, how they are kept, and that training makes them better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from forerun.errors import ForerunWarning, ModelError, SettingError
from forerun.runtime import torch_rows
from forerun.runtime.drafts import ABOUT, WEIGHTS, About, fingerprint, save_draft
from forerun.runtime.heads import FORM, ExitHeads, default_layers, load_heads, shapes_of_head
from forerun.runtime.layers import LayerAccess, Placed
from forerun.training.fit import Document
from forerun.training.heads import ExitTrainer
from forerun.training.settings import TrainingSettings
from marks import slow_but

WIDTH = 32


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


@pytest.fixture(scope="module")
def access(model: Any) -> LayerAccess:
    return LayerAccess(model)


def documents(count: int = 40, seed: int = 1, length: int = 24) -> list[Document]:
    return [Document(ids, 3) for ids in tiny.texts(*[length] * count, seed=seed)]


TEXTS, HELD = documents(480), documents(30, seed=2)


def save_heads(heads: ExitHeads, folder: Path, target: str | None = None) -> Path:
    tokens = {} if heads.tokens is None else {"tokens": heads.tokens.to(torch.int32)}
    own = {f"{n}.{name}": t for n, part in heads.weights.items() for name, t in part.items()}
    form = {"head": FORM, "layers": list(heads.layers), "tuned": heads.tuned}
    save_draft(folder, About("exits", target, form), own | tokens)
    return folder


def some_heads(
    access: LayerAccess, dtype: torch.dtype = torch.float32, tokens: torch.Tensor | None = None
) -> ExitHeads:
    weights = {
        layer: {
            name: ((name == "scale") + torch.randn(*shape) * 0.1).to(dtype)
            for name, shape in shapes_of_head(WIDTH).items()
        }
        for layer in (1, 2)
    }
    return ExitHeads(access, weights, tokens, {"width": 3})


def test_the_lens_after_the_last_layer_is_the_model(access, model):
    ids = torch.tensor(tiny.texts(9))
    positions = torch.arange(9)[None]
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.inference_mode():
        hidden = access.run(access.embed(ids, positions), 0, access.layers, Placed(mask, positions))
        got, wanted = ExitHeads(access).logits(access.layers, hidden), model(ids).logits
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, torch.tensor([0, 3, 50, 96])], ids=["all", "some"])
def test_saved_and_loaded_bit_for_bit(access, tmp_path, dtype, tokens):
    heads = some_heads(access, dtype, tokens)
    save_heads(heads, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {WEIGHTS, ABOUT}
    again = load_heads(tmp_path / "new", access)
    assert (again.layers, again.tuned) == ((1, 2), {"width": 3})
    for layer, own in heads.weights.items():
        assert own.keys() == again.weights[layer].keys()
        assert all(torch.equal(own[name], again.weights[layer][name]) for name in own)
        assert all(own[name].dtype == again.weights[layer][name].dtype for name in own)
    hidden = torch.randn(2, 3, WIDTH)
    with torch.inference_mode():
        logits = heads.logits(2, hidden)
        assert logits.shape == (2, 3, tiny.VOCAB if tokens is None else 4)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, again.logits(2, hidden))
        assert (tokens is None) == (again.tokens is None)
        assert tokens is None or torch.equal(tokens, again.tokens)


def test_heads_run_in_the_models_dtype(access, tmp_path):
    save_heads(some_heads(access), tmp_path)
    half = LayerAccess(tiny.build("llama").to(torch.bfloat16))
    with torch.inference_mode():
        for heads in (load_heads(tmp_path, half), some_heads(half)):
            assert heads.logits(1, torch.randn(4, WIDTH).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 64}, r"1.bias is \(32,\), wanted \(64,\)"),
        ({"num_hidden_layers": 1}, "at most the target's 1 layers, got 1, 2"),
    ],
)
def test_another_model_is_refused(access, tmp_path, changes, what):
    save_heads(some_heads(access), tmp_path)
    other = LayerAccess(tiny.build("llama", **changes))
    with pytest.raises(ModelError, match=what):
        load_heads(tmp_path, other)


def test_heads_of_another_model_of_these_sizes_warn(model, access, tmp_path):
    save_heads(some_heads(access), tmp_path, fingerprint(model))
    load_heads(tmp_path, access)
    with pytest.warns(ForerunWarning, match="trained for another target"):
        load_heads(tmp_path, LayerAccess(tiny.build("llama", seed=1)))


def test_damaged_files_are_refused(access, tmp_path):
    with pytest.raises(ModelError, match=r"draft\.json is missing"):
        load_heads(tmp_path, access)
    good, bad = save_heads(some_heads(access), tmp_path / "good"), tmp_path / "bad"

    def damaged(name: str, content: bytes) -> Path:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        (bad / name).write_bytes(content)
        return bad

    with pytest.raises(ModelError, match="cannot read the weights"):
        load_heads(damaged(WEIGHTS, b"no tensors"), access)
    with pytest.raises(ModelError, match="cannot be read"):
        load_heads(damaged(ABOUT, b"{"), access)
    about = json.loads((good / ABOUT).read_text())
    for change, what in (
        ({"head": "full"}, "heads of the form 'full'; 'light' ones are read"),
        ({"layers": [1]}, r"2\.bias is \(32,\), wanted"),
        ({"kind": "medusa"}, "for the drafter 'medusa', not 'exits'"),
    ):
        with pytest.raises(ModelError, match=what):
            load_heads(damaged(ABOUT, json.dumps({**about, **change}).encode()), access)
    few = tmp_path / "few"
    save_heads(some_heads(access, tokens=torch.tensor([1, 5, 96])), few)
    tensors = load_file(few / WEIGHTS)
    save_file(tensors | {"tokens": torch.tensor([1, 5, 97], dtype=torch.int32)}, few / WEIGHTS)
    with pytest.raises(ModelError, match=r"tokens is missing, wanted ids"):
        load_heads(tmp_path / "few", access)


def test_wrong_layers_are_refused(access):
    heads = some_heads(access)
    with pytest.raises(SettingError, match="no exit head after layer 3; there are heads after 1"):
        heads.logits(3, torch.zeros(1, WIDTH))
    own = heads.weights[1]
    for weights, what in (({}, "got none"), ({4: own}, "target's 3 layers, got 4"),
                          ({0: own}, "got 0")):  # fmt: skip
        with pytest.raises(SettingError, match=what):
            ExitHeads(access, weights)
    assert default_layers(3) == (1, 2)


def exits(model: Any, texts: list[Document] = TEXTS, **how: Any) -> ExitTrainer:
    return ExitTrainer(torch_rows(model), TrainingSettings("exits", (1, 2), **how), texts)


@pytest.mark.parametrize("how", [{}, {"vocab": 9}])
def test_training_begins_at_the_logit_lens(model, access, how):
    trainer = exits(model, **how)
    hidden, _ = trainer._both(TEXTS[:3])
    with torch.no_grad():
        lens, own = access.logits(hidden[:, 1]), trainer.heads.logits(2, hidden[:, 1])
    if "vocab" in how:
        counts = torch.bincount(trainer._both(TEXTS)[1].argmax(-1), minlength=tiny.VOCAB)
        assert counts[trainer.heads.tokens].sum() == counts.sort(descending=True).values[:9].sum()
        lens = lens[:, trainer.heads.tokens]
    assert torch.allclose(lens, own, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    slow_but(
        [{}, {"loss": "distill"}, {"vocab": 60}, {"vocab": 60, "loss": "distill"}],
        lambda how: len(how) == 2,
    ),
    ids=str,
)  # fmt: skip
def test_training_beats_the_lens_on_held_out_text(model, access, how):
    trainer = exits(model, batch=13, steps=220, **how)
    base = {name: tensor.clone() for name, tensor in access._head.named_parameters()}
    before = trainer.reports(ExitHeads(access), HELD)
    log = list(trainer.train(TEXTS))
    assert len(log) == 220
    measured = trainer.agreement(HELD)
    for lens, own in zip(measured["lens"], measured["layers"], strict=True):
        assert own["agreement"] > lens["agreement"] + 0.03
        assert 0 <= own["error"] <= 1
        assert 0 < own["confidence"] < 1
    assert [lens["agreement"] for lens in measured["lens"]] == [r["agreement"] for r in before]
    for name, tensor in access._head.named_parameters():
        assert torch.equal(tensor, base[name])
        assert tensor.grad is None


@pytest.mark.parametrize("loss", ["hard", "distill"])
def test_heads_of_few_tokens_are_unsure_where_the_target_says_another(model, loss):
    trainer = exits(model, batch=13, steps=300, vocab=12, loss=loss)
    for _ in trainer.train(TEXTS):
        pass
    hidden, last = trainer._both(HELD)
    with torch.no_grad():
        sure = trainer.heads.logits(2, hidden[:, 1]).softmax(-1).amax(-1)
    inside = torch.isin(last.argmax(-1), trainer.heads.tokens)
    assert 0.05 < inside.float().mean() < 0.9
    assert sure[~inside].mean() < sure[inside].mean()


def test_calibration_of_a_known_case(model):
    class Sure:
        layers, tokens = (1,), None

        def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(len(hidden), tiny.VOCAB)
            out[:, 5] = 50.0
            return out

    trainer = exits(model)
    report = trainer.reports(Sure(), HELD)[0]  # type: ignore[arg-type]
    share = float((trainer._both(HELD)[1].argmax(-1) == 5).float().mean())
    assert report["agreement"] == pytest.approx(share, abs=1e-4)
    assert report["confidence"] == 1.0
    assert report["error"] == pytest.approx(1 - share, abs=1e-4)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"loss": "soft"}, "loss must be"), ({"vocab": -1}, "vocab"), ({"batch": 0}, "batch"),
        ({"lr": -1.0}, "lr"),
        ({"vocab": 98}, "at most the model's vocabulary, 97, got 98"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(model, how, what):
    with pytest.raises(SettingError, match=what):
        exits(model, **how)


@pytest.mark.parametrize(
    ("layers", "what"),
    [((3,), "layer 3 is the model's last and needs no head"), ((7,), "target's 3 layers, got 7"),
     ((1, 1), "depths must rise")],
)  # fmt: skip
def test_layers_that_no_head_can_stand_on(model, layers, what):
    with pytest.raises(SettingError, match=what):
        ExitTrainer(torch_rows(model), TrainingSettings("exits", layers), TEXTS)


def test_the_fingerprint_tells_models_apart(model):
    assert fingerprint(model) == fingerprint(tiny.build("llama"))
    assert fingerprint(model) != fingerprint(tiny.build("llama", seed=1))
    assert fingerprint(model) != fingerprint(tiny.build("mistral"))


def test_shapes_of_the_unembedding(access):
    assert access.unembedding.shape == (tiny.VOCAB, WIDTH)
