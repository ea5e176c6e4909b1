"""Layers that a checkpoint brings for multi-token prediction: transformers' numbers, exact text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from forerun.drafters import DRAFTERS
from forerun.drafters.eagle import EagleDrafter
from forerun.drafters.mtp import MTP
from forerun.errors import ModelError, SettingError, UnsupportedModelError
from forerun.model import Model
from forerun.runtime import Rows, torch_rows
from forerun.testing import ScriptedModel
from tiny import VOCAB, build, texts

modeling_layers = pytest.importorskip("transformers.modeling_layers")
MtpModel = getattr(modeling_layers, "MtpModel", None)
pytestmark = pytest.mark.skipif(MtpModel is None, reason="this transformers has no MtpModel")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def deepseek(**changes: Any) -> Any:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
             "v_head_dim": 8, "num_nextn_predict_layers": 1}  # fmt: skip
    return hf.DeepseekV3Config(**{**SIZES, **EXPERTS, **sizes, **changes})


def qwen(**changes: Any) -> Any:
    """Like Qwen3.5's; its other layers keep a state that cannot be rolled back."""
    kinds = ["full_attention"] * 3
    more = {"head_dim": 16, "layer_types": kinds, "mtp_num_hidden_layers": 1}
    return hf.Qwen3_5TextConfig(**{**SIZES, **more, **changes})


FAMILIES = {"deepseek_v3": deepseek, "qwen3_5": qwen}
QWENS = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "post_norm.weight": "mtp.norm.weight",
}
"""Names of tensors in Qwen's checkpoints."""
DEEPSEEKS = {"post_norm.": "shared_head.norm."}


def saved(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A random model, loaded from a checkpoint that brings a layer, of which names and layout are
    the family's own."""
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family]())
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.0 if weight.dim() > 1 else 1.0, std=0.3)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
    layer = {n.removeprefix("model.layers.2."): t.flip(0).clone() for n, t in last.items()}
    extra = {name: 1 + 0.3 * torch.randn(32) for name in ("enorm.weight", "hnorm.weight")}
    extra |= {"eh_proj.weight": 0.3 * torch.randn(32, 64), "post_norm.weight": torch.randn(32)}
    if family == "qwen3_5":
        tensors |= {f"mtp.layers.0.{name}": t for name, t in layer.items()}
        tensors |= {QWENS[name]: t for name, t in extra.items()}
    else:
        # Released checkpoints have 61 layers, by which transformers knows theirs.
        ignored = [r"model\.layers\.3.*"]
        monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", ignored)
        own = {n.replace("post_norm.", "shared_head.norm."): t for n, t in extra.items()}
        tensors |= {f"model.layers.3.{name}": t for name, t in {**layer, **own}.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return saved(tmp_path, request.param, monkeypatch)


def test_logits_are_those_of_transformers(model: Any) -> None:
    """Behind a text that the target has read, and one token further by the layer's own output."""
    from transformers.cache_utils import MtpCache

    rows, contexts = torch_rows(model), texts(9, 4)
    drafter = MTP().build(rows, None)
    assert isinstance(drafter, EagleDrafter)
    rows.read(contexts, 30)
    drafter.join(contexts, 30)
    first = drafter.step(contexts, None)
    second = drafter.step([[*context, 7] for context in contexts], None)
    assert first.logits is not None
    assert second.logits is not None
    for row, context in enumerate(contexts):
        with torch.inference_mode():
            own = MtpModel.from_pretrained(model).eval()
            cache = MtpCache(config=model.config.get_mtp_config())
            read = model(torch.tensor([context[:-1]]), output_hidden_states=True)
            places = torch.arange(1, len(context) + 1)[None]
            x = own.forward_layer(0, read.hidden_states[-1], places[:, :-1], cache,
                                  input_ids=torch.tensor([context[1:]]))  # fmt: skip
            wanted = own._project_to_logits(x)[0, -1]
            torch.testing.assert_close(first.logits[row], wanted, atol=1e-4, rtol=1e-4)
            x = own.forward_layer(0, x[:, -1:], places[:, -1:], cache,
                                  input_ids=torch.tensor([[7]]))  # fmt: skip
            wanted = own._project_to_logits(x)[0, -1]
            torch.testing.assert_close(second.logits[row], wanted, atol=1e-4, rtol=1e-4)


def test_greedy_text_is_plain(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in parts, too, which the layer reads whole."""
    monkeypatch.setattr("forerun.engine.loop.CHUNK", 6)
    prompts = texts(5, 1, 9)
    rows = torch_rows(model)
    how: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    plain = Model(rows, DRAFTERS.make("none").build(None, None)).generate(prompts, **how)
    fast = Model(rows, MTP().build(rows, None))
    for controller in ("fixed(3)", "auto", "svip"):
        done = fast.generate(prompts, controller=controller, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
        if controller == "fixed(3)":
            assert sum(c.stats.drafted for c in done) > 60


def test_targets_without_such_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"this llama model names none \(num_mtp_layers\)"):
        MTP().build(torch_rows(build("llama")), None)
    with pytest.raises(SettingError, match="mtp runs on torch"):
        MTP().build(Rows(ScriptedModel(torch.eye(4))), None)
    made = hf.AutoModelForCausalLM.from_config(qwen())
    with pytest.raises(ModelError, match="cannot load the layers for mtp"):
        MTP().build(torch_rows(made), None)
    made.config.mtp_layer_types = ["sliding_attention"]
    with pytest.raises(UnsupportedModelError, match="is of sliding_attention, which is not served"):
        MTP().build(torch_rows(made), None)
