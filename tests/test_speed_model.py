"""SpecBound's model of its speed against counts of layers really run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speed_model import Shape, expected_tokens, round_passes, speedup
from forerun.errors import SettingError
from forerun.runtime.exits import layers_of
from test_specbound import LAYERS, calm, specbound, texts


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("width", [0, 1, 6])
def test_closed_forms(rate: float, width: int) -> None:
    assert expected_tokens(rate, width) == pytest.approx((1 - rate ** (width + 1)) / (1 - rate))
    passes = round_passes(width, 8, 32)
    assert speedup(rate, width, 8, 32) == pytest.approx(expected_tokens(rate, width) / passes)
    assert expected_tokens(1.0, width) == width + 1
    if width:  # the round of the paper's figures has no bonus token
        without = expected_tokens(rate, width, bonus=False)
        assert without == pytest.approx((1 - rate**width) / (1 - rate))
        assert speedup(rate, width, 8, 32, bonus=False) == pytest.approx(without / passes)


def test_nothing_drafted_and_the_full_depth() -> None:
    assert round_passes(1, 32, 32) == 1.0  # one token all the way up: plain decoding
    assert speedup(0.0, 1, 32, 32) == 1.0
    with pytest.raises(SettingError, match="depth"):
        round_passes(2, 33, 32)
    with pytest.raises(SettingError, match="rate"):
        expected_tokens(1.5, 2)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_layers_of_rounds_that_all_exit_at_the_depth_bound(width: int) -> None:
    """Eq. 3 counts a round's calls, but for the last drafted token: fed from the embedding on.

    The paper's round has no bonus token. Ours feeds the last drafted token for it, D layers more.
    """
    depth, tokens = 2, 13
    fast = specbound(calm(), threshold=0.0, layers=str(depth), depth=depth, width=width)
    how: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True, "controller": "fixed(9)"}
    (done,) = fast.generate(texts(6), **how)
    work = layers_of(fast.target).work
    full = [r for r in done.rounds if r.drafted == width]
    rest = [r for r in done.rounds if r.drafted < width]  # the budget cut them
    calls = work.calls("draft", "verify")
    wanted = sum(LAYERS * round_passes(width, depth, LAYERS) + depth for _ in full)
    for r in rest:
        wanted += LAYERS * round_passes(r.drafted, depth, LAYERS) + depth if r.drafted else LAYERS
    assert calls == wanted
    shape = Shape(LAYERS, projection=1.5, exit_projection=0.25)
    cost = shape.layers_of(
        calls,
        work.passes("draft", "verify"),
        len(done.rounds),
        work.passes("project"),
        work.passes("exit"),
    )
    assert cost == calls + 1.5 * len(done.rounds) + 0.25 * work.passes("exit")


def test_what_tokens_that_share_a_layer_cost() -> None:
    # Three rounds of four tokens through twelve layers; a further token costs a tenth.
    shape = Shape(12, projection=2.0, widening=0.1)
    got = shape.layers_of(calls=36, passes=144, rounds=3, projections=12, exits=0)
    assert got == pytest.approx(36 * 1.3 + 2 * 3 * 1.3)
    assert shape.plain() == 14


def test_a_projection_is_a_small_part_of_a_large_model() -> None:
    small, large = Shape.of(12, 320, 832, 6144), Shape.of(32, 4096, 11008, 32000)
    assert small.projection == pytest.approx(1.627, abs=1e-3)
    assert large.projection == pytest.approx(0.648, abs=1e-3)
    assert Shape.of(12, 320, 832, 6144, head=1024).exit_projection == pytest.approx(0.271, abs=1e-3)
