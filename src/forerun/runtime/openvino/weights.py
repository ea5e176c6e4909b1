"""Products in other forms: several as one, weights in 16 bits, the same numbers, or in 8 bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import openvino as ov
import openvino.opset15 as op
from numpy.typing import NDArray

from forerun.runtime.openvino.ports import replace

_AS_THEY_ARE = "decompression_0", "disabled_constant_folding_0"
"""Attributes of a conversion that the plug-in leaves to the product which reads it."""


def fuse(graph: ov.Model) -> int:
    """Multiply an input once by all the matrices it is multiplied by, and split what comes out.

    Every number stays the same. A pass of the shipped target over one token takes 5 % less time,
    over five 6 %. Only products that heads are cut from at once are fused: a bias or an activation
    that follows is part of the product's own node, and would become a node of its own (gate and up
    of the shipped target's layers together: 5 % slower than apart).

    Args:
        graph: in fp32; it is changed.

    Returns:
        How many products there are instead of several.
    """
    sharing: dict[tuple[str, int], list[ov.Node]] = defaultdict(list)
    for node in graph.get_ordered_ops():
        if _is_cut_into_heads(node):
            port = node.input_value(0)
            sharing[port.get_node().get_name(), port.get_index()].append(node)
    several = [nodes for nodes in sharing.values() if len(nodes) > 1]
    for nodes in several:
        matrices = [node.input_value(1).get_node().data for node in nodes]
        whole = op.matmul(
            nodes[0].input_value(0), op.constant(np.concatenate(matrices)), False, True
        )
        widths = np.array([len(matrix) for matrix in matrices], np.int64)
        parts = op.variadic_split(whole, op.constant(np.int64(-1)), op.constant(widths))
        for node, part in zip(nodes, parts.outputs(), strict=True):
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(part)
    graph.validate_nodes_and_infer_types()
    return len(several)


def _is_cut_into_heads(node: ov.Node) -> bool:
    """Whether it is a product with constant rows, which nothing but reshapes read."""
    if node.get_type_name() != "MatMul":
        return False
    attributes, weight = node.get_attributes(), node.input_value(1).get_node()
    plain = attributes["transpose_b"] and not attributes["transpose_a"]
    matrix = weight.get_type_name() == "Constant" and weight.data.ndim == 2
    users = [user.get_node().get_type_name() for user in node.output(0).get_target_inputs()]
    return plain and matrix and set(users) == {"Reshape"}


def halve(graph: ov.Model) -> int:
    """Hold tables and matrices that are bfloat16 numbers, as most checkpoints' are, in 16 bits.

    Every number stays the same. Products are multiplied in fp32 as before; `keep_halves` lets them
    read 16 bits a weight, without it the plug-in widens the weights when it compiles.

    Args:
        graph: in fp32; it is changed.

    Returns:
        How many matrices of products.
    """
    nodes = graph.get_ordered_ops()  # held, so that no memory is another constant's later
    tables: dict[int, ov.Node | None] = {}  # embeddings may be the head, too

    def half(matrix: NDArray[np.float32]) -> ov.Node | None:
        if matrix.ctypes.data in tables:
            return tables[matrix.ctypes.data]
        low, high = np.moveaxis(matrix.view(np.uint16).reshape(*matrix.shape, 2), -1, 0)
        return None if low.any() else _bfloat16(high)

    def wide(matrix: NDArray[np.float32]) -> ov.Node | None:
        held = half(matrix)
        return held and op.convert(held, "f32")

    for node in nodes:
        table = node.input_value(0).get_node() if node.get_type_name() == "Gather" else None
        if not table or not _is_matrix(table):
            continue
        if held := tables.setdefault(table.data.ctypes.data, half(table.data)):
            row = op.convert(op.gather(held, node.input_value(1), node.input_value(2)), "f32")
            replace(node.output(0), row)
    return _rewritten(graph, wide)


def is_halved(graph: ov.Model) -> bool:
    """Whether any matrices are."""
    return any(True for _ in halves(graph))


def keep_halves(graph: ov.Model) -> None:
    """Have products read halved weights as they are."""
    for convert in halves(graph):
        info = convert.get_rt_info()
        for name in _AS_THEY_ARE:
            info[name] = ""


def widen(graph: ov.Model) -> None:
    """Hold matrices that were halved in fp32 again, for clones of the graph to share."""
    for convert in list(halves(graph)):
        bits = convert.input_value(0).get_node().data.view(np.uint16)
        replace(convert.output(0), op.constant((bits.astype(np.uint32) << 16).view(np.float32)))


def compress(graph: ov.Model) -> int:
    """Round the matrices of products to 8 bits, symmetrically, with a scale per output.

    They are read and multiplied as they are: the plug-in recognises a constant that is converted
    and scaled. An embedding that is also the head stays in fp32 where tokens are looked up.

    Args:
        graph: in fp32; it is changed.

    Returns:
        How many matrices.
    """
    return _rewritten(graph, _rounded)


def _rewritten(graph: ov.Model, rewritten: Callable[[NDArray[np.float32]], ov.Node | None]) -> int:
    """Give products `(outputs, inputs)` matrices in another form; None leaves one as it is."""
    done = 0
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        if not _is_matrix(source):
            continue
        attributes = node.get_attributes()
        outputs_first = source.data if attributes["transpose_b"] else source.data.T
        matrix = rewritten(np.ascontiguousarray(outputs_first))
        if matrix is None:
            continue
        replace(
            node.output(0), op.matmul(node.input_value(0), matrix, attributes["transpose_a"], True)
        )
        done += 1
    graph.validate_nodes_and_infer_types()
    return done


def _is_matrix(node: ov.Node) -> bool:
    constant = node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32
    return constant and node.data.ndim == 2


def halves(graph: ov.Model) -> Iterator[ov.Node]:
    """Conversions of halved matrices of products."""
    for node in graph.get_ops():
        if node.get_type_name() == "Convert":
            source = node.input_value(0).get_node()
            if source.get_type_name() == "Constant" and source.get_element_type() == ov.Type.bf16:
                yield node


def _bfloat16(bits: NDArray[np.uint16]) -> ov.Node:
    tensor = ov.Tensor(ov.Type.bf16, ov.Shape(list(bits.shape)))
    tensor.data.view(np.uint16)[...] = bits
    return op.constant(tensor)


def _rounded(matrix: NDArray[np.float32]) -> ov.Node:
    """`(outputs, inputs)` weights as int8 times a scale per output."""
    scale = np.abs(matrix).max(1, keepdims=True) / 127
    scale[scale == 0] = 1
    eight = np.rint(matrix / scale).astype(np.int8)
    return op.multiply(op.convert(op.constant(eight), "f32"), op.constant(scale))
