"""Paged-attention nodes instead of placeholders.

The node's Python class is private and promises nothing from one minor version to the next, so the
extra pins the version and a test builds a graph of one node. The CPU plug-in writes each token's
keys and values into blocks of a pool that belongs to the caller and reads a row through its list
of blocks, so rows of any length share a pass, and what lies beyond a row's length is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as op

from forerun.errors import MissingExtraError, UnsupportedModelError
from forerun.runtime.openvino.placeholders import INPUTS, PLACEHOLDER, Attention, attentions
from forerun.runtime.openvino.ports import replace
from forerun.runtime.states import check_depths

FEW = 8  # numbers of constants that are shared
BLOCK = 32  # tokens per block: the only size the CPU plug-in has
ROWS = (
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)
"""Inputs that say which tokens belong to which row, in the node's order of inputs."""
KEYS = "key_cache."
"""The caches of keys have names that begin so and end in the number of the layer."""
TREES = "tree_mask", "tree_begins"
"""Inputs of passes that feed trees: a square per fed row, row after row, 1 where a token sees
another of its row's, padding included; and where each square begins. Without numbers: none is a
tree."""
STATES = "states"  # the output that `tap` adds
GIVEN = "given"
"""An input `(tokens, 1, D)` of heads on a target's states: what they read beside tokens."""
PADDED = "padded", "unpadded"
"""Inputs that `pad_attention` adds: the token that each token of attention is, and the token of
attention that each token is."""
SOURCE = "source_"
"""What is said of sources has names that begin so: rows, caches, and `SOURCE_LAST`."""
SOURCE_LAST, SOURCE_ROW = "source_last", "source_row"
"""`(rows, width)` keys and values, layer by layer, of each source's last token, and `(tokens,)` the
row of each token: every token counts as a row that reads the last token of its source, so that it
sees all of it and writes what is there already."""


def attach(graph: ov.Model) -> ov.Model:
    """Put paged-attention nodes where placeholders are; the graph is changed and returned.

    It gains the inputs `ROWS` and, per call of attention, `key_cache.N` and `value_cache.N` of
    `(blocks, heads, BLOCK, width)`, whose type is the plug-in's choice (`KV_CACHE_PRECISION`).
    Where calls are to sources, these have such inputs of their own, named `SOURCE` + the same.
    Unless a layer has a window it gains the inputs `TREES`, too: the node cuts windows by places of
    the cache, which in branches are not those of the text.
    """
    calls = attentions(graph)
    new: list[ov.Node] = []

    def parameter(name: str, kind: ov.Type, shape: list[int]) -> ov.Output:
        node = op.parameter(ov.PartialShape(shape), kind, name=name)
        node.output(0).get_tensor().set_names({name})
        new.append(node)
        return node.output(0)

    def rows(prefix: str) -> list[ov.Output]:
        shapes = [[] if name == "max_context_len" else [-1] for name in ROWS]
        named = zip(ROWS, shapes, strict=True)
        return [parameter(prefix + name, ov.Type.i32, shape) for name, shape in named]

    own, of_source, last = rows(""), [], iter(())
    tree: list[ov.Output] = []
    if not any(call.window for call in calls):
        tree = [parameter(TREES[0], ov.Type.u8, [-1]), parameter(TREES[1], ov.Type.i32, [-1])]
    if widths := [w for call in calls if call.source for w in _widths(call)]:
        of_source = rows(SOURCE)
        table = parameter(SOURCE_LAST, ov.Type.f32, [-1, sum(widths)])
        read = op.gather(table, parameter(SOURCE_ROW, ov.Type.i32, [-1]), op.constant(0))
        last = iter(op.variadic_split(read, op.constant(1), op.constant(widths)).outputs())
    packed = {n.get_friendly_name(): n for n in graph.get_ops()}
    for number, call in enumerate(calls):
        place = packed[f"{PLACEHOLDER}{number}"]
        prefix = SOURCE if call.source else ""
        sizes = -1, call.key_heads, BLOCK
        caches = [
            parameter(f"{prefix}{name}_cache.{number}", ov.Type.dynamic, [*sizes, width])
            for name, width in (("key", call.key_size), ("value", call.value_size))
        ]
        states = [place.input_value(i) for i in range(3)]
        if call.source:
            states[1:] = next(last), next(last)
        where = (of_source, []) if call.source else (own, tree)
        node = paged_attention(call, states, caches, *where)
        (following,) = (user.get_node() for user in place.output(0).get_target_inputs())
        replace(following.output(0), node)
    graph.add_parameters(new)
    _fold_scalars(graph)
    _share_constants(graph)
    graph.validate_nodes_and_infer_types()
    return graph


def pad_attention(graph: ov.Model) -> None:
    """Let attention be over padding that nothing else in a graph is over, which is changed: it
    gains the inputs `PADDED`."""
    padded, unpadded = (op.parameter([-1], ov.Type.i32, name=name) for name in PADDED)
    for node in (padded, unpadded):
        node.output(0).get_tensor().set_names({node.get_friendly_name()})
    first = op.constant(0)
    _enclose_attention(
        graph,
        lambda states: op.gather(states, padded, first),
        lambda mixed: op.gather(mixed, unpadded, first),
    )
    graph.add_parameters([padded, unpadded])
    graph.validate_nodes_and_infer_types()


def narrow_attention(graph: ov.Model) -> None:
    """Let attention be in bfloat16 and all else of a graph, which is changed, as it was; caches are
    what the plug-in is told (`KV_CACHE_PRECISION`)."""
    _enclose_attention(
        graph, lambda states: op.convert(states, "bf16"), lambda mixed: op.convert(mixed, "f32")
    )
    graph.validate_nodes_and_infer_types()


Insert = Callable[[ov.Output], ov.Node]  # makes the node that takes an output's place


def _enclose_attention(graph: ov.Model, before: Insert, behind: Insert) -> None:
    """Insert nodes where attention reads queries, keys and values, and behind it."""
    for node in graph.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            for at in range(3):
                node.input(at).replace_source_output(before(node.input_value(at)).output(0))
            users = list(node.output(0).get_target_inputs())
            mixed = behind(node.output(0)).output(0)
            for user in users:
                user.replace_source_output(mixed)


def tap(graph: ov.Model, depths: Sequence[int]) -> int:
    """Add an output `STATES`, `(tokens, 1, depths × H)`: the residual streams at these depths.

    They are found by the graph's shape alone, so that it may come from anywhere: going back from a
    layer's attention, or at the last depth from the logits, the residual stream is the first sum
    of two computed tensors that are not cut into heads.

    Args:
        graph: with paged-attention nodes; it is changed.
        depths: as of `States`.

    Returns:
        H.

    Raises:
        SettingError: no such depths.
        UnsupportedModelError: a residual stream is not found.
    """
    layers = sorted(
        (int(port.get_any_name().removeprefix(KEYS)), port.get_node())
        for port in graph.inputs
        if port.get_any_name().startswith(KEYS)
    )
    check_depths(depths, len(layers))
    streams = []
    for depth in depths:
        if depth == len(layers):
            streams.append(_residual(graph.outputs[0].get_node()))
        else:
            (attention,) = (u.get_node() for u in layers[depth][1].output(0).get_target_inputs())
            streams.append(_residual(attention.input_value(0).get_node()))
    widths = {stream.get_output_partial_shape(0)[-1].get_length() for stream in streams}
    if len(widths) != 1:
        raise UnsupportedModelError(f"residual streams of different widths: {sorted(widths)}")
    (width,) = widths
    flat = [op.reshape(stream, op.constant([-1, 1, width]), False) for stream in streams]
    states = op.concat(flat, 2)
    states.output(0).get_tensor().set_names({STATES})
    graph.add_results([op.result(states)])
    graph.validate_nodes_and_infer_types()
    return int(width)


def lookup(graph: ov.Model) -> ov.Model:
    """The part of a graph in which ids become embeddings."""
    ids = next(port for port in graph.inputs if port.get_any_name() == INPUTS[0])
    ports = [ids]
    for port in ports:
        for node in (user.get_node() for user in port.get_target_inputs()):
            if node.get_type_name() == "Gather" and node.get_output_element_type(0).is_real():
                return ov.Model([op.convert(node, "f32")], [ids.get_node()], "embeddings")
            ports += node.outputs()
    raise UnsupportedModelError("this graph looks up no tokens")


def _residual(node: ov.Node) -> ov.Node:
    """The nearest residual stream behind a node; see `tap`."""
    nodes, seen = [node], {node.get_name()}
    for at in nodes:  # and those that are added meanwhile
        if at.get_type_name() == "Add" and _is_residual(at):
            return at
        for behind in (port.get_node() for port in at.input_values()):
            if behind.get_name() not in seen:
                seen.add(behind.get_name())
                nodes.append(behind)
    raise UnsupportedModelError("this graph has no residual stream that could be found")


def _is_residual(node: ov.Node) -> bool:
    *first, width = node.get_output_partial_shape(0)
    if width.is_dynamic or width.get_length() == 1:  # a norm's variance
        return False
    if any(size.is_static and size.get_length() != 1 for size in first):
        return False  # heads
    if len(first) > 2 and sum(size.is_dynamic for size in first) > 1:
        return False  # tokens and heads
    return not any(_is_constant(port.get_node()) for port in node.input_values())


def _is_constant(node: ov.Node) -> bool:
    while node.get_type_name() in ("Convert", "Multiply", "Reshape", "Unsqueeze", "Subtract"):
        if not all(_is_constant(port.get_node()) for port in node.input_values()):
            return False
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _widths(call: Attention) -> tuple[int, int]:
    """Of a token's keys and values, all heads."""
    return call.key_heads * call.key_size, call.key_heads * call.value_size


def paged_attention(
    call: Attention,
    states: list[ov.Output],
    caches: list[ov.Output],
    rows: list[ov.Output],
    tree: Sequence[ov.Output] = (),
) -> ov.Node:
    """One node; states are `(tokens, heads · width)`, `rows` the inputs `ROWS`, `tree` `TREES`.

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
        *(tree or (value([], np.uint8), none)),
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
            replace(node.output(0), folded)


def _share_constants(graph: ov.Model) -> None:
    """Let equal ones of a few numbers, like shapes and axes, be one: of SmolLM2 1,450 of 4,400
    nodes, and a fifth of the time of compiling."""
    kept: dict[tuple[str, tuple[int, ...], bytes], ov.Node] = {}
    for node in graph.get_ops():
        if node.get_type_name() != "Constant":
            continue
        kind, shape = node.get_output_element_type(0), tuple(node.get_output_shape(0))
        if math.prod(shape) <= FEW and kind in (ov.Type.i32, ov.Type.i64, ov.Type.f32):
            same = kept.setdefault((str(kind), shape, node.data.tobytes()), node)
            if same is not node:
                replace(node.output(0), same)
