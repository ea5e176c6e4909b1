"""A GGUF file as an exported graph, its weights in the file's own blocks of 4 to 8 bits.

OpenVINO's reader makes the graph, with attention over caches of its own; here that becomes the
placeholders of `export`, and the head is over wanted tokens only. No weight is in torch.
"""

import os
from collections.abc import Iterator
from functools import partial

import numpy as np
import openvino as ov
import openvino.opset15 as op
from numpy.typing import NDArray
from openvino.frontend import FrontEndManager

from forerun.errors import MissingExtraError, UnsupportedModelError
from forerun.runtime.gguf import GGUF
from forerun.runtime.openvino.blocks import rounds_inputs, sign, widen_scales
from forerun.runtime.openvino.core import integers, reason
from forerun.runtime.openvino.placeholders import Attention, placeholder
from forerun.runtime.openvino.ports import adopt, before, last_two, replace

EXACT = "OV_GGUF_Q4_K_ZP_F16"
"""Tells the reader to keep the minimum of a block of Q4_K; it rounds it to whole steps otherwise,
an error as large as that of the four bits."""

LOCAL_BASE = 10_000.0  # of Gemma 3's rotations in layers with a window, where a file names none


def graph_of(file: GGUF) -> ov.Model:
    """Read a file.

    Returns:
        A graph as `export` makes it.

    Raises:
        UnsupportedModelError: its architecture or a type of its weights is not served.
    """
    if why := file.refusal:
        raise UnsupportedModelError(f"{file.path.name}: {why}")
    graph = _read(file)
    for node in graph.get_ordered_ops():  # of the last layer, which is over all tokens here
        if node.get_type_name() == "Gather" and _names(node.input_value(1), "inp_out_ids"):
            replace(node.output(0), node.input_value(0).get_node())
    _mend_rotations(graph, file)
    ports = {name: port for port in graph.inputs for name in port.get_names()}
    result = next(x for x in graph.get_results() if x.get_friendly_name() == "result_output")
    halve(graph)
    made, _ = adopt(
        graph,
        [ports["inp_tokens"], ports["inp_pos"]],
        [1, 1, 1, -1],
        partial(_mark, file=file),
        result.input_value(0),
        file.get("block_count"),
        file.path.name,
    )
    if rounds_inputs():
        sign(made)
    widen_scales(made)
    return made


def _read(file: GGUF) -> ov.Model:
    try:
        reader = FrontEndManager().load_by_framework("gguf")
    except RuntimeError as error:
        raise MissingExtraError(
            f"openvino {ov.__version__} reads no GGUF files; install the pinned version: "
            "pip install 'forerun[openvino]'"
        ) from error
    before = os.environ.get(EXACT)
    os.environ[EXACT] = "1"
    try:
        return reader.convert(reader.load(str(file.path)))
    except RuntimeError as error:  # OpenVINO has no other
        raise UnsupportedModelError(
            f"{file.path.name} cannot be read by openvino: {reason(error)}; use the runtime torch"
        ) from error
    finally:
        del os.environ[EXACT]
        if before is not None:
            os.environ[EXACT] = before


def _mend_rotations(graph: ov.Model, file: GGUF) -> None:
    """What the reader passes over."""
    if (factors := file.rotations) is not None:
        _stretch(graph, factors, file)
    if (scale := file.get("rope.scaling.attn_factor", 1.0)) != 1.0:
        for node in _angles(graph):
            again = (op.cos if node.get_type_name() == "Cos" else op.sin)(node.input_value(0))
            replace(node.output(0), op.multiply(again, np.float32(scale)))
    stretched = file.get("rope.scaling.factor", 1.0)
    if file.architecture == "gemma3" and stretched != 1.0:  # but those of layers with a window
        size = int(file.get("attention.key_length")) // 2
        own = file.get("rope.freq_base_swa", LOCAL_BASE) ** -(np.arange(size) / size)
        _stretch(graph, np.full(size, 1 / stretched, np.float32), file, own)


def _angles(graph: ov.Model) -> list[ov.Node]:
    return [node for node in graph.get_ordered_ops() if node.get_type_name() in ("Cos", "Sin")]


def _stretch(
    graph: ov.Model,
    factors: NDArray[np.float32],
    file: GGUF,
    only: NDArray[np.float64] | None = None,
) -> None:
    """Divide the frequencies by which places become angles; only those that are these, if any."""
    constants = (c for node in _angles(graph) for c in _factors(node))
    named = {
        c.get_name(): c
        for c in constants
        if c.data.size == len(factors) and (only is None or np.allclose(c.data.ravel(), only))
    }
    if not named:
        raise UnsupportedModelError(
            f"{file.path.name}: its rotations are of a kind that is not served; use its safetensors"
        )
    for node in named.values():
        replace(node.output(0), op.constant(node.data / factors.reshape(node.data.shape)))


def _factors(node: ov.Node) -> Iterator[ov.Node]:
    """Constants that a product behind a node is made of."""
    for port in node.input_values():
        source = port.get_node()
        if source.get_type_name() == "Multiply":
            yield from _factors(source)
        elif source.get_type_name() == "Constant":
            yield source


def _mark(node: ov.Node, calls: list[Attention], file: GGUF) -> None:
    """Put a placeholder where attention to a cache is."""
    if node.get_input_size() != 5:
        raise UnsupportedModelError(f"{file.path.name}: attention with sinks is not served")
    query = before(before(node.input_value(0), "Transpose"), "Convert")
    key, value = (_written(node.input_value(i), file) for i in (1, 2))
    heads, _ = last_two(query)
    key_heads, key_width = last_two(key)
    every = file.architecture == "phi3"  # the reader has a window in every second layer of it
    windowed = every or _names(node.input_value(3), "self_kq_mask_swa")
    scale = file.scale or float(node.input_value(4).get_node().data)
    window = file.window if windowed else 0
    call = Attention(heads, key_heads, key_width, last_two(value)[1], scale, window)
    out = placeholder(call, len(calls), [query, key, value])
    calls.append(call)
    (turned,) = node.output(0).get_target_inputs()
    (widened,) = turned.get_node().output(0).get_target_inputs()
    shape = integers([1, -1, heads, call.value_size])
    replace(widened.get_node().output(0), op.reshape(out, shape, False))


def _written(port: ov.Output, file: GGUF) -> ov.Output:
    """What a pass writes into the cache that attention reads: `(1, tokens, heads, width)`."""
    cache = before(port, "Transpose", "Reshape", "Broadcast", "Unsqueeze", "Convert").get_node()
    if cache.get_type_name() != "ScatterUpdate":
        raise UnsupportedModelError(f"{file.path.name}: attention to no cache is not served")
    flat = cache.input_value(2)
    return before(before(flat, "Reshape"), "Convert")


def _names(port: ov.Output, name: str) -> bool:
    """Whether it comes straight from this input."""
    source = before(port, "Squeeze", "Reshape", "Convert", "Slice", "Unsqueeze").get_node()
    return source.get_type_name() == "Parameter" and source.get_friendly_name() == name


_PLACED = "Reshape", "Broadcast", "Unsqueeze"


def halve(graph: ov.Model) -> None:
    """Rotate halves of heads where pairs of neighbours are: of that the plug-in makes one node.

    Files of `llama` rotate pairs of neighbours, as llama.cpp orders the rows of their weights. The
    reader takes five nodes to do so, none of which the plug-in fuses: of SmolLM2 a tenth of a pass.
    With the rows in their makers' order the pairs are the two halves of a head. Scores stay what
    they are, since queries and keys are in the same order.

    Args:
        graph: of a GGUF file; it is changed.
    """
    tables: dict[str, ov.Node] = {}
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
    graph.validate_nodes_and_infer_types()


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
