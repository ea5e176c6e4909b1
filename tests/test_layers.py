"""Models run layer by layer equal the models' own forward (fp32, within 1e-5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from forerun.errors import UnsupportedModelError
from forerun.runtime import Rows, torch_rows
from forerun.runtime.cache import cache_argument
from forerun.runtime.exits import LayersExecutor, layers_of
from forerun.runtime.heads import ExitHeads
from forerun.runtime.layers import LayerAccess, Placed
from tiny import CONFIGS, build, texts

TOLERANCE = 1e-5

pytestmark = pytest.mark.transformers_versions


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def causal(width: int, columns: int) -> torch.Tensor:
    hidden = torch.full((width, columns), torch.finfo(torch.float32).min)
    return hidden.triu(columns - width + 1)[None, None]


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_layers_equal_the_model(family: str) -> None:
    model = build(family)
    access, ids = LayerAccess(model), torch.tensor(texts(11, 11, seed=3)).view(2, 11)
    positions = torch.arange(11).expand(2, 11)
    wanted = model(ids, output_hidden_states=True)
    hidden = access.embed(ids, positions)
    mask = causal(11, 11)
    for layer in range(access.layers):
        close(hidden, wanted.hidden_states[layer])
        assert hidden.shape == (2, 11, access.width)
        hidden = access.run(hidden, layer, layer + 1, Placed(mask, positions))
    close(access.logits(hidden), wanted.logits)
    whole = access.run(access.embed(ids, positions), 0, access.layers, Placed(mask, positions))
    close(whole, hidden)
    assert access.run(hidden, 2, 2, Placed(mask, positions)) is hidden


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_layers_read_and_write_a_cache(family: str) -> None:
    model = build(family)
    access, ids = LayerAccess(model), torch.tensor([texts(12)[0]])
    cache, own = hf.DynamicCache(config=model.config), hf.DynamicCache(config=model.config)
    wanted = model(ids, **{cache_argument(model): own}, use_cache=True).logits
    got = []
    for begin, end in ((0, 7), (7, 8), (8, 12)):
        positions = torch.arange(begin, end).unsqueeze(0)
        hidden = access.embed(ids[:, begin:end], positions)
        at = Placed(causal(end - begin, end), positions, cache)
        hidden = access.run(hidden, 0, 1, at)
        got.append(access.run(hidden, 1, access.layers, at))
    close(access.logits(torch.cat(got, 1)), wanted)
    for mine, theirs in zip(cache.layers, own.layers, strict=True):
        close(mine.keys, theirs.keys)
        close(mine.values, theirs.values)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_exit_model_with_nothing_pending_is_a_row_model(family: str) -> None:
    model, prompts = build(family), texts(5, 1, 9)
    ours, plain = Rows(LayersExecutor(model)), torch_rows(model)
    for rows in (ours, plain):
        rows.read(prompts)
    for wanted in ([1, 1, 1], [2, 1, 0]):
        pieces = [p[n:] or [4, 5] for p, n in zip(prompts, plain.lengths, strict=True)]
        assert torch.equal(ours.feed(pieces, wanted), plain.feed(pieces, wanted))
    assert ours.lengths == plain.lengths
    executor = layers_of(ours)
    assert executor.work.passes("draft", "verify") == executor.access.layers * (3 + 3)
    assert executor.work.passes("project") == 3 + 3


def test_the_logit_lens_is_the_models_own_norm_and_unembedding() -> None:
    model = build("llama")
    access = LayerAccess(model)
    lens, hidden = ExitHeads(access), torch.randn(4, access.width)
    assert lens.layers == (1, 2)
    close(lens.logits(1, hidden), model.lm_head(model.model.norm(hidden)))


def test_families_are_proven_not_listed() -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
    olmo = hf.AutoModelForCausalLM.from_config(hf.OlmoConfig(intermediate_size=48, **sizes)).eval()
    assert LayerAccess(olmo).layers == 2
    opt = hf.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, **sizes)
    with pytest.raises(UnsupportedModelError, match="opt model cannot be called one by one"):
        LayersExecutor(hf.AutoModelForCausalLM.from_config(opt).eval())


def test_a_model_that_calls_its_layers_otherwise_is_refused() -> None:
    model = build("llama")

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.1
            return out

    model.__class__ = Scaled
    with pytest.raises(UnsupportedModelError, match="llama model, called one by one, differ from"):
        LayerAccess(model)
    broken = build("llama")
    broken.model.layers[1].forward = lambda hidden: hidden
    with pytest.raises(UnsupportedModelError, match=r"cannot be called one by one: .*unexpected"):
        LayerAccess(broken)
    del broken.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match=r"cannot be called one by one: .*rotary_emb"):
        LayerAccess(broken)


@pytest.mark.parametrize("family", ["mistral-windowed", "qwen2-windowed"])
def test_layers_with_sliding_windows_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="see a sliding window"):
        LayersExecutor(build(family))
