"""`genai_model.py MODEL FOLDER`: a Hugging Face model as OpenVINO GenAI takes it, a stateful graph.

What `optimum-intel` would write, which wants versions of transformers older than ours.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forerun.runtime.openvino  # noqa: F401 - before openvino: it keeps its telemetry off
from forerun.runtime.cache import cache_argument
from forerun.runtime.load import load_model

import openvino as ov  # isort: skip
import openvino.opset15 as op  # isort: skip
from openvino._offline_transformations import (  # isort: skip
    apply_make_stateful_transformation,
)

ATTENTION = "forerun_stateful"
FIRST = ("input_ids", "attention_mask", "position_ids")


class _Past:
    """The part of a cache of transformers that a traced model needs."""

    def __init__(self, states: Iterable[torch.Tensor]) -> None:
        self.states = list(states)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for at, new in ((2 * layer, keys), (2 * layer + 1, values)):
            self.states[at] = torch.cat([self.states[at], new], 2)
        return self.states[2 * layer], self.states[2 * layer + 1]

    def get_seq_length(self, layer: int = 0) -> int:
        return int(self.states[0].shape[2])


class _Stateful(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: torch.Tensor, seen: torch.Tensor, positions: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        past, width, columns = _Past(states), ids.shape[1], seen.shape[1]
        place = torch.arange(columns)[None]
        visible = (place <= (columns - width + torch.arange(width))[:, None])[None, None]
        visible = visible & seen[:, None, None].bool()
        hidden = torch.zeros(visible.shape)
        mask = hidden.masked_fill(~visible, torch.finfo(torch.float32).min)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        output = self.model(**inputs, **{cache_argument(self.model): past}, use_cache=True)
        return (output.logits, *past.states)


def write(name: str | Path, folder: Path) -> Path:
    """Write a model of one kind of attention for GenAI, without a tokenizer: it is given ids.

    Args:
        name: a folder or a Hugging Face id.
        folder: gets the graph in fp32 and the model's configuration.
    """
    model = load_model(name, "cpu", "fp32")
    graph = _graph(model)
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    for file in Path(name).glob("token*.json") if Path(name).is_dir() else ():
        shutil.copy(file, folder)
    return folder


def _graph(model: Any) -> ov.Model:
    config = model.config
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = 2 * config.num_hidden_layers
    example = (
        torch.ones(2, 4, dtype=torch.long),
        torch.ones(2, 7, dtype=torch.long),
        torch.arange(3, 7)[None].repeat(2, 1),
        *[torch.zeros(2, heads, 3, width) for _ in range(count)],
    )
    with _attention(model), torch.inference_mode():
        traced = torch.jit.trace(_Stateful(model), example, check_trace=False)
        graph = ov.convert_model(traced, example_input=example)
    pasts = [f"past_key_values.{i // 2}.{('key', 'value')[i % 2]}" for i in range(count)]
    presents = [f"present.{i // 2}.{('key', 'value')[i % 2]}" for i in range(count)]
    for port, name in zip(graph.inputs, [*FIRST, *pasts], strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        shape = [-1, heads, -1, width] if name in pasts else [-1, -1]
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    for port, name in zip(graph.outputs, ["logits", *presents], strict=True):
        port.get_tensor().set_names({name})
    _make_stateful(graph, dict(zip(pasts, presents, strict=True)), heads, width)
    return graph


def _make_stateful(graph: ov.Model, states: dict[str, str], heads: int, width: int) -> None:
    """Caches as states that rows can be picked from (`beam_idx`), empty at first."""
    beam = op.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    for name in states:
        node = graph.input(name).get_node()
        users = node.output(0).get_target_inputs()
        picked = op.gather(node, beam, op.constant(np.int64(0)))
        for user in users:
            user.replace_source_output(picked.output(0))
    graph.add_parameters([beam])
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, states)
    ids = graph.input("input_ids").get_node().output(0)
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            rows = op.gather(op.shape_of(ids), _int([0]), op.constant(np.int64(0)))
            shape = op.concat([rows, _int([heads]), _int([0]), _int([width])], 0)
            node.set_arguments([op.broadcast(op.constant(np.float32(0)), shape).output(0)])
    graph.validate_nodes_and_infer_types()


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    """One operation for attention, which GenAI replaces by its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1:
            keys, values = (
                x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (keys, values)
            )
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling
        )
        return out.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _int(values: list[int]) -> ov.Node:
    return op.constant(np.array(values, dtype=np.int64))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
