"""The head of the drafter `eagle` as a graph, its weights in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openvino as ov
import torch
import torch.nn.functional as F

from forerun.runtime.base import Facts
from forerun.runtime.eagle import HEAD, EagleHead
from forerun.runtime.openvino import store
from forerun.runtime.openvino.executor import OpenVINOExecutor
from forerun.runtime.openvino.export import INPUTS, Attention, convert, name
from forerun.runtime.openvino.nodes import GIVEN, STATES, attach
from forerun.runtime.openvino.weights import hold
from forerun.runtime.states import States

_TOKENS = 7  # of the example that is traced


class _Step(torch.nn.Module):
    """The head over `(tokens, 1)` ids, its projection over wanted tokens only."""

    def __init__(self, head: EagleHead, calls: list[Attention]) -> None:
        super().__init__()
        self.head, self.calls = head, calls
        self.table = head.embedding.weight[:-1].clone()  # a constant of its own can be rounded

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        wanted: torch.Tensor,
        states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.head.layer(input_ids, states, position_ids, self._attend)
        return F.linear(self.head.norm(x[:, 0][wanted]), self.table), x

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = self.head.form.heads
        self.calls.append(Attention(heads, heads, HEAD, HEAD, HEAD**-0.5, 0))
        mixed: torch.Tensor = torch.ops.forerun.paged(q, k, v, len(self.calls) - 1)
        return mixed.transpose(1, 2)


def openvino_head(head: EagleHead, facts: Facts, target: Any) -> OpenVINOExecutor:
    """An executor of a head, on as many threads as its target; see `HeadExecutor`. Of the weights
    of `head` itself only its projection of states is left.

    Its graph is in the store, too: what tracing imports takes 2 s and more memory than the head.
    """
    entry = store.key(store.of_model(head), "head")
    if (stored := store.read(entry)) is None:
        stored = store.Stored(_graph(head), facts, None)
        store.write(entry, stored)
    facts = replace(facts, executor="openvino", precision="int8")
    made = OpenVINOExecutor(attach(stored.graph), facts, target.threads)
    made.states, made.entry = States((1,), head.width), entry
    for part in head.children():
        if part is not head.fuse:
            part.to("meta")
    return made


def _graph(head: EagleHead) -> ov.Model:
    width = head.width
    places = torch.arange(_TOKENS)
    example = places[:, None], places[:, None], places[1:], torch.zeros(_TOKENS, 1, width)
    calls: list[Attention] = []
    graph: ov.Model = convert(_Step(head, calls), example, calls)
    name(graph, (*INPUTS, GIVEN), "logits", calls)
    graph.outputs[1].get_tensor().set_names({STATES})
    graph.inputs[len(INPUTS)].get_node().set_partial_shape(ov.PartialShape([-1, 1, width]))
    graph.validate_nodes_and_infer_types()
    hold(graph, eight_bits=True)
    return graph
