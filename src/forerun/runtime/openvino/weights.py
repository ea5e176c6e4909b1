"""Weights in 8 bits: a model of its own, near the one it is made from."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset15 as op


def compress(graph: ov.Model) -> int:
    """Round the matrices of products to 8 bits, symmetrically, with a scale per output.

    They are read and multiplied as they are: the plug-in recognises a constant that is converted
    and scaled. An embedding that is also the head stays in fp32 where tokens are looked up.

    Args:
        graph: in fp32; it is changed.

    Returns:
        How many matrices.
    """
    done = 0
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source = node.input_value(1).get_node()
        if source.get_type_name() != "Constant" or source.data.ndim != 2:
            continue
        matrix = source.data
        attributes = node.get_attributes()
        outputs_first = matrix if attributes["transpose_b"] else matrix.T
        rounded = op.matmul(
            node.input_value(0), _rounded(outputs_first), attributes["transpose_a"], True
        )
        for user in node.output(0).get_target_inputs():
            user.replace_source_output(rounded.output(0))
        done += 1
    graph.validate_nodes_and_infer_types()
    return done


def _rounded(matrix: np.ndarray) -> ov.Node:
    """`(outputs, inputs)` weights as int8 times a scale per output."""
    scale = np.abs(matrix).max(1, keepdims=True) / 127
    scale[scale == 0] = 1
    eight = np.rint(matrix / scale).astype(np.int8)
    return op.multiply(op.convert(op.constant(eight), "f32"), op.constant(scale))
