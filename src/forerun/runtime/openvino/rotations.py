"""Rotations of queries and keys in the form that the plug-in makes one node of.

Files of `llama` rotate pairs of neighbours, as llama.cpp orders the rows of their weights.
OpenVINO's reader takes five nodes to do so, none of which the plug-in fuses: of SmolLM2 a tenth of
a pass. With the rows in their makers' order the pairs are the two halves of a head. Scores stay
what they are, since queries and keys are in the same order.
"""

from collections.abc import Iterator

import numpy as np
import openvino as ov
import openvino.opset15 as op
from numpy.typing import NDArray

from forerun.runtime.openvino.ports import before, replace

_PLACED = "Reshape", "Broadcast", "Unsqueeze"


def halve(graph: ov.Model) -> int:
    """Rotate halves of heads where pairs of neighbours are rotated.

    Args:
        graph: of a GGUF file; it is changed.

    Returns:
        How many rotations were such.
    """
    tables: dict[str, ov.Node] = {}
    done = 0
    for node in graph.get_ordered_ops():
        if (rotation := _rotation(node)) is None:
            continue
        heads, product, angles = rotation
        count, width = (size.get_length() for size in list(heads.get_partial_shape())[2:])
        for angle in angles:
            if angle.get_name() not in tables:
                tables[angle.get_name()] = op.concat([angle, angle], -1)
        cosine, sine = (tables[angle.get_name()] for angle in angles)
        order = np.arange(count * width).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)
        _reorder(product, order)
        halves = op.constant(np.array([width // 2] * 2, np.int64))
        first, second = op.variadic_split(heads, op.constant(np.int64(3)), halves).outputs()
        turned = op.concat([op.multiply(second, op.constant(np.float32(-1))), first], -1)
        replace(node.output(0), op.add(op.multiply(heads, cosine), op.multiply(turned, sine)))
        done += 1
    graph.validate_nodes_and_infer_types()
    return done


def _rotation(node: ov.Node) -> tuple[ov.Output, ov.Node, list[ov.Node]] | None:
    """Heads `(1, tokens, heads, width)`, the product they come from, and cosines and sines, if a
    node is the sum by which pairs of neighbours are rotated."""
    terms = [port.get_node() for port in node.input_values()]
    if node.get_type_name() != "Add" or {t.get_type_name() for t in terms} != {"Multiply"}:
        return None
    heads, turned = (term.input_value(0) for term in terms)
    pairs = before(turned, "Reshape").get_node()
    product = before(heads, "Reshape").get_node()
    if pairs.get_type_name() != "Concat" or product.get_type_name() != "MatMul":
        return None
    if list(pairs.get_output_partial_shape(0))[-1] != 2:
        return None
    angles = [before(term.input_value(1), *_PLACED).get_node() for term in terms]
    width = list(heads.get_partial_shape())[-1].get_length()
    if any(list(a.get_output_partial_shape(0))[-1] != width // 2 for a in angles):
        return None
    return heads, product, angles


def _reorder(product: ov.Node, order: NDArray[np.int64]) -> None:
    """Put the rows of a product's weights in this order."""
    for port, constant in _constants(product.input(1), len(order)):
        rows = ov.Tensor(constant.get_element_type(), constant.get_output_shape(0))
        given, made = (x.view(np.uint8).reshape(len(order), -1) for x in (constant.data, rows.data))
        made[...] = given[order]
        port.replace_source_output(op.constant(rows).output(0))


def _constants(port: ov.Input, rows: int) -> Iterator[tuple[ov.Input, ov.Node]]:
    """Matrices, blocks and their scales that come here."""
    node = port.get_source_output().get_node()
    if node.get_type_name() != "Constant":
        for at in node.inputs():
            yield from _constants(at, rows)
    elif len(shape := node.get_output_shape(0)) > 1 and shape[0] == rows:
        yield port, node
