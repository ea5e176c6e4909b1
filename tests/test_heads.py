"""Exit heads: what they say, how they are kept, and that training makes them better."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import tiny
from forerun.errors import ModelError, SettingError
from forerun.runtime.heads import (
    CONFIG,
    KINDS,
    WEIGHTS,
    FullHeads,
    LightHeads,
    TrainedHeads,
    default_layers,
    load_heads,
    save_heads,
)
from forerun.runtime.layers import LayerAccess, LogitLens
from forerun.training import features as caching
from forerun.training.exit_heads import Settings, evaluate, new_heads, train
from forerun.training.features import cache_bytes, collect, fingerprint

WIDTH = 32


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama")


@pytest.fixture(scope="module")
def access(model):
    return LayerAccess(model)


def documents(count=40, seed=1, length=24):
    return [(ids, 3) for ids in tiny.texts(*[length] * count, seed=seed)]


@pytest.fixture(scope="module")
def features(access, tmp_path_factory):
    return collect(access, documents(480), [1, 2], tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def held(access, tmp_path_factory):
    return collect(access, documents(30, seed=2), [1, 2], tmp_path_factory.mktemp("held"))


def some_heads(access, kind, rank=0, dtype=torch.float32, tokens=None) -> TrainedHeads:
    vocab_size = tiny.VOCAB if tokens is None else len(tokens)

    def noise(*shape):
        return (torch.randn(*shape) * 0.1).to(dtype)

    weights = {}
    for layer in (1, 2):
        if kind == "full":
            weights[layer] = {"weight": noise(vocab_size, WIDTH), "bias": noise(vocab_size)}
        elif rank:
            weights[layer] = {"down": noise(rank, WIDTH), "up": noise(WIDTH, rank)}
        else:
            weights[layer] = {"weight": noise(WIDTH, WIDTH)}
        if kind == "light":
            weights[layer] |= {"bias": noise(WIDTH), "scale": 1 + noise(1)}
    return KINDS[kind](access, weights, {"target": "tiny", "training": {"epochs": 3}}, tokens)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_features_are_the_models_own_hidden_states(family, tmp_path):
    model = tiny.build(family, num_hidden_layers=4, n_layer=4)
    access = LayerAccess(model)
    ids = tiny.texts(20)[0]
    collected = collect(access, [(ids, 2)], [1, 3], tmp_path)
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    assert collected.count == 17
    for layer in (1, 3):
        wanted = output.hidden_states[layer][0, 2:-1]
        assert torch.allclose(collected.hidden[layer].float(), wanted, rtol=1e-2, atol=1e-3)
    assert collected.top.tolist() == output.logits[0, 2:-1].argmax(-1).tolist()
    with torch.inference_mode():
        last = LogitLens(access).logits(4, collected.last.float())
    assert torch.allclose(last, output.logits[0, 2:-1], rtol=0.05, atol=0.1)


def test_the_lens_after_the_last_layer_is_the_model(access, model):
    ids = torch.tensor(tiny.texts(9))
    positions = torch.arange(9)[None]
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.inference_mode():
        hidden = access.run(access.embed(ids, positions), 0, access.layers, mask, positions)
        got, wanted = LogitLens(access).logits(access.layers, hidden), model(ids).logits
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "rank"), [("light", 0), ("light", 4), ("full", 0)])
@pytest.mark.parametrize("tokens", [None, torch.tensor([0, 3, 50, 96])], ids=["all", "some"])
def test_saved_and_loaded_bit_for_bit(access, tmp_path, kind, rank, dtype, tokens):
    heads = some_heads(access, kind, rank, dtype, tokens)
    save_heads(heads, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {WEIGHTS, CONFIG}
    again = load_heads(tmp_path / "new", access)
    assert (again.kind, again.layers, again.about) == (kind, (1, 2), heads.about)
    for layer, own in heads.weights.items():
        assert own.keys() == again.weights[layer].keys()
        assert all(torch.equal(own[name], again.weights[layer][name]) for name in own)
        assert all(own[name].dtype == again.weights[layer][name].dtype for name in own)
    hidden = torch.randn(2, 3, WIDTH)
    with torch.inference_mode():
        logits = heads.logits(2, hidden)
        assert logits.shape == (2, 3, tiny.VOCAB if tokens is None else 4)
        assert logits.dtype == torch.float32
        again = load_heads(tmp_path / "new" / WEIGHTS, access)
        assert torch.equal(logits, again.logits(2, hidden))
        assert (tokens is None) == (again.tokens is None)
        assert tokens is None or torch.equal(tokens, again.tokens)


def test_heads_run_in_the_models_dtype(access, tmp_path):
    save_heads(some_heads(access, "light"), tmp_path)
    half = LayerAccess(tiny.build("llama").to(torch.bfloat16))
    with torch.inference_mode():
        for heads in (load_heads(tmp_path, half), some_heads(half, "full")):
            assert heads.logits(1, torch.randn(4, WIDTH).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 64}, "hidden size is 32, this model's is 64"),
        ({"vocab_size": 101}, "vocabulary is 97, this model's is 101"),
        ({"num_hidden_layers": 4}, "number of layers is 3, this model's is 4"),
    ],
)
def test_another_model_is_refused(access, tmp_path, changes, what):
    save_heads(some_heads(access, "light"), tmp_path)
    other = LayerAccess(tiny.build("llama", **changes))
    with pytest.raises(ModelError, match=what) as error:
        load_heads(tmp_path, other)
    assert "forerun train-exits" in str(error.value)
    assert "(tiny)" in str(error.value)


def test_damaged_files_are_refused(access, tmp_path):
    with pytest.raises(ModelError, match=r"exits\.json is missing"):
        load_heads(tmp_path, access)
    good, bad = save_heads(some_heads(access, "light", 4), tmp_path / "good"), tmp_path / "bad"

    def damaged(name, content):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        (bad / name).write_bytes(content)
        return bad

    config = json.loads((good / CONFIG).read_text())
    with pytest.raises(ModelError, match="damaged"):
        load_heads(damaged(WEIGHTS, b"no tensors"), access)
    with pytest.raises(ModelError, match="damaged"):
        load_heads(damaged(CONFIG, b"{"), access)
    for change, what in (
        ({"kind": "magic"}, "'light' or 'full', got 'magic'"),
        ({"kind": "full"}, "the head after layer 1 has tensors"),
        ({"layers": [1]}, r"heads after \[1, 2\]"),
    ):
        with pytest.raises(ModelError, match=what):
            load_heads(damaged(CONFIG, json.dumps({**config, **change}).encode()), access)
    few = some_heads(access, "light", tokens=torch.tensor([1, 5, 7]))
    good = save_heads(few, tmp_path / "few")
    config = json.loads((good / CONFIG).read_text())
    for change in ({"tokens": 4}, {"tokens": None}):
        with pytest.raises(ModelError, match="'tokens' should be"):
            load_heads(damaged(CONFIG, json.dumps({**config, **change}).encode()), access)


def test_wrong_layers_are_refused(access):
    heads = some_heads(access, "light")
    with pytest.raises(SettingError, match="no exit head after layer 3; there are heads after 1"):
        heads.logits(3, torch.zeros(1, WIDTH))
    own = heads.weights[1]
    for weights, what in (({}, "no exit layers"), ({4: own}, "layer 4 does not exist"),
                          ({0: own}, "layer 0 does not exist")):  # fmt: skip
        with pytest.raises(SettingError, match=what):
            LightHeads(access, weights)
    assert default_layers(3) == (1, 2)


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(rank=4), Settings(head="full"), Settings(vocab=9),
     Settings(head="full", vocab=9)],
)  # fmt: skip
def test_training_begins_at_the_logit_lens(access, features, settings):
    heads = new_heads(access, features, settings)
    hidden = features.hidden[2][:50].float()
    with torch.no_grad():
        lens, own = access.logits(hidden), heads.logits(2, hidden)
    if settings.vocab:
        counts = torch.bincount(features.top.long(), minlength=tiny.VOCAB)
        assert counts[heads.tokens].sum() == counts.sort(descending=True).values[:9].sum()
        lens = lens[:, heads.tokens]
    assert torch.allclose(lens, own, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(batch=256, epochs=6),
        Settings(batch=256, epochs=6, loss="distill"),
        Settings(batch=256, epochs=6, rank=16),
        Settings(batch=256, epochs=6, head="full"),
        Settings(batch=256, epochs=6, vocab=60),
        Settings(batch=256, epochs=6, vocab=60, loss="distill"),
    ],
    ids=lambda s: f"{s.head}-{s.loss}-{s.rank}-{s.vocab}",
)
def test_training_beats_the_lens_on_held_out_text(access, features, held, settings):
    before = evaluate(access, LogitLens(access), held, [1, 2])
    base = {name: tensor.clone() for name, tensor in access._head.named_parameters()}
    heads = train(access, features, settings)
    assert isinstance(heads, FullHeads if settings.head == "full" else LightHeads)
    after = evaluate(access, heads, held, [1, 2])
    for lens, own in zip(before, after, strict=True):
        assert own.agreement > lens.agreement + 0.03
        assert 0 <= own.error <= 1
        assert 0 < own.confidence < 1
    for name, tensor in access._head.named_parameters():
        assert torch.equal(tensor, base[name])
        assert tensor.grad is None


@pytest.mark.parametrize("loss", ["hard", "distill"])
def test_heads_of_few_tokens_are_unsure_where_the_target_says_another(access, features, held, loss):
    heads = train(access, features, Settings(batch=256, epochs=12, vocab=12, loss=loss))
    with torch.no_grad():
        sure = heads.logits(2, held.hidden[2].float()).softmax(-1).amax(-1)
    inside = torch.isin(held.top.long(), heads.tokens)
    assert 0.1 < inside.float().mean() < 0.9
    assert sure[~inside].mean() < sure[inside].mean()


def test_calibration_of_a_known_case(access, held):
    class Sure:
        layers, tokens = (1,), None

        def logits(self, layer, hidden):
            out = torch.zeros(len(hidden), tiny.VOCAB)
            out[:, 5] = 50.0
            return out

    [report] = evaluate(access, Sure(), held, [1])
    share = float((held.top == 5).float().mean())
    assert report.agreement == pytest.approx(share, abs=1e-4)
    assert report.confidence == 1.0
    assert report.error == pytest.approx(1 - share, abs=1e-4)


def test_interrupted_training_goes_on_to_the_same_heads(access, features, tmp_path):
    settings, path = Settings(batch=512, epochs=2), tmp_path / "training.pt"
    whole = train(access, features, settings)
    with pytest.raises(KeyboardInterrupt):
        train(access, features, settings, checkpoint=path, stop_after=9)
    assert path.is_file()
    shares = []
    parts = train(
        access, features, settings, checkpoint=path, tell=lambda share, _: shares.append(share)
    )
    assert not path.exists()
    assert len(shares) == 29  # of 38: 480 documents of 20 positions in batches of 512, twice
    assert shares[-1] == 1
    for layer, own in whole.weights.items():
        assert all(torch.equal(own[name], parts.weights[layer][name]) for name in own)


def test_a_checkpoint_of_something_else_is_ignored(access, features, tmp_path):
    path = tmp_path / "training.pt"
    with pytest.raises(KeyboardInterrupt):
        train(access, features, Settings(batch=512), checkpoint=path, stop_after=2)
    shares = []
    short = Settings(batch=2048, epochs=1)
    train(access, features, short, checkpoint=path, tell=lambda share, _: shares.append(share))
    assert shares == [0.2, 0.4, 0.6, 0.8, 1]
    path.write_bytes(b"damaged")
    train(access, features, short, checkpoint=path)


def test_minutes_end_a_training(access, features):
    shares = []
    settings = Settings(epochs=100_000, minutes=0.003)
    train(access, features, settings, tell=lambda share, _: shares.append(share))
    assert 1 <= len(shares) < 500
    assert shares[-1] == 1


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_cache_goes_on_where_it_stopped(access, tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "SHARD", 100)
    texts = [(ids, 1) for ids in tiny.texts(*[20, 31, 9, 2, 40, 12] * 4)]
    whole = collect(access, texts, [1, 2], tmp_path / "whole", identity="m")
    parts = tmp_path / "parts"
    done: list[int] = []
    first = collect(access, texts, [1, 2], parts, identity="m", tell=done.append, stop_after=2)
    assert done == [first.count] or len(done) == 2
    assert first.count < whole.count
    # What an interrupted shard left behind its end does not count.
    with (parts / "layer-01.bin").open("ab") as file:
        file.write(b"half a shard")
    calls: list[int] = []
    again = collect(access, texts, [1, 2], parts, identity="m", tell=calls.append)
    assert calls[0] > first.count
    assert calls[-1] == again.count == whole.count
    assert read(parts) == read(tmp_path / "whole")
    size = sum(len(data) for name, data in read(parts).items() if name.endswith(".bin"))
    assert size == cache_bytes(whole.count, 2, WIDTH)


def test_a_finished_cache_is_reused_only_for_the_same(access, tmp_path, monkeypatch):
    texts = documents(6)
    collect(access, texts, [1], tmp_path, identity="m")
    ran: list[int] = []
    forward = caching._forward
    monkeypatch.setattr(caching, "_forward", lambda *given: ran.append(1) or forward(*given))
    collect(access, texts, [1], tmp_path, identity="m")
    assert not ran
    for change in ({"identity": "other"}, {"layers": [2]}, {"documents": documents(6, seed=3)}):
        ran.clear()
        given = {"documents": texts, "layers": [1], "identity": "m", **change}
        collect(access, folder=tmp_path, **given)
        assert ran, change
    collect(access, texts, [1], tmp_path, identity="m")
    # A cache that was being replaced when the run was interrupted is neither of the two.
    with monkeypatch.context() as patch:
        patch.setattr(caching, "_write", None)
        with pytest.raises(TypeError):
            collect(access, texts, [2], tmp_path, identity="m")
    ran.clear()
    collect(access, texts, [1], tmp_path, identity="m")
    assert ran
    (tmp_path / "last.bin").unlink()
    ran.clear()
    collect(access, **{"documents": texts, "layers": [1], "folder": tmp_path, "identity": "m"})
    assert ran


def test_caches_that_cannot_be_are_refused(access, tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="too short"):
        collect(access, [([5], 0)], [1], tmp_path)
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(SettingError, match=r"0\.0 GB free; use fewer `tokens`"):
        collect(access, documents(2), [1], tmp_path)


def test_the_fingerprint_tells_models_apart(model):
    assert fingerprint(model) == fingerprint(tiny.build("llama"))
    assert fingerprint(model) != fingerprint(tiny.build("llama", seed=1))
    assert fingerprint(model) != fingerprint(tiny.build("mistral"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"head": "heavy"}, {"loss": "soft"}, {"rank": -1}, {"vocab": -1}, {"epochs": 0},
        {"batch": 8}, {"minutes": 0}, {"rate": -1.0}, {"head": "full", "rank": 4},
        {"minutes": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(wrong):
    with pytest.raises(SettingError, match=list(wrong)[-1]):
        Settings(**wrong)


def test_a_rank_above_the_width_is_refused(access, features):
    with pytest.raises(SettingError, match="at most the model's vocabulary, 97, got 98"):
        new_heads(access, features, Settings(vocab=98))
    with pytest.raises(SettingError, match="at most the hidden size, 32, got 33"):
        new_heads(access, features, Settings(rank=33))


def test_shapes_of_the_unembedding(access):
    assert access.unembedding.shape == (tiny.VOCAB, WIDTH)
