"""Folders of exported OpenVINO models, as OpenVINO GenAI's users hold them, as graphs of ours.

Their attention reads a cache that the model keeps inside; here it becomes the placeholders of
`export`, and the head is over wanted tokens only. Weights stay in the form they have.
"""

from collections import Counter
from functools import partial
from math import prod
from pathlib import Path

import openvino as ov
import openvino.opset15 as op

from forerun.errors import ModelError, UnsupportedModelError
from forerun.runtime.attention import windows_of
from forerun.runtime.base import Facts, identity
from forerun.runtime.load import EXPORTED, read_config, saved_generation_config
from forerun.runtime.openvino.core import core, integers, reason
from forerun.runtime.openvino.placeholders import Attention, placeholder
from forerun.runtime.openvino.ports import adopt, before, head, last_two, replace
from forerun.runtime.support import context_limit, end_of_text, refusal

PRECISIONS = {"u4": "int4", "i4": "int4", "u8": "int8", "i8": "int8", "f16": "float16",
              "bf16": "bfloat16", "f32": "float32"}  # fmt: skip
"""Types of weights, and how `Facts` name them."""
_MOVES = "Reshape", "Broadcast", "Unsqueeze", "Convert"


def graph_of(folder: Path) -> tuple[ov.Model, Facts]:
    """A graph as `export` makes it of what a folder holds, and what there is to know of it;
    `ModelError` if that is damaged, `UnsupportedModelError` if it is of a kind that is not
    served."""
    called = str(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{called!r} lacks config.json; copy that of the model it was made from")
    config = read_config(folder)
    try:
        graph = core().read_model(folder / EXPORTED)
    except RuntimeError as error:  # OpenVINO has no other
        raise ModelError(f"{str(folder / EXPORTED)!r} cannot be read: {reason(error)}") from error
    text = config.get_text_config(decoder=True)
    if why := refusal(config, encoders=False):
        raise UnsupportedModelError(f"{called!r}: {why}")
    if windows_of(config):
        raise UnsupportedModelError(
            f"{called!r}: its attention has a sliding window, which an exported graph does not "
            "say; use the checkpoint it was made from, or a GGUF file"
        )
    ports = {name: port for port in graph.inputs for name in port.get_names()}
    if missing := {"input_ids", "position_ids"} - set(ports):
        raise UnsupportedModelError(
            f"{called!r} is no exported language model: it has no input {', '.join(missing)}"
        )
    counts: Counter[str] = Counter()  # of numbers of matrices
    for node in graph.get_ops():
        kind = PRECISIONS.get(node.get_output_element_type(0).get_type_name())
        if kind and node.get_type_name() == "Constant" and len(node.get_output_shape(0)) > 1:
            counts[kind] += prod(node.get_output_shape(0))
    logits = graph.get_results()[0].input_value(0)
    norm = _norm(head(logits))
    made, calls = adopt(
        graph,
        [ports["input_ids"], ports["position_ids"]],
        [1, -1],
        partial(_mark, called=called),
        logits,
        text.num_hidden_layers,
        called,
    )
    vocabulary = last_two(logits)[1]
    return made, Facts(
        vocab_size=vocabulary,
        limit=context_limit(config),
        layers=len(calls),
        weights=sum(counts.values()) - vocabulary * text.hidden_size,
        token_bytes=sum(4 * c.key_heads * (c.key_size + c.value_size) for c in calls),
        eos=end_of_text(saved_generation_config(called)) or end_of_text(config),
        precision=counts.most_common(1)[0][0],
        name=called,
        identity=norm,
    )


def _mark(node: ov.Node, calls: list[Attention], called: str) -> None:
    """Put a placeholder where attention to a cache is."""
    query, out = node.input_value(0), node.output(0)
    key, value = (_new(node.input_value(i), called) for i in (1, 2))
    heads, key_heads = (list(port.get_partial_shape())[1].get_length() for port in (query, key))
    size, value_size = last_two(key)[1], last_two(value)[1]
    scale = size**-0.5
    if node.get_input_size() > 4:
        scale = float(before(node.input_value(4), "Convert").get_node().data)
    call = Attention(heads, key_heads, size, value_size, scale, 0)
    swap = integers([0, 2, 1, 3])
    packed = placeholder(
        call, len(calls), [op.transpose(port, swap).output(0) for port in (query, key, value)]
    )
    calls.append(call)
    shape = integers([1, -1, heads, value_size])
    replace(out, op.transpose(op.reshape(packed, shape, False), swap))


def _new(port: ov.Output, called: str) -> ov.Output:
    """What a pass adds to the cache that attention reads: `(1, heads, tokens, width)`."""
    joined = before(port, *_MOVES).get_node()
    past = joined.get_type_name() == "Concat" and before(joined.input_value(0), "Gather")
    if not past or past.get_node().get_type_name() != "ReadValue":
        raise UnsupportedModelError(
            f"{called!r}: its attention reads no cache of its own; export it with its cache "
            "(optimum's task text-generation-with-past)"
        )
    return joined.input_value(1)


def _norm(product: ov.Node) -> str:
    """See `Facts.identity`: of the weights that the head's input was multiplied by."""
    scaled = before(product.input_value(0), "Convert").get_node()
    if scaled.get_type_name() == "Multiply":
        for i in (0, 1):
            node = before(scaled.input_value(i), "Convert").get_node()
            if node.get_type_name() == "Constant" and prod(node.get_output_shape(0)) > 1:
                return identity(node.data.reshape(-1))
    return ""
