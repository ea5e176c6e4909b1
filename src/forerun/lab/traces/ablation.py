"""What every mechanism of a controller is worth on a trace: replayed without it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from forerun.controllers import Controller
from forerun.costs import Costs
from forerun.lab.traces.replay import stream
from forerun.lab.traces.results import rate
from forerun.lab.traces.trace import Trace


def without(controller: Controller) -> dict[str, Controller]:
    """The controller without each of its mechanisms, by name: its fields, and those of policies in
    it, that declare a value at which they do nothing (`controllers.base.mechanism`)."""
    assert is_dataclass(controller), "a controller is one"
    out: dict[str, Controller] = {}
    for field in fields(controller):
        value = getattr(controller, field.name)
        changed: dict[str, Any] = {}
        if "off" in field.metadata:
            changed = {field.name: field.metadata["off"]}
        elif isinstance(value, Controller):
            changed = {f"{field.name}.{name}": inner for name, inner in without(value).items()}
        for name, new in changed.items():
            out[name] = replace(controller, **{field.name: new})
    return out


def worth(
    trace: Trace, controller: Controller, costs: Costs, seed: int = 0
) -> dict[str, dict[str, float]]:
    """What the total speed becomes without each mechanism: under "" the controller's own `speedup`;
    by mechanism `change`, `low` and `high`: speed without it over speed with it, less 1, with a
    95 % bootstrap interval over prompts. All prompts are requests of one engine, in a random order,
    so that what is carried counts."""
    order = np.random.default_rng(seed).permutation(trace.prompts)
    whole = stream(trace, controller, costs, order)
    out = {"": {"speedup": float(whole.plain_seconds.sum() / whole.seconds.sum())}}
    for name, less in without(controller).items():
        ratio = rate(whole.seconds, stream(trace, less, costs, order).seconds, seed)
        ends = {"change": "mean", "low": "low", "high": "high"}
        out[name] = {ours: ratio[theirs] - 1 for ours, theirs in ends.items()}
    return out
