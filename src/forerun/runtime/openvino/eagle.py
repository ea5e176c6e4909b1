"""The head of the drafter `eagle` as a graph, its weights in 8 bits.

What a token of it is given is as wide as the target's states of one and the head's output together:
the states of the token before it, or behind as many zeros the output. So a pass projects states,
too, for less than a call of torch's takes behind a pass of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op

from forerun.runtime.attention import Parents
from forerun.runtime.base import LOGITS, Best, Facts, Pieces
from forerun.runtime.drafts import WEIGHTS
from forerun.runtime.head_file import EPS, HEAD, ROTARY, HeadWeights
from forerun.runtime.openvino import store
from forerun.runtime.openvino.core import integers
from forerun.runtime.openvino.executor import OpenVINOExecutor, settings
from forerun.runtime.openvino.forms import Form
from forerun.runtime.openvino.nodes import GIVEN, STATES, attach
from forerun.runtime.openvino.placeholders import INPUTS, Attention, name, placeholder
from forerun.runtime.openvino.ports import replace as replaced
from forerun.runtime.openvino.weights import hold
from forerun.runtime.states import States
from forerun.signals import read

READ, AHEAD = 5, 3
"""Tokens of a row alone that a pass reads at most to go on by itself, and by how many it does: most
rounds keep no more, and draft no more than it writes then."""

NOTHING = read(np.empty((0, 1), np.float32), frozenset())


class HeadGraphs(OpenVINOExecutor):
    """Runs a head. What a row alone drafts greedily is of one pass, which writes `AHEAD` tokens
    more than it is asked for: four passes read the weights of two graphs from memory, and take
    twice as long."""

    ahead = AHEAD + 1

    _first, _read = 0, NOTHING
    """Place of the first token that the newest pass wrote, if it was such a pass, and what it says
    of all."""

    def _compile(self, graph: ov.Model) -> None:
        super()._compile(graph)
        options = settings(self.facts.precision, self.threads, self.group)
        self._ahead = Form(going_on(graph, AHEAD), self.facts, options, READ, AHEAD)
        self._forms.add([self._ahead])

    def best(
        self,
        starts: Sequence[int],
        pieces: Pieces,
        wanted: Sequence[int],
        signals: frozenset[str],
        parents: Parents = (),
    ) -> Best:
        if len(pieces) == 1 and wanted[0] == 1 and LOGITS not in signals:
            at = self._written(starts[0], pieces[0], signals)
            if at is not None:
                tokens, sound, values = self._read
                signs = {name: [[of[at]]] for name, of in values.items()}
                return Best([[tokens[at]]], signs, [[sound[at]]])
        self._read = NOTHING  # or another text's would go on behind a token that happens to fit
        return super().best(starts, pieces, wanted, signals, parents)

    def _written(self, start: int, piece: Sequence[int], signals: frozenset[str]) -> int | None:
        """Which of the tokens that the newest pass wrote follows a piece, or a new one's; None if
        that is too long."""
        assert self.states is not None
        (tokens, *_), at = self._read, start - self._first
        drafts = self.given[0].shape[1] == self.states.width
        if drafts and 0 <= at < len(tokens) - 1 and [*piece] == [tokens[at]]:
            return at + 1
        end = start + READ + AHEAD
        if len(piece) > READ or end > self.facts.limit:
            return None
        self._version += self.pool.cover([end])
        form = self._ahead
        form.give(self.given, self.states.width)
        seen = form.run([start], [piece], [1], [end], self.pool.tables, self._version)
        self._first, self._read = start + len(piece), read(seen, signals)
        self.states.note(0, self._first - 1, form.request.states().copy())
        return 0


def openvino_head(head: HeadWeights, facts: Facts, target: Any) -> HeadGraphs:
    """An executor of a head, on as many threads as its target, whose states it reads as they are.
    Its graph is in the store, too; nothing is left of the weights of `head` itself.
    """
    depths = len(target.states.depths)
    weights = store.of_files([Path(facts.name).expanduser() / WEIGHTS])
    entry = store.key(weights, f"head over {depths} states")
    if (stored := store.read(entry)) is None:
        stored = store.Stored(_graph(head, depths), facts, None)
        store.write(entry, stored)
    facts = replace(facts, executor="openvino", precision="int8")
    made = HeadGraphs(attach(stored.graph), facts, target.threads)
    made.states, made.entry = States((1,), head.states + head.width), entry
    head.tensors.clear()
    return made


def _graph(head: HeadWeights, depths: int) -> ov.Model:
    """As `runtime.eagle.EagleHead` computes, over `(tokens, 1)` ids."""
    own, width, count = head.tensors, head.width, head.states
    shapes = [-1, 1], [-1, 1], [-1], [-1, 1, count + width]
    types = [ov.Type.i64] * 3 + [ov.Type.f32]
    inputs = list(map(op.parameter, shapes, types))
    ids, positions, wanted, given = inputs
    first, last = integers(0), integers(-1)

    def product(x: ov.Output, name: str) -> ov.Node:
        return op.matmul(x, op.constant(own[f"{name}.weight"]), False, True)

    def rms(x: ov.Output, name: str = "") -> ov.Node:
        mean = op.reduce_mean(op.power(x, np.float32(2)), last, True)
        unit = op.multiply(x, op.divide(np.float32(1), op.sqrt(op.add(mean, np.float32(EPS)))))
        return op.multiply(unit, op.constant(own[f"{name}.weight"])) if name else unit

    def shaped(x: ov.Output, *shape: int) -> ov.Node:
        return op.reshape(x, integers(list(shape)), False)

    def split(x: ov.Output, *sizes: int) -> list[ov.Output]:
        return op.variadic_split(x, last, integers(list(sizes))).outputs()

    states, output = split(given, count, width)
    parts = shaped(rms(shaped(states, -1, depths, count // depths)), -1, 1, count)
    before = op.add(product(parts, "fuse"), output)
    token = op.gather(op.constant(own["embedding.weight"]), ids, first)
    x = product(op.concat([rms(token), rms(before)], -1), "input")
    heads = width // HEAD
    qkv = shaped(product(rms(x, "attention_norm"), "qkv"), -1, 3 * heads, HEAD)
    sizes = integers([2 * heads, heads])
    both, value = op.variadic_split(qkv, integers(1), sizes).outputs()
    rates = op.constant(np.array(ROTARY, np.float32))
    angles = op.multiply(op.convert(shaped(positions, -1, 1, 1), "f32"), rates)
    cos, sin = op.cos(angles), op.sin(angles)
    a, b = split(both, HEAD // 2, HEAD // 2)
    turned = [
        op.subtract(op.multiply(a, cos), op.multiply(b, sin)),
        op.add(op.multiply(b, cos), op.multiply(a, sin)),
    ]
    halves = integers([heads, heads])
    query, key = op.variadic_split(op.concat(turned, -1), integers(1), halves).outputs()
    call = Attention(heads, heads, HEAD, HEAD, HEAD**-0.5, 0)
    mixed = shaped(placeholder(call, 0, [query, key, value]), -1, 1, width)
    x = op.add(x, product(mixed, "out"))
    gate, up = split(product(rms(x, "mlp_norm"), "gate_up"), head.inner, head.inner)
    x = op.add(x, product(op.multiply(op.swish(gate), up), "down"))
    asked = rms(op.gather(shaped(x, -1, width), wanted, first), "norm")
    # A constant of its own can be rounded.
    logits = op.matmul(asked, op.constant(own["embedding.weight"][:-1]), False, True)
    written = op.pad(x, integers([0, 0, count]), integers([0, 0, 0]), "constant", np.float32(0))
    graph = ov.Model([op.result(logits), op.result(written)], inputs, "head")
    name(graph, (*INPUTS, GIVEN), "logits", [call])
    graph.outputs[1].get_tensor().set_names({STATES})
    hold(graph, eight_bits=True)
    return graph


def going_on(graph: ov.Model, count: int) -> ov.Model:
    """A head's graph that goes on by itself behind the token that is wanted, the only one: its
    outputs are of what follows that and `count` tokens that it writes, the likeliest each."""
    whole = graph.clone()
    given = {port.get_any_name(): port.get_node() for port in whole.inputs}
    first = op.constant(0)

    def of_wanted(port: ov.Output) -> ov.Node:
        return op.gather(port, given["wanted"], first)

    logits, outputs = (result.input_value(0) for result in whole.get_results())
    answers, states = [logits], [of_wanted(outputs).output(0)]
    place = of_wanted(given["position_ids"].output(0))
    for ahead in range(1, count + 1):
        now = op.add(place, op.constant(np.int64(ahead)))
        past = op.convert(op.reshape(now, op.constant([-1]), False), "i32")
        step = graph.clone()
        _read_outputs(step)
        own = given | {
            "input_ids": _likeliest(answers[-1]),
            "position_ids": now,
            "wanted": op.constant(np.zeros(1, np.int64)),
            GIVEN: states[-1].get_node(),
            "past_lens": past,
            "subsequence_begins": op.constant(np.array([0, 1], np.int32)),
        }
        for port in step.inputs:
            replaced(port.get_node().output(0), own[port.get_any_name()])
        logits, outputs = (result.input_value(0) for result in step.get_results())
        answers, states = [*answers, logits], [*states, outputs]
    results = [op.result(op.concat(parts, 0)) for parts in (answers, states)]
    return ov.Model(results, list(given.values()), "head")


def _read_outputs(step: ov.Model) -> None:
    """Leave out the projection of states, which are zeros behind a draft's first step."""
    (given,) = (port.get_node() for port in step.inputs if GIVEN in port.get_names())
    (parts,) = (user.get_node() for user in given.output(0).get_target_inputs())
    (added,) = (user.get_node() for user in parts.output(1).get_target_inputs())
    for user in list(added.output(0).get_target_inputs()):
        user.replace_source_output(parts.output(1))


def _likeliest(logits: ov.Output) -> ov.Node:
    """The id `(1, 1)` of the best of `(1, V)` logits, by sums: a `TopK` takes several times as
    long. Of equally good ones it is some id."""
    size = logits.get_partial_shape()[1].get_length()
    last = op.constant([1])
    is_best = op.convert(op.equal(logits, op.reduce_max(logits, last, True)), "f32")
    ids = op.constant(np.arange(size, dtype=np.float32)[None])
    best = op.reduce_sum(op.multiply(is_best, ids), last, True)
    return op.convert(op.minimum(best, op.constant(np.float32(size - 1))), "i64")
