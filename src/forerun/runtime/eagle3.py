"""EAGLE-3 heads as their makers publish them: folders of `speculators`, and the authors' layout."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.cache import write_json
from forerun.errors import ModelError, SettingError
from forerun.runtime.base import Rows
from forerun.runtime.drafts import (
    check_shapes,
    naming_target,
    read_tensors,
    shapes_of,
    widened,
    write_tensors,
)
from forerun.runtime.eagle import EagleHead, HeadForm, Norm, StateHead, rms
from forerun.runtime.head_file import CONFIG, FLAGS, WHOLE
from forerun.runtime.load import read_json
from forerun.runtime.packing import dense
from forerun.runtime.states import States

SPAN, DEPTHS = "prompt_span", "eagle_aux_hidden_state_layer_ids"
LAYERS = ("llama", "qwen3")  # model types of which the layer may be
TURNS = ("default", "linear", "llama3", "yarn")
"""Rotary positions that are the same in contexts of all lengths."""
NAMES = {
    "input_layernorm.weight": "attention_norm.weight",
    "hidden_norm.weight": "state_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "self_attn.o_proj.weight": "out.weight",
    "self_attn.q_norm.weight": "query_norm.weight",
    "self_attn.k_norm.weight": "key_norm.weight",
    "mlp.down_proj.weight": "down.weight",
    "norm.weight": "norm.weight",
    "fc.weight": "fuse.weight",
    "input_norm.weight": "fuse_norm.weight",
    "lm_head.weight": "unembedding.weight",
}
"""Their names of tensors, and ours."""
JOINED = {
    "qkv.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
}
"""Tensors that are one here."""
ASIDE = ("verifier_", "t2d", "rotary_emb.")  # beginnings of tensors that drafting does not need


class Eagle3Head(StateHead):
    """The layer of EAGLE-3: token and state are read side by side, and it adds to the state.

    `x = g + layer([norm(e); norm(g)])`, where g is `W_f · [h_a; h_b; h_c]` of the token before, or
    within a draft the output x of the step before; logits are `U · norm(x)`, of V tokens, `vocab`.
    `flags` are those of `FLAGS` that are set; `table` `(V', D)` the embeddings of the tokens that
    it reads, which are looked up only; `states` how many numbers all depths' states of a token
    have.
    """

    first = 1

    def __init__(
        self, form: HeadForm, flags: Set[str], table: torch.Tensor, vocab: int, states: int
    ) -> None:
        super().__init__(form, 2 * form.width)
        self.flags, self.table, self.reads = flags, table, len(table)
        self.state_norm = Norm(form.width, form.eps)
        self.fuse = nn.Linear(states, form.width, bias=False)
        normed = "norm_before_fc" in flags or "fc_norm" in flags
        self.fuse_norm = Norm(states, form.eps) if normed else None
        self.unembedding = nn.Linear(form.width, vocab, bias=False)

    def fused(self, states: torch.Tensor, depths: int) -> torch.Tensor:
        states = states.float()
        if self.fuse_norm is not None:
            parts = depths if "fc_norm" in self.flags else 1
            normed = rms(states.unflatten(-1, (parts, -1)), self.form.eps).flatten(-2)
            states = normed * self.fuse_norm.weight
        return self.fuse(states)

    def entered(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state; token and state side by side, normed."""
        token = self.attention_norm(F.embedding(ids, self.table).float())
        state = self.state_norm(states)
        x = state if "norm_before_residual" in self.flags else states
        return x, torch.cat([token, state], -1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.unembedding(x if self.form.norm_output else self.norm(x))


def span_of(config: Mapping[str, Any]) -> int:
    """Tokens of a prompt that a head reads, its last ones: what `train-draft` says of one, or as
    many as its layer has places, or all where neither is named."""
    layer = config.get("transformer_layer_config") or config
    named = config.get(SPAN) or layer.get("max_position_embeddings")
    return named if isinstance(named, int) and named > 0 else WHOLE


def depths_of(config: Mapping[str, Any], layers: int) -> list[int]:
    """Depths of the target whose states a head reads; EAGLE-3's own three where it names none."""
    named = config.get(DEPTHS) or (config.get("eagle_config") or {}).get(DEPTHS)
    return list(named) if named else [2, layers // 2, layers - 3]


def load_head(folder: str, target: Rows) -> tuple[States, Eagle3Head, torch.Tensor]:
    """The target's states that the head in a folder of either layout reads; the head, on its
    target's device; and the `(V,)` ids of the tokens it says.
    `ModelError` if it is damaged, another target's, or of a form that is not read, which is named.
    """
    config = read_json(Path(folder, CONFIG).expanduser())
    with naming_target(folder):
        states = target.executor.tap(depths_of(config, target.facts.layers))
    form, flags = _form(folder, config)
    tensors = _tensors(folder)
    vocab = target.vocab_size
    table = tensors.pop("embed_tokens.weight", None)
    if table is None:
        model, own_table = target.executor.module(), target.executor.embeddings
        table = dense(model.get_input_embeddings().weight).detach() if model else own_table()
    shift = tensors.pop("d2t", None)
    own = _renamed(folder, tensors)
    count = vocab if shift is None else len(shift)
    tokens = torch.arange(count) + (0 if shift is None else shift.long().cpu())
    if "unembedding.weight" not in own:
        own["unembedding.weight"] = _said(folder, target, tokens)
    if len(table) < vocab or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise ModelError(
            f"the head in {folder!r} is of another target: it reads {len(table)} tokens and says "
            f"ids up to {int(tokens.max())}, and this one has {vocab}"
        )
    if table.shape[1] != form.width:
        raise _unread(folder, f"embeddings of {table.shape[1]} for a layer of {form.width}")
    form = replace(form, head_norms="query_norm.weight" in own)
    with torch.device("meta"):
        size = states.width * len(states.depths)
        head = Eagle3Head(form, flags, table.to(target.device), count, size)
    check_shapes(folder, own, shapes_of(head.state_dict()))
    head.span = span_of(config)
    return states, head.filled(own).to(target.device), tokens


def save_head(
    folder: str | Path,
    head: Eagle3Head,
    tokens: torch.Tensor,
    depths: Sequence[int],
    trained: Mapping[str, Any],
) -> None:
    """Write a head of Llama's layer as `speculators` does, in bfloat16 and without embeddings, its
    target's own: with the `(V,)` rising ids that it says, the depths that it reads, and how it was
    trained, which is kept beside what others read."""
    own = {name: t.detach().to("cpu", torch.bfloat16) for name, t in head.state_dict().items()}
    named: dict[str, torch.Tensor] = {}
    form, width = head.form, head.form.head_width
    sizes = [form.heads * width, form.key_heads * width, form.key_heads * width]
    parts = {"qkv.weight": sizes, "gate_up.weight": [form.inner] * 2}
    for name, count in parts.items():
        named |= dict(zip(JOINED[name], own.pop(name).split(count), strict=True))
    if "fc_norm" in head.flags:
        by_depth = own.pop("fuse_norm.weight").chunk(len(depths))
        named |= {f"fc_norm.{i}.weight": part for i, part in enumerate(by_depth)}
    named |= {theirs: own[ours] for theirs, ours in NAMES.items() if ours in own}
    outside = ("fc", "norm.", "lm_head", "input_norm")
    named = {n if n.startswith(outside) else f"layers.0.{n}": t for n, t in named.items()}
    if len(tokens) < head.reads:
        named["d2t"] = tokens.cpu().long() - torch.arange(len(tokens))
        named["t2d"] = torch.zeros(head.reads, dtype=torch.bool).index_fill(0, tokens.cpu(), True)
    layer = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu",
        "hidden_size": form.width, "intermediate_size": form.inner, "head_dim": width,
        "num_attention_heads": form.heads, "num_key_value_heads": form.key_heads,
        "rms_norm_eps": form.eps, "vocab_size": head.reads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(tokens), DEPTHS: list(depths),
        **{flag: flag in head.flags for flag in FLAGS}, "transformer_layer_config": layer,
        SPAN: EagleHead.span, "trained": dict(trained),
    }  # fmt: skip
    write_tensors(Path(folder, "model.safetensors"), named)
    write_json(Path(folder, CONFIG), config)


def _form(folder: str, config: Mapping[str, Any]) -> tuple[HeadForm, Set[str]]:
    """Sizes, and those of `FLAGS` that are set, by config.json."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    own = dict(config.get("transformer_layer_config") or config)
    kind = own.pop("model_type", "llama")
    nested = config.get("eagle_config") or {}
    flags = {name for name in FLAGS if config.get(name, nested.get(name))}
    if kind not in LAYERS:
        raise _unread(folder, f"a layer of {kind}; those of {' and '.join(LAYERS)} are")
    try:
        layer = AutoConfig.for_model(kind, **own)
        turns = LlamaRotaryEmbedding(layer)
        heads, key_heads = layer.num_attention_heads, layer.num_key_value_heads
        head_width = layer.head_dim or layer.hidden_size // heads
        form = HeadForm(
            layer.hidden_size, layer.intermediate_size, heads, key_heads, head_width,
            layer.rms_norm_eps, tuple(turns.inv_freq.tolist()), float(turns.attention_scaling),
            norm_output="norm_output" in flags,
        )  # fmt: skip
    except Exception as error:  # whatever a configuration class refuses
        raise ModelError(f"{CONFIG} in {folder!r} cannot be right: {error}") from error
    turn = (layer.rope_parameters or {}).get("rope_type", "default")
    sliding = "sliding_attention" in (getattr(layer, "layer_types", None) or ())
    for wrong, what in (
        (layer.num_hidden_layers != 1, f"{layer.num_hidden_layers} layers; one is"),
        (layer.hidden_act != "silu", f"the activation {layer.hidden_act}; silu is"),
        (turn not in TURNS, f"rotary positions {turn}; {', '.join(TURNS)} are"),
        (2 * len(form.rates) != form.head_width, "rotary positions of a part of a head"),
        (sliding, "a sliding window"),
        (flags >= {"norm_before_fc", "fc_norm"}, "both norm_before_fc and fc_norm"),
    ):
        if wrong:
            raise _unread(folder, what)
    return form, flags


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a folder by the authors' names, the one layer's without its number."""
    files = sorted(Path(folder).expanduser().glob("*.safetensors"))
    if not files:
        pickled = Path(folder, "pytorch_model.bin").is_file()
        hint = (
            "; pytorch_model.bin is a pickle, which can run code and is not read: "
            "safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), "
            "'model.safetensors') makes one"
        )
        raise ModelError(f"{folder!r} holds no .safetensors{hint if pickled else ''}")
    out = widened(read_tensors(folder, files))
    short = {n.removeprefix("midlayer.").removeprefix("layers.0."): t for n, t in out.items()}
    return {n: t for n, t in short.items() if not n.startswith(ASIDE) and "rotary_emb" not in n}


def _renamed(folder: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {NAMES[n]: tensors.pop(n).float() for n in list(tensors) if n in NAMES}
    for name, parts in JOINED.items():
        if all(part in tensors for part in parts):
            out[name] = torch.cat([tensors.pop(part).float() for part in parts])
    norms = [f"fc_norm.{i}.weight" for i in range(len(tensors))]
    if by_depth := [tensors.pop(name).float() for name in norms if name in tensors]:
        out["fuse_norm.weight"] = torch.cat(by_depth)
    if tensors:
        raise _unread(folder, f"the tensor {min(tensors)}")
    return out


def _said(folder: str, target: Rows, tokens: torch.Tensor) -> torch.Tensor:
    """The rows of its target's unembedding by which a head that has none of its own says tokens."""
    if (model := target.executor.module()) is None:
        raise SettingError(
            f"the head in {folder!r} shares its target's unembedding, which the runtime "
            f"{target.facts.executor} does not show; use the runtime torch"
        )
    whole: torch.Tensor = dense(model.get_output_embeddings().weight).detach()
    return whole[tokens.to(whole.device)].float()


def _unread(folder: str, what: str) -> ModelError:
    return ModelError(f"the head in {folder!r} is of a form that is not read here: {what}")
