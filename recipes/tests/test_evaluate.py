"""The statistics of the report, on cases worked out by hand."""

from __future__ import annotations

import pytest

from recipes.evaluate import block_efficiency, bootstrap, wilson


def test_statistics() -> None:
    assert block_efficiency([[True] * 10], 4) == 5  # two rounds of 4 + 1
    assert block_efficiency([[False] * 6], 4) == 1
    assert block_efficiency([[True, False, True, True]], 2) == 2  # (T F) (T T)
    low, high = wilson(50, 100)
    assert low == pytest.approx(0.404, abs=1e-3)
    assert high == pytest.approx(0.596, abs=1e-3)
    low, high = bootstrap(lambda at: sum(at) / len(at), 101)
    assert low < 50 < high
