"""Products in other forms: several as one, weights in 16 bits, the same numbers, or in 8 bits."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
from numpy.typing import NDArray

from forerun.runtime.openvino.ports import before, divide, replace

_AS_THEY_ARE = "decompression_0", "disabled_constant_folding_0"
"""Attributes of a conversion that the plug-in leaves to the product which reads it."""
_HELD = ov.Type.f32, ov.Type.bf16, ov.Type.f16  # types that weights come in
_ROWS = 4096
"""Of a matrix that are rounded at a time, so that no second one is in memory in 32 bits."""


def hold(graph: ov.Model, eight_bits: bool = False) -> None:
    """Give the weights of a graph the form they are stored in.

    Products are fused (`fuse`). Matrices that are bfloat16 numbers stay in 16 bits: products are
    multiplied in fp32 all the same, and `keep_halves` lets them read 16 bits a weight; without it
    the plug-in widens the weights when it compiles. In 8 bits they are rounded, symmetrically, with
    a scale per output, and read as they are: the plug-in recognises a constant that is converted
    and scaled. An embedding that is also the head stays as it is where tokens are looked up.

    Args:
        graph: in fp32, of weights in fp32 or in 16 bits that are converted; it is changed.
        eight_bits: whether matrices of products are rounded to 8 bits.
    """
    for node in graph.get_ordered_ops():  # vectors are small, and would be converted in every pass
        if node.get_type_name() == "Convert" and node.get_element_type() == ov.Type.f32:
            source = node.input_value(0).get_node()
            if _is_held(source) and len(source.get_output_shape(0)) < 2:
                replace(node.output(0), op.constant(_wide(_numbers(source))))
    fuse(graph)
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul" or not (constant := _matrix(node.input_value(1))):
            continue
        attributes, kind = node.get_attributes(), constant.get_element_type()
        turned = not attributes["transpose_b"]
        if not eight_bits and kind != ov.Type.f16 and not (turned and kind == ov.Type.bf16):
            continue
        numbers = _numbers(constant)
        numbers = np.ascontiguousarray(numbers.T) if turned else numbers  # `(outputs, inputs)`
        matrix = _rounded(numbers) if eight_bits else held(numbers)
        product = op.matmul(node.input_value(0), matrix, attributes["transpose_a"], True)
        replace(node.output(0), product)
    graph.validate_nodes_and_infer_types()


def fuse(graph: ov.Model) -> None:
    """Multiply an input once by all the matrices it is multiplied by, and split what comes out.

    Every number stays the same. A pass of the shipped target over one token takes 5 % less time,
    over five 6 %. Only products that heads are cut from at once are fused: a bias or an activation
    that follows is part of the product's own node, and would become a node of its own (gate and up
    of the shipped target's layers together: 5 % slower than apart).

    Args:
        graph: in fp32; it is changed.
    """
    sharing: dict[tuple[str, int], list[ov.Node]] = defaultdict(list)
    for node in graph.get_ordered_ops():
        if _is_cut_into_heads(node):
            port = node.input_value(0)
            sharing[port.get_node().get_name(), port.get_index()].append(node)
    for nodes in (nodes for nodes in sharing.values() if len(nodes) > 1):
        matrices = [_numbers(_matrix(node.input_value(1))) for node in nodes]
        if len({numbers.dtype for numbers in matrices}) > 1:
            matrices = [_wide(numbers) for numbers in matrices]
        joined = held(np.concatenate(matrices))
        whole = op.matmul(nodes[0].input_value(0), joined, False, True)
        divide(whole, nodes, list(map(len, matrices)))
    graph.validate_nodes_and_infer_types()


def _is_cut_into_heads(node: ov.Node) -> bool:
    """Whether it is a product with constant rows, which nothing but reshapes read."""
    if node.get_type_name() != "MatMul":
        return False
    attributes = node.get_attributes()
    plain = attributes["transpose_b"] and not attributes["transpose_a"]
    users = [user.get_node().get_type_name() for user in node.output(0).get_target_inputs()]
    return plain and _matrix(node.input_value(1)) is not None and set(users) == {"Reshape"}


def keep_halves(graph: ov.Model) -> None:
    """Have products read halved weights as they are."""
    for convert in halves(graph):
        info = convert.get_rt_info()
        for name in _AS_THEY_ARE:
            info[name] = ""


def widen(graph: ov.Model) -> None:
    """Hold matrices that were halved in fp32 again, for clones of the graph to share."""
    for convert in list(halves(graph)):
        replace(convert.output(0), op.constant(_wide(_numbers(convert.input_value(0).get_node()))))


def halves(graph: ov.Model) -> Iterator[ov.Node]:
    """Conversions of halved matrices of products."""
    for node in graph.get_ops():
        if node.get_type_name() == "Convert":
            source = node.input_value(0).get_node()
            if source.get_type_name() == "Constant" and source.get_element_type() == ov.Type.bf16:
                yield node


def _matrix(port: ov.Output) -> ov.Node | None:
    """The constant of two dimensions, of a floating type, that comes here, converted or not."""
    node = before(port, "Convert").get_node()
    return node if _is_held(node) and len(node.get_output_shape(0)) == 2 else None


def _is_held(node: ov.Node) -> bool:
    return node.get_type_name() == "Constant" and node.get_element_type() in _HELD


def _numbers(constant: ov.Node) -> NDArray[Any]:
    """In float32, or the bits of bfloat16 ones in uint16."""
    if constant.get_element_type() == ov.Type.bf16:
        return constant.data.view(np.uint16)
    return constant.data.astype(np.float32, copy=False)


def _wide(numbers: NDArray[Any]) -> NDArray[np.float32]:
    """What `_numbers` gives, in float32."""
    if numbers.dtype != np.uint16:
        return numbers
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def held(numbers: NDArray[Any]) -> ov.Node:
    """Numbers of float32, or the bits of bfloat16 ones in uint16, as a node of float32."""
    if numbers.dtype != np.uint16:
        return op.constant(numbers)
    bits = ov.Tensor(ov.Type.bf16, ov.Shape(list(numbers.shape)))
    bits.data.view(np.uint16)[...] = numbers
    return op.convert(op.constant(bits), "f32")


def _rounded(numbers: NDArray[Any]) -> ov.Node:
    """`(outputs, inputs)` weights as int8 times a scale per output."""
    eight, scales = np.empty(numbers.shape, np.int8), np.empty((len(numbers), 1), np.float32)
    for first in range(0, len(numbers), _ROWS):
        rows = slice(first, first + _ROWS)
        wide = _wide(numbers[rows])
        scale = np.abs(wide).max(1, keepdims=True) / 127
        scale[scale == 0] = 1
        eight[rows], scales[rows] = np.rint(wide / scale), scale
    return op.multiply(op.convert(op.constant(eight), "f32"), op.constant(scales))
