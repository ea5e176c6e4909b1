"""What a controller is worth without each of its mechanisms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from forerun.cli import app
from forerun.controllers import CONTROLLERS
from forerun.costs import Costs
from forerun.lab.traces.tune import without, worth
from made_traces import random_trace, trace_of


def test_every_mechanism_is_switched_off_alone():
    auto = CONTROLLERS.make("auto")
    others = without(auto)
    assert {"budget", "interest", "policy.weight"} <= others.keys()
    assert others["interest"].interest == 0
    assert others["interest"].policy == auto.policy
    assert others["policy.weight"].policy.weight == 1e9
    assert all(other != auto for other in others.values())
    assert without(CONTROLLERS.make("fixed(3)")) == {}


def test_what_is_spent_on_a_useless_draft_is_saved_without_interest():
    useless = worth(trace_of(np.zeros((6, 60))), CONTROLLERS.make("auto"), Costs.synthetic(3, 0.1))
    assert useless[""]["speedup"] < 1
    stingy = useless["interest"]
    assert stingy["low"] <= stingy["change"] <= stingy["high"]
    assert stingy["change"] > 0
    assert useless["prior"]["change"] == 0, "a rate of its own never comes to be"


@pytest.mark.parametrize(("spec", "words"), [("auto", "speed-up"), ("fixed(3)", "no mechanisms")])
def test_command(tmp_path, spec, words):
    random_trace(4, 20).write(tmp_path / "t.parquet")
    how = ["ablate", spec, str(tmp_path / "t.parquet"), "--costs", "c=4", "--costs", "c=9"]
    done = CliRunner().invoke(app, how)
    assert words in f"{done.output} {done.exception}"
    if spec == "auto":
        document = json.loads(CliRunner().invoke(app, [*how, "--json"]).output)
        assert document["costs"].keys() == {"c=4", "c=9"}
        assert {"change", "low", "high"} == document["costs"]["c=9"]["policy.carried"].keys()
