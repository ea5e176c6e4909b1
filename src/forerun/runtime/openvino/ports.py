"""Walking and mending a graph, and giving one that others made the inputs and output of ours."""

from collections.abc import Callable, Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as op

from forerun.errors import UnsupportedModelError
from forerun.runtime.openvino.core import integers
from forerun.runtime.openvino.placeholders import INPUTS, Attention, name


def before(port: ov.Output, *types: str) -> ov.Output:
    """What came before nodes of these types, which only move, repeat or round numbers."""
    while port.get_node().get_type_name() in types:
        port = port.get_node().input_value(0)
    return port


def replace(port: ov.Output, by: ov.Node) -> None:
    """Let all that read this port read another node."""
    for user in list(port.get_target_inputs()):
        user.replace_source_output(by.output(0))


def divide(whole: ov.Node, nodes: Sequence[ov.Node], widths: Sequence[int]) -> None:
    """Let all that read these nodes read their parts, so wide, of the last dimension of another."""
    last, sizes = op.constant(np.int64(-1)), op.constant(np.array(widths, np.int64))
    parts = op.variadic_split(whole, last, sizes).outputs()
    for node, part in zip(nodes, parts, strict=True):
        for user in list(node.output(0).get_target_inputs()):
            user.replace_source_output(part)


def last_two(port: ov.Output) -> tuple[int, int]:
    """Its last two sizes, the first of them −1 if it varies."""
    first, last = list(port.get_partial_shape())[-2:]
    return first.get_length() if first.is_static else -1, last.get_length()


def adopt(
    graph: ov.Model,
    ports: Sequence[ov.Output],
    shape: list[int],
    mark: Callable[[ov.Node, list[Attention]], None],
    logits: ov.Output,
    layers: int,
    called: str,
) -> tuple[ov.Model, list[Attention]]:
    """Make a graph that others made, which is changed, one of `export`'s, and what its placeholders
    stand for; `UnsupportedModelError` if its attention is of another kind.

    Args:
        graph: of so many `layers` that have attention.
        ports: that ids and positions come from, as `shape`, with −1 for tokens.
        shape, layers: see there.
        mark: puts a placeholder where a node of attention to a cache is, and notes the call.
        logits: of all tokens; from now on of wanted ones.
        called: its name in errors.
    """
    calls: list[Attention] = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            mark(node, calls)
    if len(calls) != layers:
        raise UnsupportedModelError(
            f"{called}: {len(calls)} of {layers} layers have attention of a kind that has a paged "
            "node; use the runtime torch, or the checkpoint that it was made from"
        )
    given = [op.parameter(sizes, ov.Type.i64) for sizes in ([-1, 1], [-1, 1], [-1])]
    for port, by in zip(ports, given, strict=False):
        kind = port.get_element_type().get_type_name()
        replace(port, op.convert(op.reshape(by, integers(shape), False), kind))
    product = head(logits)
    states = product.input_value(0)
    flat = op.reshape(states, integers([-1, last_two(states)[1]]), False)
    product.input(0).replace_source_output(op.gather(flat, given[2], integers(0)).output(0))
    product.validate_and_infer_types()
    made = ov.Model([op.result(op.reshape(logits, integers([0, -1]), True))], given, called)
    name(made, INPUTS, "logits", calls)
    return made, calls


def head(logits: ov.Output) -> ov.Node:
    """The product that logits come from."""
    return before(logits, "Tanh", "Multiply", "Divide", "Convert").get_node()
