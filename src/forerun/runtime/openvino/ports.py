"""Walking and mending a graph."""

from __future__ import annotations

import openvino as ov


def before(port: ov.Output, *types: str) -> ov.Output:
    """What came before nodes of these types, which only move, repeat or round numbers."""
    while port.get_node().get_type_name() in types:
        port = port.get_node().input_value(0)
    return port


def replace(port: ov.Output, by: ov.Node) -> None:
    """Let all that read this port read another node."""
    for user in list(port.get_target_inputs()):
        user.replace_source_output(by.output(0))


def last_two(port: ov.Output) -> tuple[int, int]:
    """Its last two sizes, the first of them −1 if it varies."""
    first, last = list(port.get_partial_shape())[-2:]
    return first.get_length() if first.is_static else -1, last.get_length()
