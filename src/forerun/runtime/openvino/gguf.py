"""A GGUF file as an exported graph, its weights in the file's own blocks of 4 to 8 bits.

OpenVINO's reader makes the graph, with attention over caches of its own; here that becomes the
placeholders of `export`, and the head is over wanted tokens only. No weight is in torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import openvino as ov
import openvino.opset15 as op
from openvino.frontend import FrontEndManager

from forerun.errors import MissingExtraError, UnsupportedModelError
from forerun.runtime.gguf import GGUF
from forerun.runtime.openvino.export import (
    INPUTS,
    Attention,
    integers,
    name,
    placeholder,
    reason,
)
from forerun.runtime.openvino.ports import before, last_two, replace

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those that tests compare with `transformers`."""
EXACT = "OV_GGUF_Q4_K_ZP_F16"
"""Tells the reader to keep the minimum of a block of Q4_K; it rounds it to whole steps otherwise,
an error as large as that of the four bits."""


def graph_of(file: GGUF) -> ov.Model:
    """Read a file.

    Returns:
        A graph as `export` makes it.

    Raises:
        UnsupportedModelError: its architecture or a type of its weights is not served.
    """
    called = file.path.name
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{called}: GGUF files of the architecture {file.architecture!r} are not served by "
            f"openvino (served: {', '.join(ARCHITECTURES)}); use the runtime torch, or the model's "
            "safetensors"
        )
    if odd := sorted({t.kind for t in file.tensors if t.kind.startswith("type ")}):
        raise UnsupportedModelError(
            f"{called}: its weights are of {', '.join(odd)}, which is not served; use a file in "
            "Q4_K_M, Q6_K or Q8_0"
        )
    return _rewritten(_read(file), file)


def _read(file: GGUF) -> ov.Model:
    try:
        reader = FrontEndManager().load_by_framework("gguf")
    except RuntimeError as error:
        raise MissingExtraError(
            f"openvino {ov.__version__} reads no GGUF files; install the pinned version: "
            "pip install 'forerun[openvino]'"
        ) from error
    try:
        with _exact():
            return reader.convert(reader.load(str(file.path)))
    except RuntimeError as error:  # OpenVINO has no other
        raise UnsupportedModelError(
            f"{file.path.name} cannot be read by openvino: {reason(error)}; use the runtime torch"
        ) from error


@contextmanager
def _exact() -> Iterator[None]:
    before = os.environ.get(EXACT)
    os.environ[EXACT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[EXACT]
        else:
            os.environ[EXACT] = before


def _rewritten(graph: ov.Model, file: GGUF) -> ov.Model:
    """The reader's graph with the inputs, attention and output of an exported one."""
    ports = {name: port for port in graph.inputs for name in port.get_names()}
    ids, positions, wanted = inputs = [
        op.parameter(ov.PartialShape(shape), ov.Type.i64) for shape in ([-1, 1], [-1, 1], [-1])
    ]
    for port, by in ((ports["inp_tokens"], ids), (ports["inp_pos"], positions)):
        replace(port, op.convert(op.reshape(by, integers([1, 1, 1, -1]), False), "i32"))
    nodes = graph.get_ordered_ops()
    calls: list[Attention] = []
    for node in nodes:
        if node.get_type_name() == "ScaledDotProductAttention":
            _mark(node, calls, file)
    if len(calls) != file.get("block_count"):
        raise UnsupportedModelError(
            f"{file.path.name}: attention of a kind that has no paged node in "
            f"{file.get('block_count') - len(calls)} layers; use the runtime torch"
        )
    for node in nodes:  # of the last layer, which is over all tokens here
        if node.get_type_name() == "Gather" and _names(node.input_value(1), "inp_out_ids"):
            replace(node.output(0), node.input_value(0).get_node())
    made = ov.Model([op.result(_head(graph, wanted))], inputs, file.architecture)
    name(made, INPUTS, "logits", calls)
    return made


def _mark(node: ov.Node, calls: list[Attention], file: GGUF) -> None:
    """Put a placeholder where attention to a cache is."""
    if node.get_input_size() != 5:
        raise UnsupportedModelError(f"{file.path.name}: attention with sinks is not served")
    query = before(before(node.input_value(0), "Transpose"), "Convert")
    key, value = (_written(node.input_value(i), file) for i in (1, 2))
    heads, _ = last_two(query)
    key_heads, key_width = last_two(key)
    window = 0
    if _names(node.input_value(3), "self_kq_mask_swa"):
        window = int(file.get("attention.sliding_window"))
    scale = float(node.input_value(4).get_node().data)
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


def _head(graph: ov.Model, wanted: ov.Node) -> ov.Node:
    """`(wanted, V)` logits: what follows the last layer, over wanted tokens only."""
    result = next(x for x in graph.get_results() if x.get_friendly_name() == "result_output")
    product = result.input_value(0).get_node()
    states = product.input_value(0)
    flat = op.reshape(states, integers([-1, last_two(states)[1]]), False)
    seen = op.gather(flat, wanted, integers(0))
    attributes = product.get_attributes()
    return op.matmul(
        seen, product.input_value(1), attributes["transpose_a"], attributes["transpose_b"]
    )


def _names(port: ov.Output, name: str) -> bool:
    """Whether it comes straight from this input."""
    source = before(port, "Squeeze", "Reshape", "Convert", "Slice", "Unsqueeze").get_node()
    return source.get_type_name() == "Parameter" and source.get_friendly_name() == name
