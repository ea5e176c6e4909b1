"""A Hugging Face causal language model as an OpenVINO graph, attention left open.

The torch module is traced once, without a cache and without a mask. Its attention goes through the
attention interface of `transformers`, which points at a marker here, and every marker becomes a
*placeholder* of standard operations: such a graph can be saved and read back, which a graph with
paged-attention nodes cannot. `nodes.attach` puts those in before the graph is compiled.

Every token is a row of its own, `(tokens, 1)`: what would be transposes of heads and tokens are
reshapes then.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import openvino as ov
import openvino.opset15 as op
import torch
from openvino.frontend.pytorch import ConversionExtension
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers.modeling_outputs import BaseModelOutput

from forerun.errors import UnsupportedModelError
from forerun.runtime.encoder_decoder import Table, banned
from forerun.runtime.openvino.core import integers, reason
from forerun.runtime.openvino.placeholders import INPUTS, Attention, name, placeholder
from forerun.runtime.support import decoder_limit

HALF = torch.bfloat16, torch.float16
_NAME = "forerun_paged"
_EXAMPLE_TOKENS = 7


def _paged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, number: int
) -> torch.Tensor:
    return query.new_zeros(query.shape[0], 1, query.shape[1], value.shape[3])


# Not by `custom_op`, whose first call imports a compiler: 2 s and 0.1 GB.
_LIBRARY = torch.library.Library("forerun", "DEF")
_LIBRARY.define("paged(Tensor query, Tensor key, Tensor value, int number) -> Tensor")
_LIBRARY.impl("paged", _paged, "CompositeExplicitAutograd")


class Widened(TorchFunctionMode):
    """Has a model whose weights are in 16 bits compute in float32, exactly as one that was widened
    would: a weight is widened where it is read, a table of embeddings row by row."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if called in ("__get__", "numel"):  # of a property
            value = function(*args)
            return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value
        if called in ("embedding", "__getitem__"):
            return _wide(function(*args, **kwargs))
        return function(*tree_map(_wide, args), **tree_map(_wide, kwargs))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


class _Flat(torch.nn.Module):
    """The model over `(tokens, 1)` ids, its head over wanted tokens only. Of one with an encoder it
    is the decoder, and what that attends to there falls out of the graph."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.table, self.ruled_out = model, None, None
        self.wanted: torch.Tensor | None = None
        head = model.get_output_embeddings()
        if model.config.is_encoder_decoder:
            decoder = model.get_decoder()
            if not hasattr(decoder, "embed_positions"):
                raise UnsupportedModelError(
                    f"{model.config.model_type} adds a bias by distance, the paged node none"
                )
            self.table = Table(decoder, decoder_limit(model.config))
            if ids := banned(model, int(head.weight.shape[0])):
                self.ruled_out = torch.tensor(ids)
        self.hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][self.wanted],))

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        self.wanted = wanted
        if self.table is None:
            with Widened():
                output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
                return output.logits[:, 0].float()
        unread = torch.zeros(len(input_ids), 1, self.model.config.d_model)
        with Widened(), self.table.looked_up(position_ids):
            logits = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=unread),
                decoder_input_ids=input_ids,
                use_cache=False,
            ).logits[:, 0]
        if self.ruled_out is not None:
            logits = logits.index_fill(-1, self.ruled_out, -torch.inf)
        return logits.float()


def export(model: Any) -> ov.Model:
    """Turn a model into a graph of inputs `INPUTS` and output `logits`, with placeholders where its
    attention is; `attentions` reads what these stand for.

    Args:
        model: a Hugging Face model on the CPU in fp32, or in 16 bits that are widened where they
            are read. Of one with an encoder the graph is the decoder; where it attends to the
            source, keys and values are left open. The graph reads the model's memory, and may
            not outlive it.

    Raises:
        UnsupportedModelError: its attention is of a kind the node does not have, does not go
            through the interface, or an operation has no conversion; one line says which.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{kind} does not use the attention interface of transformers")
    flat = _Flat(model)
    places, calls = torch.arange(_EXAMPLE_TOKENS), list[Attention]()
    example = places[:, None], places[:, None], places[:-1]
    marked = ConversionExtension("forerun::paged", _placeholder(calls))
    try:
        with _attention_marked(model, calls), torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tracing: what is constant here is meant to be
            traced = torch.jit.trace(flat, example, check_trace=False)
            graph = ov.convert_model(traced, example_input=example, extension=[marked])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{kind}: {error}") from error
    except Exception as error:  # tracing and conversion raise whatever they like
        raise UnsupportedModelError(f"{kind} cannot be exported: {reason(error)}") from error
    finally:
        flat.hook.remove()
    if not calls:
        raise UnsupportedModelError(f"{kind} does not use the attention interface of transformers")
    name(graph, INPUTS, "logits", calls)
    return graph


def in_fp32(model: Any) -> Any:
    """The model itself if it is in fp32 on the CPU, else such a copy."""
    if model.dtype == torch.float32 and model.device.type == "cpu":
        return model
    return copy.deepcopy(model).to("cpu").float()


@contextmanager
def halved(model: Any) -> Iterator[Any]:
    """Hold weights in float32 that are bfloat16 numbers, as most checkpoints' are, in 16 bits until
    the end of the block. Yields what owns the memory that graphs read which are made of the model
    meanwhile."""
    wide = [
        (weight, weight.data)
        for weight in model.parameters()
        if weight.dtype == torch.float32
        and weight.dim() > 1
        and not (weight.detach().view(torch.int32) & 0xFFFF).any()
    ]
    for weight, data in wide:
        weight.data = data.bfloat16()
    try:
        yield model, [weight.data for weight, _ in wide]
    finally:
        for weight, data in wide:
            weight.data = data


@contextmanager
def _attention_marked(model: Any, calls: list[Attention]) -> Iterator[None]:
    """Point the model's attention and experts at forms that can be traced, and note the calls."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, _marker(model, calls))
    # Taken before anything is traced, each is a constant.
    experts = {id(w): w.detach().unbind() for w in model.parameters() if w.dim() == 3}
    ALL_EXPERTS_FUNCTIONS.register(_NAME, partial(_experts, experts))
    before = model.config._attn_implementation, model.get_experts_implementation()
    model.set_attn_implementation(_NAME)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before[0])
        if model._can_set_experts_implementation():
            model.set_experts_implementation(before[1])


def _marker(model: Any, calls: list[Attention]) -> Callable[..., tuple[torch.Tensor, None]]:
    def mark(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if options.get("softcap") is not None:
            raise UnsupportedModelError("attention with a soft cap has no paged node")
        if options.get("s_aux") is not None:
            raise UnsupportedModelError("attention with sinks is not served")
        to_source = model.config.is_encoder_decoder and not module.is_causal
        if to_source:
            key = value = query  # of the right shape; the node is given the source's
        elif not getattr(module, "is_causal", True):
            raise UnsupportedModelError("attention that is not causal has no paged node")
        call = Attention(
            query_heads=int(query.shape[1]),
            key_heads=int(key.shape[1]),
            key_size=int(key.shape[3]),
            value_size=int(value.shape[3]),
            scale=float(query.shape[3]) ** -0.5 if scaling is None else float(scaling),
            window=int(options.get("sliding_window") or 0),
            source=to_source,
        )
        calls.append(call)
        return torch.ops.forerun.paged(query, key, value, len(calls) - 1), None

    return mark


def _experts(
    matrices: Mapping[int, Sequence[torch.Tensor]],
    module: Any,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Mixture of experts, each over the tokens routed to it; those without any cost nothing."""
    out = torch.zeros_like(hidden)
    up = module.gate_up_proj if module.has_gate else module.up_proj

    def linear(x: torch.Tensor, weight: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        matrix = matrices[id(weight)][expert]
        matrix = matrix.T if module.is_transposed else matrix
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return torch.nn.functional.linear(x, matrix, bias)

    for expert in range(module.num_experts):
        routed = top_k_index == expert
        tokens = routed.any(-1).nonzero()[:, 0]
        x = linear(hidden[tokens], up, "gate_up_proj" if module.has_gate else "up_proj", expert)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = linear(x, module.down_proj, "down_proj", expert)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        share = (top_k_weights * routed).sum(-1)[tokens]
        out = out.index_add(0, tokens, x * share[:, None])
    return out


def _placeholder(calls: list[Attention]) -> Callable[[Any], list[ov.Output]]:
    """What stands for a call of the marked attention."""

    def convert(context: Any) -> list[ov.Output]:
        number = int(context.get_values_from_const_input(3))
        call = calls[number]
        states = [_before_transpose(context.get_input(i)) for i in range(3)]
        out = placeholder(call, number, states)
        shape = integers([-1, 1, call.query_heads, call.value_size])
        return [op.reshape(out, shape, False).output(0)]

    return convert


def _before_transpose(port: ov.Output) -> ov.Output:
    """What came before heads and tokens were swapped: with one token, a swap only reshapes."""
    node = port.get_node()
    if node.get_type_name() == "Transpose":
        order = node.input_value(1).get_node()
        if order.get_type_name() == "Constant" and order.data.tolist() == [0, 2, 1, 3]:
            return node.input_value(0)
    return port
