"""`auto` on pairs it was not tuned on: as good as the fixed length that is best in hindsight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.costs import Costs
from forerun.lab.traces.replay import stream
from forerun.lab.traces.trace import Trace
from marks import slow_but

FILES = Path(__file__).parent / "data"
"""`dev/pairs.py` made them."""


@pytest.mark.parametrize("name", slow_but(["captions", "code", "bytes"], "captions".__eq__))
def test_auto_on_a_poor_pair(name: str) -> None:
    trace, costs = Trace.read(FILES / f"pair-{name}.parquet"), Costs.synthetic(8, 0.02)
    order = np.random.default_rng(0).permutation(trace.prompts)

    def seconds(spec: str) -> float:
        return float(stream(trace, spec, costs, order).seconds.sum())

    best = min(seconds(f"fixed({length})") for length in (2, 3, 5))
    assert best / seconds("auto") >= 0.97
