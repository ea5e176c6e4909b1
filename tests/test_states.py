"""The states of a target's layers: those of the model run alone, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from forerun.errors import SettingError
from forerun.runtime import Rows, torch_rows
from forerun.runtime.states import States, decoder_layers
from forerun.testing import ScriptedModel
from marks import FAMILIES, slow_but
from tiny import CONFIGS, build, texts

DEPTHS = (1, 2, 3)


def openvino_rows(model: Any) -> Rows:
    load = pytest.importorskip("forerun.runtime.openvino.load")
    return Rows(load.from_model(model))


RUNTIMES: dict[str, Callable[[Any], Rows]] = {"torch": torch_rows, "openvino": openvino_rows}


def alone(model: Any, text: list[int]) -> torch.Tensor:
    """`(n, depths × H)` by the layers' outputs in a forward of one text."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, inputs, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in decoder_layers(model)
    ]
    with torch.no_grad():
        model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return torch.cat([out[0] for out in seen], -1)


@pytest.mark.parametrize(
    ("family", "runtime"),
    slow_but(product(CONFIGS, RUNTIMES), lambda family, _: family in FAMILIES),
)
def test_states_are_those_of_the_model_run_alone(family: str, runtime: str) -> None:
    """In a ragged batch, after a rollback, after rows were reordered, and for prompts in chunks."""
    model = build(family)
    rows, prompts = RUNTIMES[runtime](model), texts(5, 11, 3)
    states = rows.executor.tap(DEPTHS)
    assert (states.depths, states.width) == (DEPTHS, 32)

    def check(row: int, text: list[int], first: int) -> None:
        got = torch.as_tensor(states.read(row, first, len(text)))
        torch.testing.assert_close(got, alone(model, text)[first:], atol=5e-4, rtol=1e-3)

    rows.read(prompts, 20)  # all but the last token, of which no logits are wanted
    for row, prompt in enumerate(prompts):
        check(row, prompt[:-1], 0)
    rows.feed([[7], [8, 9], [4, 5, 6]], [1, 2, 3])
    grown = [p[:-1] + new for p, new in zip(prompts, ([7], [8, 9], [4, 5, 6]), strict=True)]
    for row, text in enumerate(grown):
        check(row, text, 1)
    assert len(states.read(0, 3, 9)) == 0, "places that were not fed"
    rows.rollback(2, 3)
    rows.keep([2, 0, 2])
    rows.best([[9, 9], [3], []], [1, 1, 0])
    check(0, [*grown[2][:3], 9, 9], 2)
    check(1, [*grown[0], 3], 3)
    check(2, grown[2], 2)
    assert rows.executor.tap(DEPTHS) is states
    rows.keep([])
    assert len(states.read(0, 1, 2)) == 0
    if (module := rows.executor.module()) is not None:
        assert not any(layer._forward_hooks for layer in decoder_layers(module)), (
            "nothing is left on it"
        )


def test_what_is_copied_in_has_no_states() -> None:
    rows, (text,) = torch_rows(build("llama")), texts(9)
    states = rows.executor.tap((2,))
    rows.read([text], 20)
    columns = rows.copy_out(0, 0, 6)
    rows.join(1, 20)
    rows.extend(1, columns)
    rows.feed([[], text[6:8]], [0, 1])
    known = states.read(1, 2, 8)
    torch.testing.assert_close(known, states.read(0, 6, 8), atol=2e-4, rtol=1e-4)


def test_states_held_are_those_that_were_not_rejected() -> None:
    states = States((1,), 1)
    for start, values in ((0, [0.0, 1, 2]), (3, [3.0]), (2, [20.0, 30, 40]), (9, [9.0])):
        states.note(0, start, torch.tensor(values)[:, None])
    assert states.read(0, 1, 4).flatten().tolist() == [1, 20, 30]
    assert states.read(0, 0, 10).flatten().tolist() == [9], "a gap: those before it do not count"
    assert states.read(0, 1, 5).flatten().tolist() == [1, 20, 30, 40]
    assert states.read(0, 3, 5).flatten().tolist() == [30, 40]
    assert len(states.read(0, 5, 9)) == 0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_depths_that_do_not_exist_are_refused(runtime: str) -> None:
    rows = RUNTIMES[runtime](build("llama"))
    for depths in ((), (0, 1), (2, 1), (1, 1), (4,)):
        with pytest.raises(SettingError, match="depths must rise from 1 to at most the target's 3"):
            rows.executor.tap(depths)


def test_runtimes_without_states_are_named() -> None:
    with pytest.raises(SettingError, match="does not give; use torch or openvino"):
        ScriptedModel(torch.eye(4)).tap((1,))
