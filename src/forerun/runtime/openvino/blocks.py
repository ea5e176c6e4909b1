"""Blocks of a few bits as CPUs that multiply 8-bit numbers take them.

Where the plug-in rounds what weights multiply to 8 bits, judging five tokens takes little longer
than writing one, but it rounds only where a block's zero point z is a whole number of steps. Files
keep a minimum per block instead, so that z is any number. With c in the middle of what q may be,

    x · d (q − z)  =  x · d (q − c)  −  Σx · d (z − c)

is a product with signed weights, and one with the sums of x over each block, which has a 32nd of
the weights and stays in float32: together the file's own weights.

A few channels of the residual stream are a hundred times as large as the others, and rounding
leaves little of the fifteen that share a scale with one. So their inputs are made small, by a power
of two in the norm before, and what is missing then is added in float32, by the product of sums.
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
from forerun.runtime.openvino.ports import before, divide, replace

GROUP = 16
"""Inputs of a product that share a scale when they are rounded: the smallest block of a file
(Q6_K's; others have 32). SmolLM2 takes as long with 32, and Q6_K is not rounded then."""
LOUD = 3, 5  # channels that are not rounded, of layers and of the head
_QUIET = np.float32(2**-20)  # what they are multiplied by where inputs are rounded
_CENTRES = {ov.Type.u4: 8, ov.Type.i8: 16}  # c by the type that blocks come in: of 4 bits, and of 5


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


def sign(graph: ov.Model) -> None:
    """Give blocks with minima signed weights and a second product. Those that share an input become
    one, since each node costs time of its own.

    Args:
        graph: of a GGUF file; it is changed.
    """
    sharing: dict[tuple[str, int, str, int], list[tuple[ov.Node, _Blocks]]] = defaultdict(list)
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and (blocks := _blocks(node.input_value(1))):
            port = node.input_value(0)
            kind = blocks.weights.dtype.str, blocks.size
            sharing[port.get_node().get_name(), port.get_index(), *kind].append((node, blocks))
    loud = _loudest([member for members in sharing.values() for member in members])
    _mend_head(graph, loud[: LOUD[1]])
    for members in sharing.values():
        nodes = [node for node, _ in members]
        x, blocks = nodes[0].input_value(0), _joined([blocks for _, blocks in members])
        own = loud[: LOUD[0]] if _quieten(x, loud[: LOUD[0]], len(nodes)) else loud[:0]
        product = _product(x, blocks, own)
        if len(nodes) == 1:
            replace(nodes[0].output(0), product)
            continue
        divide(product, nodes, [len(blocks.weights) for _, blocks in members])
    graph.validate_nodes_and_infer_types()


class _Blocks(NamedTuple):
    """Signed weights of outputs, and what they leave."""

    weights: NDArray[np.uint8] | NDArray[np.int8]
    """`(outputs, bytes)`: two of 4 bits each, or one of 8."""
    scales: NDArray[np.floating]  # `(outputs, blocks)`
    left: NDArray[np.floating]  # the same, d (z − c)
    size: int  # of a block

    def columns(self, inputs: NDArray[np.int64]) -> NDArray[np.float32]:
        """`(outputs, inputs)` signed weights of these inputs."""
        if self.weights.dtype == np.int8:
            steps = self.weights[:, inputs]
        else:  # the first of two is in the lower bits
            pairs = self.weights[:, inputs // 2] >> (4 * (inputs % 2)).astype(np.uint8)
            steps = ((pairs & 15) ^ 8).astype(np.int8) - 8
        return self.scales[:, inputs // self.size].astype(np.float32) * steps.astype(np.float32)

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


def _product(x: ov.Output, blocks: _Blocks, loud: NDArray[np.int64]) -> ov.Node:
    if len(loud):
        sums = op.matmul(x, op.constant(_summing(blocks, loud)), False, False)
    else:
        rank = x.get_partial_shape().rank.get_length()
        shape = [1] * (rank - 2) + [-1, blocks.scales.shape[1], blocks.size]
        apart = op.reshape(x, op.constant(np.array(shape)), False)
        sums = op.reduce_sum(apart, op.constant(np.array([-1])), False)
    missing = blocks.columns(loud) * (1 - 1 / _QUIET)
    left = np.concatenate([blocks.left, missing], 1, dtype=np.float32)
    # No sum: of those, the ones of computed tensors are residual streams (`nodes.tap`).
    return op.subtract(
        op.matmul(x, blocks.matrix(), False, True), op.matmul(sums, op.constant(left), False, True)
    )


def _summing(blocks: _Blocks, loud: NDArray[np.int64]) -> NDArray[np.float32]:
    """`(inputs, blocks + loud)`: what turns inputs into sums of blocks, and the loud ones."""
    count = blocks.scales.shape[1]
    matrix = np.zeros((count * blocks.size, count + len(loud)), np.float32)
    matrix[:, :count] = np.repeat(np.eye(count), blocks.size, 0)
    matrix[loud] /= _QUIET
    matrix[loud, count + np.arange(len(loud))] = 1
    return matrix


def _loudest(products: Sequence[tuple[ov.Node, _Blocks]]) -> NDArray[np.int64]:
    """Channels of the residual stream by how much the products that make it give to each."""
    normed = [_scale_of(node.input_value(0)) for node, _ in products]
    widths = {scale.data.size for scale in normed if scale is not None}
    if len(widths) != 1:
        return np.empty(0, np.int64)
    (width,) = widths
    given = np.zeros(width)
    for (_, blocks), scale in zip(products, normed, strict=True):
        if scale is None and len(blocks.scales) == width:
            given += np.square(blocks.scales, dtype=np.float64).sum(1)
    return np.argsort(-given, kind="stable") if given.any() else np.empty(0, np.int64)


def _scale_of(port: ov.Output) -> ov.Node | None:
    """A norm's constant, if these are the outputs of one."""
    node = before(port, "Gather", "Reshape").get_node()
    if node.get_type_name() != "Multiply":
        return None
    scale = node.input_value(1).get_node()
    whole = scale.get_type_name() == "Constant" and len(scale.get_output_shape(0)) == 1
    return scale if whole and scale.data.size > 1 else None


def _quieten(port: ov.Output, loud: NDArray[np.int64], users: int) -> bool:
    """Make loud channels of a norm that nothing but so many products reads small, if it is one."""
    scale, node = _scale_of(port), before(port, "Gather", "Reshape").get_node()
    if scale is None or len(node.output(0).get_target_inputs()) != users or not len(loud):
        return False
    numbers = scale.data.astype(np.float32)
    numbers[loud] *= _QUIET
    node.input(1).replace_source_output(op.constant(numbers).output(0))
    return True


def _mend_head(graph: ov.Model, loud: NDArray[np.int64]) -> None:
    """The same for a head whose blocks have no minima: what is missing is a product of its own."""
    node = [node for node in graph.get_ordered_ops() if node.get_type_name() == "MatMul"][-1]
    scaled = before(node.input_value(1), "Convert", "Reshape").get_node()
    steps = before(scaled.input_value(0), "Convert").get_node() if scaled.get_input_size() else node
    if steps.get_type_name() != "Constant" or steps.get_element_type() != ov.Type.i8:
        return
    x, users = node.input_value(0), node.output(0).get_target_inputs()
    if not _quieten(x, loud, 1):
        return
    outputs, blocks, size = steps.get_output_shape(0)
    scales = before(scaled.input_value(1), "Convert").get_node().data.reshape(outputs, blocks)
    columns = steps.data[:, loud // size, loud % size] * scales[:, loud // size].astype(np.float32)
    missing = op.constant((columns * (1 - 1 / _QUIET)).astype(np.float32))
    left = op.matmul(op.gather(x, op.constant(loud), op.constant(-1)), missing, False, True)
    whole = op.subtract(node, left)
    for user in users:
        user.replace_source_output(whole.output(0))
