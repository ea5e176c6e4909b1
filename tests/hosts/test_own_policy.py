"""A policy of somebody's own package runs wherever ours do; in vLLM, see `test_vllm.py`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.hosts.batch_lengths import BatchLengths, judged_round
from forerun.lab.traces.replay import replay
from forerun.model import Model, drafter_spec
from forerun.runtime.torch_executor import torch_rows
from forerun.transformers import attach
from hosts import own_policy
from made_traces import trace_of
from tiny import build, texts

SPEC = "alternating(one=3)"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own_policy.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(CONTROLLERS, "_plugins", None)
    yield
    CONTROLLERS._plugins = None


def test_in_the_engine_and_behind_transformers() -> None:
    model, prompt = build("llama"), torch.tensor(texts(9))
    plain = model.generate(prompt, max_new_tokens=24, do_sample=False)
    target = torch_rows(model)
    ours = Model(target, drafter_spec("suffix").build(target, None))
    done = ours.generate([prompt[0].tolist()], controller=SPEC, max_new_tokens=24)[0]
    assert [*prompt[0].tolist(), *done.tokens] == plain[0].tolist()
    speculative = attach(model, "suffix", SPEC)
    assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), plain)
    [behind] = speculative.last
    assert max(r.drafted for r in behind.rounds[::2]) == 3
    assert max(r.drafted for r in behind.rounds[1::2]) == 1
    assert [r.drafted for r in behind.rounds] == [r.drafted for r in done.rounds]


def test_in_replay_and_in_another_engines_batch() -> None:
    played = replay(trace_of(np.ones((2, 20))), SPEC, Costs.synthetic(5))
    assert played.committed.tolist() == [20, 20]
    assert (played.rounds < 20).all()
    lengths = BatchLengths(SPEC, most=8)
    lengths.join("a", None, certain=True)
    asked = []
    for _ in range(4):
        asked.append(lengths.limits({"a": 50}, 100.0)["a"])
        lengths.observe({"a": judged_round(asked[-1], 0, asked[-1])}, 100.0, asked[-1], None)
    assert asked == [3, 1, 3, 1]
