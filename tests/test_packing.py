"""Packed linear layers compute, count, copy and save as the ones they replace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import forerun
import marks
from forerun.runtime import load_model, packing
from forerun.runtime.drafts import fingerprint
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import PackedLinear, dense, pack, unpacked
from forerun.runtime.padded import facts_of
from marks import slow_but
from sourced import build as build_encoder_decoder
from tiny import CONFIGS, build, texts

pytestmark = pytest.mark.skipif(not packing._able(), reason="this CPU packs nothing")

FAMILIES = [*CONFIGS, "bart", "t5"]


def made(family: str) -> Any:
    return build(family) if family in CONFIGS else build_encoder_decoder(family)


def packed(model: Any) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("family", slow_but(FAMILIES, {*marks.FAMILIES, "t5"}.__contains__))
def test_a_packed_model_says_the_same_of_itself(family: str) -> None:
    model = made(family)
    other = pack(copy.deepcopy(model))
    assert packed(other)
    assert not packed(model)
    assert fingerprint(other) == fingerprint(model)
    assert other.dtype == model.dtype
    if family in CONFIGS:
        assert facts_of(other) == facts_of(model)
    again = unpacked(other)
    assert not packed(again)
    assert unpacked(model) is model
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2"])
def test_it_computes_the_same(family: str, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    other = pack(copy.deepcopy(model))
    for text in texts(1, 2, 5, 40):
        ids = torch.tensor([text])
        with torch.inference_mode():
            expected, got = model(ids).logits, other(ids).logits
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_layers_of_one_input_share_a_product() -> None:
    model = pack(build("qwen2"))  # its q, k and v have biases
    layer = model.model.layers[0]
    q, k, v = (getattr(layer.self_attn, name) for name in packing.SAME_INPUT[0])
    assert q.packed is k.packed is v.packed is not layer.mlp.up_proj.packed
    assert layer.mlp.gate_proj.packed is layer.mlp.up_proj.packed
    one, other = torch.randn(2, 3, 32), torch.randn(1, 32)
    plain = [copy.deepcopy(part) for part in (q, k, v)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 1, 0, 2, 2)):  # whoever is asked, whenever
        for i in order:
            for x in (one, other):
                torch.testing.assert_close((q, k, v)[i](x), plain[i](x))
    x = torch.ones(1, 32)
    q(x), k(x)
    x.mul_(2)  # the same tensor with other contents, before anybody asked v
    torch.testing.assert_close(q(x), plain[0](x))
    assert v(x) is not None
    assert q._product._held is None


def test_no_layer_of_an_encoder_decoder_shares_one() -> None:
    model = pack(build_encoder_decoder("bart"))  # cross-attention asks q of other states
    parts = [part.packed for part in packed(model)]
    assert len({id(part) for part in parts}) == len(parts)


def test_a_head_is_packed_apart_from_the_table_it_is_tied_to() -> None:
    model = build("llama", tie_word_embeddings=True)
    table = model.get_input_embeddings().weight
    other = pack(model)
    assert isinstance(other.lm_head, PackedLinear)
    assert not table.is_mkldnn
    assert torch.equal(LayerAccess(other).unembedding, table)


def test_layers_whose_weights_lie_as_columns_are_packed_too() -> None:
    model = build("gpt2")
    other = pack(copy.deepcopy(model))
    parts = {type(module).__name__ for module in other.modules()}
    assert "Conv1D" not in parts
    layer, plain = other.transformer.h[0].mlp.c_fc, model.transformer.h[0].mlp.c_fc
    assert torch.equal(layer.weight, plain.weight)
    again = copy.deepcopy(layer)
    assert (type(again), again.nx, again.nf) == (type(plain), plain.nx, plain.nf)
    assert again.weight.is_contiguous()


@pytest.mark.parametrize("linear", [nn.Linear(8, 12), Conv1D(12, 8)])
def test_gradients_pass_through(linear: nn.Module) -> None:
    layer = pack(Owner(linear)).layer
    x, y = (torch.ones(2, 8, requires_grad=True) for _ in range(2))
    layer(x).square().sum().backward()
    linear(y).square().sum().backward()
    assert torch.allclose(x.grad, y.grad)


class Owner(nn.Module):
    config = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Quantized(nn.Linear):
    pass


@pytest.mark.parametrize("layer", [Quantized(4, 4), nn.Linear(4, 4).double()])
def test_what_it_does_not_know_stays(layer: nn.Module) -> None:
    assert pack(Owner(layer)).layer is layer


def test_where_it_does_not_pay_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_able", packing._able.__wrapped__)
    monkeypatch.setattr(packing.platform, "machine", lambda: "arm64")
    assert not packed(pack(build("llama")))
    monkeypatch.setattr(packing.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packing, "_OPS", None)  # a build of torch without these operators
    assert not packed(pack(build("llama")))


def test_models_are_packed_where_torch_loads_them() -> None:
    model: Any = forerun.load(runtime="torch", device="cpu")
    for rows in (model.target, model.drafter.rows):
        assert packed(rows.executor.module())
        assert not dense(rows.executor.module().lm_head.weight).is_mkldnn


def test_a_model_that_reads_packed_weights_itself_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.linear(x, self.gate_proj.weight.contiguous()[:])
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    mlp = type(build("llama").model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", forward)
    monkeypatch.setattr(packing, "SAME_INPUT", ())
    monkeypatch.setattr("forerun.runtime.runtimes.load_model", load_model)  # anew
    model: Any = forerun.load(draft="none", runtime="torch", device="cpu")
    assert not packed(model.target.executor.module())
    assert model.generate("Once upon a time", max_new_tokens=2).tokens


def test_a_model_that_is_handed_over_stays() -> None:
    own = build("llama")
    forerun.runtime.torch_rows(own)  # a model of the caller's is left as it is
    assert not packed(own)
