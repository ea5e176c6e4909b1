"""Blocks of a few bits as CPUs that multiply 8-bit numbers take them.

Where the plug-in rounds what weights multiply to 8 bits, judging five tokens takes little longer
than writing one, but it rounds only where a block's zero point z is a whole number of steps. Files
keep a minimum per block instead, so that z is any number. With c in the middle of what q may be,

    x · d (q − z)  =  x · d (q − c)  −  Σx · d (z − c)

is a product with signed weights, and one with the sums of x over each block, which has a 32nd of
the weights and stays in float32: together the file's own weights.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import openvino as ov
import openvino.opset15 as op
from numpy.typing import NDArray

from forerun.runtime.openvino.core import core
from forerun.runtime.openvino.ports import before, replace

GROUP = 16
"""Inputs of a product that share a scale when they are rounded: the smallest block of a file
(Q6_K's; others have 32). SmolLM2 takes as long with 32, and Q6_K is not rounded then."""
_CENTRES = {ov.Type.u4: 8, ov.Type.i8: 16}
"""c by the type that blocks come in: of 4 bits, and of 5."""


@cache
def rounds_inputs() -> bool:
    """Whether the plug-in rounds inputs of products on this CPU (VNNI), seen by a product."""
    rng = np.random.default_rng(0)
    x = op.parameter([-1, 64], ov.Type.f32)
    blocks = _Blocks(
        rng.integers(0, 256, (64, 32)).astype(np.uint8), np.ones((64, 2)), np.ones((64, 2)), 32
    )
    given = rng.standard_normal((8, 64)).astype(np.float32)
    seen = []
    for group in (0, GROUP):
        graph = ov.Model([op.matmul(x, blocks.matrix(), False, True)], [x])
        options = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": group, "INFERENCE_PRECISION_HINT": "f32"}
        seen.append(core().compile_model(graph, "CPU", options)(given)[0])
    return bool(np.abs(seen[0] - seen[1]).max() > 1e-3)


def sign(graph: ov.Model) -> int:
    """Give blocks with minima signed weights and a second product. Those that share an input become
    one, since each node costs time of its own.

    Args:
        graph: of a GGUF file; it is changed.

    Returns:
        How many products were such.
    """
    sharing: dict[tuple[str, int, str, int], list[tuple[ov.Node, _Blocks]]] = defaultdict(list)
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (blocks := _blocks(node.input_value(1))):
            port = node.input_value(0)
            kind = blocks.weights.dtype.str, blocks.size
            sharing[port.get_node().get_name(), port.get_index(), *kind].append((node, blocks))
    for members in sharing.values():
        nodes = [node for node, _ in members]
        product = _product(nodes[0].input_value(0), _joined([blocks for _, blocks in members]))
        if len(nodes) == 1:
            replace(nodes[0].output(0), product)
            continue
        widths = np.array([len(blocks.weights) for _, blocks in members], np.int64)
        parts = op.variadic_split(product, op.constant(np.int64(-1)), op.constant(widths))
        for node, part in zip(nodes, parts.outputs(), strict=True):
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(part)
    graph.validate_nodes_and_infer_types()
    return sum(map(len, sharing.values()))


class _Blocks(NamedTuple):
    """Signed weights of outputs, and what they leave."""

    weights: NDArray[np.uint8] | NDArray[np.int8]
    """`(outputs, bytes)`: two of 4 bits each, or one of 8."""
    scales: NDArray[np.floating]  # `(outputs, blocks)`
    left: NDArray[np.floating]  # the same, d (z − c)
    size: int  # of a block

    def matrix(self) -> ov.Node:
        """`(outputs, inputs)`, which the plug-in recognises and reads as it is."""
        outputs, blocks = self.scales.shape
        kind = ov.Type.i8 if self.weights.dtype == np.int8 else ov.Type.i4
        tensor = ov.Tensor(kind, ov.Shape([outputs, blocks, self.size]))
        tensor.data.view(self.weights.dtype).reshape(-1)[...] = self.weights.reshape(-1)
        scales = op.constant(self.scales.astype(np.float32).reshape(outputs, blocks, 1))
        wide = op.multiply(op.convert(op.constant(tensor), "f32"), scales)
        return op.reshape(wide, op.constant(np.array([outputs, blocks * self.size])), False)


def widen_scales(graph: ov.Model) -> None:
    """Hold scales of blocks in float32, which each compiled graph otherwise makes of them for
    itself, and keeps beside its own copy."""
    for node in graph.get_ops():
        if node.get_type_name() != "Convert" or node.get_output_element_type(0) != ov.Type.f32:
            continue
        scales = node.input_value(0).get_node()
        users = {user.get_node().get_type_name() for user in node.output(0).get_target_inputs()}
        halves = scales.get_type_name() == "Constant" and scales.get_element_type() == ov.Type.f16
        if halves and users == {"Multiply"}:
            replace(node.output(0), op.constant(scales.data.astype(np.float32)))


def _blocks(port: ov.Output) -> _Blocks | None:
    """Those with minima that a matrix is made of."""
    scaled = before(port, "Convert", "Reshape").get_node()
    if scaled.get_type_name() != "Multiply":
        return None
    moved = scaled.input_value(0).get_node()
    if moved.get_type_name() != "Subtract":
        return None
    steps, zeros = (before(moved.input_value(i), "Convert").get_node() for i in (0, 1))
    centre = _CENTRES.get(steps.get_element_type())
    if centre is None or len(steps.get_output_shape(0)) != 3:
        return None
    outputs, blocks, size = steps.get_output_shape(0)
    scales = before(scaled.input_value(1), "Convert").get_node().data.reshape(outputs, blocks)
    packed = steps.get_element_type() == ov.Type.u4
    # Minus 8, in two's complement, turns the highest of four bits.
    weights = steps.data.view(np.uint8) ^ 0x88 if packed else steps.data - np.int8(centre)
    left = scales.astype(np.float32) * (zeros.data.astype(np.float32)[..., 0] - centre)
    return _Blocks(weights.reshape(outputs, -1), scales, left, size)


def _joined(several: Sequence[_Blocks]) -> _Blocks:
    weights, scales, left, sizes = zip(*several, strict=True)
    joined = map(np.concatenate, (weights, scales, left))
    return _Blocks(next(joined), next(joined), next(joined), sizes[0])


def _product(x: ov.Output, blocks: _Blocks) -> ov.Node:
    rank = x.get_partial_shape().rank.get_length()
    shape = [1] * (rank - 2) + [-1, blocks.scales.shape[1], blocks.size]
    apart = op.reshape(x, op.constant(np.array(shape)), False)
    sums = op.reduce_sum(apart, op.constant(np.array([-1])), False)
    left = op.matmul(sums, op.constant(blocks.left.astype(np.float32)), False, True)
    # No sum: of those, the ones of computed tensors are residual streams (`nodes.tap`).
    return op.subtract(op.matmul(x, blocks.matrix(), False, True), left)
