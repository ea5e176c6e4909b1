"""No policy makes a lossless run lossy, whatever it declares, looks at or leaves out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forerun.testing import ScriptedModel, engine
from marks import spread
from test_lengths import Nosy

TEXTS = 1000


@pytest.mark.parametrize(
    ("declared", "rule"),
    spread(2, [frozenset(), frozenset({"id"}), frozenset({"id", "top1"})], ["standard", "gumbel"]),
)
def test_tokens_left_out_for_what_they_are_bias_nothing(rule: str, declared: Any) -> None:
    """The target says a half; 5σ raises a false alarm in two of a million."""
    target = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    draft = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log()
    run = engine(ScriptedModel(target), ScriptedModel(draft), max_rows=50)
    how = {"max_new_tokens": 4, "temperature": 1.0}
    done = run([[i % 2] for i in range(TEXTS)], Nosy(declared), rule, **how)
    tokens = np.array([c.tokens for c in done])
    assert sum(c.stats.drafted for c in done) > TEXTS / 4
    for share in (tokens == 0).mean(0):
        assert abs(share - 0.5) < 5 * np.sqrt(0.25 / TEXTS)
