"""Placeholders: what stands where attention is in a graph that can be saved and read back; and the
inputs and output of such a graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import openvino as ov
import openvino.opset15 as op

from forerun.runtime.openvino.core import integers

INPUTS = ("input_ids", "position_ids", "wanted")
"""Of the exported graph: `(tokens, 1)` ids and positions, `(wanted,)` places of tokens whose logits
are wanted. Its output is `(wanted, V)`."""
PLACEHOLDER = "attention."
"""Friendly names of placeholders begin with this and end in the number of the call."""
RT_INFO = "forerun"


@dataclass(frozen=True)
class Attention:
    """One call of attention, in the order the model makes them."""

    query_heads: int
    key_heads: int
    key_size: int  # width of a query's or key's head
    value_size: int
    scale: float  # what products of queries and keys are multiplied by
    window: int  # tokens a query sees, itself among them; 0: all before it
    source: bool = False  # whether it is to the row's source, whose keys and values are given


def name(graph: ov.Model, inputs: Sequence[str], output: str, calls: list[Attention]) -> None:
    """Name inputs and output, and keep what the placeholders stand for."""
    for port, name in zip(graph.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
    graph.outputs[0].get_tensor().set_names({output})
    graph.set_rt_info(json.dumps([asdict(call) for call in calls]), [RT_INFO, "attentions"])


def attentions(graph: ov.Model) -> list[Attention]:
    """What the placeholders of a graph stand for, by number."""
    text = graph.get_rt_info([RT_INFO, "attentions"]).astype(str)
    return [Attention(**call) for call in json.loads(text)]


def placeholder(call: Attention, number: int, states: Sequence[ov.Output]) -> ov.Node:
    """Queries, keys and values of a token side by side, then a slice of the output's width."""
    widths = (
        call.query_heads * call.key_size,
        call.key_heads * call.key_size,
        call.key_heads * call.value_size,
    )
    flat = [
        op.reshape(port, integers([-1, width]), False)
        for port, width in zip(states, widths, strict=True)
    ]
    packed = op.concat(flat, 1)
    packed.set_friendly_name(f"{PLACEHOLDER}{number}")
    width = call.query_heads * call.value_size
    return op.slice(packed, integers([0]), integers([width]), integers([1]), integers([1]))
