"""Paged-attention nodes instead of placeholders.

The node's Python class is private and promises nothing from one minor version to the next, so the
extra pins the version and a test builds a graph of one node. The CPU plug-in writes each token's
keys and values into blocks of a pool that belongs to the caller and reads a row through its list
of blocks, so rows of any length share a pass, and what lies beyond a row's length is hidden.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset15 as op

from forerun.errors import MissingExtraError
from forerun.runtime.openvino.export import PLACEHOLDER, Attention, attentions

BLOCK = 32
"""Tokens per block: the only size the CPU plug-in has."""
ROWS = (
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)
"""Inputs that say which tokens belong to which row, in the node's order of inputs."""
_ROWS_AT = (5, 6, 7, 8, 12)
_CACHES_AT = {"key": 3, "value": 4}


def attach(graph: ov.Model) -> ov.Model:
    """Put paged-attention nodes where placeholders are; the graph is changed and returned.

    It gains the inputs `ROWS` and, per call of attention, `key_cache.N` and `value_cache.N` of
    `(blocks, heads, BLOCK, width)`, whose type is the plug-in's choice (`KV_CACHE_PRECISION`).
    """
    calls = attentions(graph)
    new: list[ov.Node] = []

    def parameter(name: str, kind: ov.Type, shape: list[int]) -> ov.Output:
        node = op.parameter(ov.PartialShape(shape), kind, name=name)
        node.output(0).get_tensor().set_names({name})
        new.append(node)
        return node.output(0)

    shared = [parameter(n, ov.Type.i32, [] if n == "max_context_len" else [-1]) for n in ROWS]
    packed = {n.get_friendly_name(): n for n in graph.get_ops()}
    for number, call in enumerate(calls):
        place = packed[f"{PLACEHOLDER}{number}"]
        caches = [
            parameter(f"{name}_cache.{number}", ov.Type.dynamic, [-1, call.key_heads, BLOCK, width])
            for name, width in (("key", call.key_size), ("value", call.value_size))
        ]
        node = paged_attention(call, [place.input_value(i) for i in range(3)], caches, shared)
        (following,) = (user.get_node() for user in place.output(0).get_target_inputs())
        for user in following.output(0).get_target_inputs():
            user.replace_source_output(node.output(0))
    graph.add_parameters(new)
    _fold_scalars(graph)
    graph.validate_nodes_and_infer_types()
    return graph


def paged_attention(
    call: Attention, states: list[ov.Output], caches: list[ov.Output], rows: list[ov.Output]
) -> ov.Node:
    """One node.

    Args:
        call: what it computes.
        states: queries, keys, values, each `(tokens, heads · width)`.
        caches: pools of keys and values.
        rows: the inputs `ROWS`.

    Raises:
        MissingExtraError: this version of OpenVINO builds the node differently.
    """
    i32, f32 = np.int32, np.float32

    def value(x: float | list[int], kind: type = i32) -> ov.Output:
        return op.constant(np.array(x, dtype=kind)).output(0)

    none, none_f32 = value([]), value([], f32)
    past, begins, blocks, block_begins, longest = rows
    inputs = [
        *states, *caches, past, begins, blocks, block_begins,
        value(call.scale, f32), value(call.window), none_f32, longest,
        none,  # score_aggregation_window: must be empty, or passes of several rows fail
        none, none, none_f32, none_f32,  # rotated blocks, deltas, table; xattention threshold
        value(0), value(0), none_f32,  # xattention block size and stride; sinks
        value(0), none, none, none, none,  # adaptive eviction; its sizes and indices; ...
        value([], np.uint8), none,  # tree masks
    ]  # fmt: skip
    try:
        from openvino._pyopenvino.op import _PagedAttentionExtension

        node = _PagedAttentionExtension(inputs)
    except Exception as error:  # ImportError, TypeError or a check of the node's
        raise MissingExtraError(
            f"openvino {ov.__version__} builds its paged-attention node differently: "
            f"{str(error).splitlines()[0]}; install the pinned version: pip install "
            "'forerun[openvino]'"
        ) from error
    info = node.get_rt_info()  # the plug-in refuses caches of open shape without these
    info["num_k_heads"] = info["num_v_heads"] = call.key_heads
    info["k_head_size"], info["v_head_size"] = call.key_size, call.value_size
    return node


def _fold_scalars(graph: ov.Model) -> None:
    """Compute `Convert(Constant)` of one number: the plug-in does not, and fuses no rotary then."""
    for node in graph.get_ops():
        if node.get_type_name() != "Convert" or node.get_output_partial_shape(0).is_dynamic:
            continue
        source = node.input_value(0).get_node()
        if source.get_type_name() == "Constant" and source.data.size == 1:
            kind = node.get_output_element_type(0).to_dtype()
            folded = op.constant(source.data.astype(kind))
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(folded.output(0))
