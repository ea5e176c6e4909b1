"""fp32 products on the matrix units (AMX) of a CPU, which multiply bfloat16 numbers.

An fp32 number is the sum of three bfloat16 numbers, 8 bits of it each. Weights that are bfloat16
numbers are multiplied by all three, which adds up in fp32, and so are the products: as exact as an
fp32 product. Up to 16 tokens it takes little more than the first one does, since it is reading the
weights, in 16 bits, that takes time. A pass of the shipped target over 8 tokens takes 2.6 ms for
4.0, over 16 tokens 3.1 for 4.7 (two threads of a Xeon).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset15 as op

from forerun.runtime.openvino.blocks import rounds_inputs
from forerun.runtime.openvino.core import core, integers
from forerun.runtime.openvino.ports import replace
from forerun.runtime.openvino.weights import halves, held

_ROUNDS = np.array([[[2**16 + 1]], [[2**8 + 1]], [[1]]], np.float32)
"""Factors by which `_rounded` keeps the upper 8 and 16 bits of a number, and all of it."""
_BEFORE = np.array([[[0]], [[1]], [[1]]], np.float32)
"""Whether a part is what is left after the parts before it."""
_PRODUCT = Path(__file__).with_name("product.xml")


@cache
def narrows(precision: str) -> bool:
    """Whether attention over weights of a precision may be in bfloat16 on this CPU: they are in 4
    to 8 bits, it rounds inputs and multiplies such numbers, and has no matrix units, where nobody
    has compared passes of all widths."""
    if not (precision.startswith(("Q", "int4")) and rounds_inputs()):
        return False
    own = core().get_property("CPU", "INFERENCE_PRECISION_HINT")  # where the plug-in may choose
    return bool(own == ov.Type.bf16) and not has_matrix_units()


@cache
def has_matrix_units() -> bool:
    """Whether the plug-in multiplies in parts on matrix units of this CPU."""
    x = op.parameter([16, 64], ov.Type.f32)
    ones = held(np.full((64, 64), 0x3F80, np.uint16))
    try:
        product = op.matmul(x, ones, False, True)
        graph = ov.Model([product], [x])
        multiply_in_parts(graph)
        compiled = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except RuntimeError:  # a plug-in without such a product
        return False
    notes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    return any("amx" in str(x["primitiveType"].value) for x in notes if "primitiveType" in x)


def multiply_in_parts(graph: ov.Model) -> None:
    """Multiply halved weights by the three parts of what they are multiplied by, in a graph in fp32
    of inputs `(tokens, 1)`, which is changed. `RuntimeError` if the plug-in has no product of
    bfloat16 numbers in fp32."""
    halved = {convert.get_name() for convert in halves(graph)}
    parts: dict[tuple[str, int], ov.Node] = {}  # of inputs, which several products may share
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        port, convert = node.input_value(0), node.input_value(1).get_node()
        rank = node.get_output_partial_shape(0).rank.get_length()
        if convert.get_name() not in halved or rank not in (2, 3):
            continue
        outputs, inputs = convert.get_output_shape(0)
        name = port.get_node().get_name(), port.get_index()
        if name not in parts:
            parts[name] = _parts(op.reshape(port, integers([1, -1, inputs]), False))
        product = _product(parts[name].output(0), convert.input_value(0))
        high, middle, low = op.split(product, integers(0), 3).outputs()
        whole = op.add(high, op.add(middle, low))
        shape = [-1, outputs] if rank == 2 else [-1, 1, outputs]
        replace(node.output(0), op.reshape(whole, integers(shape), False))
    graph.validate_nodes_and_infer_types()


def _parts(x: ov.Node) -> ov.Node:
    """`(1, tokens, n)` fp32 numbers as `(3, tokens, n)` bfloat16 ones, whose sum they are."""

    def rounded(factors: np.ndarray) -> ov.Node:
        """Keep the upper bits of each number: as many as 24 without those of a factor 2ⁿ + 1
        (Dekker, "A floating-point technique for extending the available precision", 1971)."""
        scaled = op.multiply(x, op.constant(factors))
        return op.subtract(scaled, op.subtract(scaled, x))

    before = op.multiply(rounded(np.roll(_ROUNDS, 1, 0)), op.constant(_BEFORE))
    return op.convert(op.subtract(rounded(_ROUNDS), before), "bf16")


def _product(x: ov.Output, weights: ov.Output) -> ov.Node:
    _register()
    ops = core().read_model(_PRODUCT.read_bytes(), b"").get_ops()
    product = next(node for node in ops if node.get_type_name() == "MatMul")
    product.set_arguments([x, weights])
    product.validate_and_infer_types()
    return product


@cache
def _register() -> None:
    """Let products of relaxed types be read, which the plug-in registers as it does its own ops."""
    for library in Path(ov.__file__).parent.glob("libs/*openvino_intel_cpu_plugin.*"):
        core().add_extension(library)
