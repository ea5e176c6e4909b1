"""Costs of early exits on this machine, to turn counts into seconds."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from forerun.drafters.specbound import SpecBoundDrafter
from forerun.engine import Completion, Sampling
from forerun.errors import PromptError
from forerun.lab.exits.exit_replay import ANNEALS, COUNTED, OwnText, Setting
from forerun.lab.traces.costs import least_squares
from forerun.model import Model
from forerun.runtime.base import Rows
from forerun.runtime.exits import Work
from forerun.runtime.heads import ExitHeads
from forerun.types import FloatArray

LIVE_TEXTS = 6  # texts that are decoded for the fixed costs
LIVE_TOKENS = 32  # most tokens of each


ExitCosts = dict[str, float]
"""Seconds at batch size 1 of one of what `ExitTrace.counts` counts: `layers`, one layer, for a
token or for several at once; `exits`, one exit: its head, and whether its confidence suffices;
`steps`, one token that climbs, beyond the above: the engine's work on it, a wider pass; `rounds`,
one round, beyond the above: the last projection, the engine; and `plain`, one plain token."""


def speculating(model: Model, rows: Rows, heads: ExitHeads, setting: Setting) -> Model:
    """`model` decoding with a setting of specbound; all such models may share `rows`."""
    drafter = SpecBoundDrafter(
        rows, heads, setting.layers, setting.threshold, setting.anneal, setting.width, setting.bonus
    )
    speculative = Model(rows, drafter, model.tokenizer)
    speculative.eos = model.eos
    return speculative


def measure(
    model: Model,
    rows: Rows,
    heads: ExitHeads,
    layers: Sequence[int],
    texts: Sequence[OwnText],
    width: int,
    tell: Callable[[int, int], None] | None = None,
) -> ExitCosts:
    """Fit costs to live rounds of a few of the texts that differ in what they run, with `rows` of a
    runtime for early exits of the same model; `tell` gets the texts done and their number.
    `PromptError` if no text lasts for two rounds."""
    sample = [*texts[:: max(1, len(texts) // LIVE_TEXTS)]][:LIVE_TEXTS]
    seen: list[tuple[list[float], float]] = []
    alone: list[float] = []
    for number, text in enumerate(sample):
        sampling = replace(text.sampling, max_new_tokens=min(LIVE_TOKENS, len(text.output)))
        for setting in _varied(layers, width):
            done = timed(speculating(model, rows, heads, setting), text, setting, sampling)
            for work, seconds in [*zip(done.work, done.times, strict=True)][1:]:
                ran, asked = work.calls("draft", "verify"), work.calls("exit")
                counted = [float(ran), float(asked), float(work.passes("step")), 1.0]
                seen.append((counted, seconds))
        alone += timed(model, text, None, sampling).times[1:]
        if tell is not None:
            tell(number + 1, len(sample))
    if not seen or not alone:
        raise PromptError("the texts are too short to time; give more prompts or more tokens")
    [plain] = _fit([([1.0], seconds) for seconds in alone])
    return {**dict(zip(COUNTED, _fit(seen), strict=True)), "plain": plain}


@dataclass(frozen=True)
class TimedText:
    """One generation; of each round, the first of which includes reading the prompt:"""

    completion: Completion
    times: list[float]  # seconds
    wall: list[float]  # the same in wall time
    work: list[Work]  # what it ran, if the model drafts for itself

    @property
    def pace(self) -> tuple[float, float] | None:
        """Seconds per token after the first round, also by the wall; None: there was no other."""
        tokens = sum(r.committed for r in self.completion.rounds[1:])
        return (sum(self.times[1:]) / tokens, sum(self.wall[1:]) / tokens) if tokens else None


def timed(
    model: Model, text: OwnText, setting: Setting | None, sampling: Sampling | None = None
) -> TimedText:
    """Decode a prompt with a model made by `speculating`, or plainly without a setting."""
    clock, counted = _clock(model.target.device), getattr(model.target.executor, "work", Work())
    marks, completion = [(clock(), time.perf_counter(), Work(counted))], None
    for event in model.stream(
        [text.prompt],
        controller="fixed(0)" if setting is None else setting.controller,
        sampling=text.sampling if sampling is None else sampling,
        plain=setting is None,
    ):
        marks.append((clock(), time.perf_counter(), Work(counted)))
        completion = event.completion
    assert completion is not None
    times, wall, work = zip(*marks, strict=True)
    rounds = [Work(after - before) for before, after in pairwise(work)]
    return TimedText(completion, np.diff(times).tolist(), np.diff(wall).tolist(), rounds)


def _clock(device: torch.device) -> Callable[[], float]:
    """On one thread of a CPU its own time, which other processes disturb little; else the wall's.
    The engine reads what a GPU computed at the end of every round, so the wall needs no waiting."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _varied(layers: Sequence[int], width: int) -> Iterator[Setting]:
    """Settings that differ in how many tokens climb, how often they stop, and how far they go."""
    middle = layers[len(layers) // 2]
    yield Setting((layers[0],), 0.0, ANNEALS[0], min(4, width))
    yield Setting((middle,), 0.5, ANNEALS[0], width)
    yield Setting((layers[0],), 0.9, ANNEALS[0], width)
    yield Setting(tuple(n for n in layers if n <= middle), 0.5, ANNEALS[0], min(4, width))
    yield Setting(tuple(layers), 0.8, ANNEALS[0], width)


def _fit(samples: list[tuple[list[float], float]]) -> list[float]:
    """Least squares with no cost below 0, without outliers (from other processes). Takes pairs of
    what was counted and the seconds it took; gives seconds per unit of each count."""
    columns: FloatArray = np.array([row for row, _ in samples], dtype=float)
    values: FloatArray = np.array([value for _, value in samples])
    keep = np.ones(len(values), dtype=bool)
    costs = np.zeros(columns.shape[1])
    for _ in range(4):
        costs = least_squares(columns[keep], values[keep])
        off = np.abs(values - columns @ costs)
        keep = off <= 4 * max(float(np.median(off)), 1e-9)
    return [float(v) for v in costs]
