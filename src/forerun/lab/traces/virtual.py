"""The real engine, governor and meter over a trace, under a clock that is made up.

Whether text ever arrives slower than plainly depends on noise and on passes that are slow at first,
which no replay at fixed costs shows, and no wall clock shows twice alike.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.checks import choice
from forerun.controllers import CONTROLLERS, Controller
from forerun.costs import Costs
from forerun.drafters.base import Prompts, Proposal, Step, StepContext, Texts
from forerun.drafters.stepping import step_by_step
from forerun.engine.meter import Meter
from forerun.engine.reporting import BEHIND
from forerun.lab.traces.batches import NoModel, Recorded, Replayed
from forerun.lab.traces.results import costs_for
from forerun.lab.traces.trace import Trace
from forerun.runtime.attention import Parents
from forerun.runtime.base import Pieces, Rows
from forerun.runtime.timing import WIDEST, Times
from forerun.types import FloatArray, IntArray

KINDS = ("noise", "cold")
NOISE = 0.08  # standard deviation of the logarithm of what a pass takes
SLOW, SLOWEST = 0.01, (2.0, 5.0)  # share of passes that are slow besides, and how many times
COLD, WARM_AFTER = 3.0, 40.0  # how much more a first pass takes, and passes until that is gone
READING = 0.2, 0.009  # the draft's reading of a prompt, and of each token, in plain passes
PREFILL = 0.03  # what each token of a prompt adds to the pass that reads it, likewise


class VirtualClock:
    """Seconds that only pass when a model runs, at true `costs` but for noise, and if the clock is
    of the kind "cold", for passes that are slow at first."""

    def __init__(self, costs: Costs, kind: str, seed: int) -> None:
        choice("clock", kind, KINDS)
        self.costs, self.now = costs, 0.0
        self._cold, self._random = kind == "cold", random.Random(seed)
        self._seen: Counter[Hashable] = Counter()
        mean = math.exp(NOISE**2 / 2) * (1 + SLOW * (sum(SLOWEST) / 2 - 1))
        self._scale = 1 / mean

    def __call__(self) -> float:
        return self.now

    def spend(self, kind: Hashable, seconds: float) -> None:
        """A pass of a kind, which takes these seconds on a quiet, warm machine."""
        factor = self._scale * math.exp(self._random.gauss(0, NOISE))
        if self._random.random() < SLOW:
            factor *= self._random.uniform(*SLOWEST)
        if self._cold:
            factor *= 1 + COLD * math.exp(-self._seen[kind] / WARM_AFTER)
        self._seen[kind] += 1
        self.now += seconds * factor


class _Target(NoModel):
    """Takes the time of its passes."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.behind_a_draft = False

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        costs, clock = self._clock.costs, self._clock
        unread = sum(len(p) - n for p, n in zip(pieces, wanted, strict=True) if len(p) > n)
        drafted = [max(n - 1, 0) for n in wanted]
        width = costs.width(drafted, len(pieces))
        level = next((level for level in costs.levels if level >= width), math.ceil(width))
        seconds = costs.verify_seconds(width) + costs.fixed + PREFILL * costs.plain * unread
        seconds += costs.tree * any(parents)
        if self.behind_a_draft and width == 1:
            seconds += costs.cold
        self.behind_a_draft = False
        clock.spend(("pass", len(pieces), level), seconds)
        return super().run(starts, pieces, wanted)


class _Drafter(Recorded):
    """Takes the time of its steps, and of reading what it has not followed."""

    def __init__(self, trace: Trace, clock: VirtualClock, target: _Target) -> None:
        super().__init__(trace)
        self._clock, self._target, self._rows = clock, target, Rows(NoModel())
        self.caches = (self._rows,)

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        super().join(prompts, room, sources)
        self._rows.join(len(prompts))

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._rows.keep(rows)

    def unread(self, row: int, text: Sequence[int]) -> int:
        return len(text) - self._rows.lengths[row]

    def rollback(self, row: int, length: int) -> None:
        self._rows.lengths[row] = min(self._rows.lengths[row], length)

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """The recorded run, behind what must be read."""
        costs, clock = self._clock.costs, self._clock
        lengths = self._rows.lengths
        unread = sum(
            len(text) - n
            for text, n in zip(texts, lengths, strict=True)
            if text is not None and len(text) - n - 1 > BEHIND
        )
        for row, text in enumerate(texts):
            lengths[row] = lengths[row] if text is None else len(text)
        began = clock.now
        if unread:
            clock.spend("reading", (READING[0] + READING[1] * unread) * costs.plain)
        self._target.behind_a_draft, self._first = True, not unread
        self.begin(texts)
        depth = self.trace.depth
        out = step_by_step(self.step, texts, [min(n, depth) for n in most], guide, began)
        for row, shown in enumerate(out.shown):
            lengths[row] += max(len(shown) - 1, 0)
        return out

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        costs = self._clock.costs
        self._clock.spend("step", costs.draft + costs.first * self._first)
        self._first = False
        return super().step(texts, greedy)


@dataclass(frozen=True)
class Timed:
    """Requests of one engine, one after another; arrays `(n,)` in their order."""

    seconds: FloatArray
    plain: FloatArray  # of plain decoding under a noise of its own
    again: FloatArray  # of plain decoding under another: what a ratio is that nothing made slower


def ratios(plain: FloatArray, seconds: FloatArray) -> dict[str, float]:
    """Plain seconds over seconds, `(n,)` both: of all, quantiles prompt by prompt, and the share of
    prompts that lost."""
    ratio, low = plain / seconds, {"min": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5}
    out = {name: float(np.quantile(ratio, at)) for name, at in low.items()}
    total = float(plain.sum() / seconds.sum())
    return {"total": total, **out, "below 0.98": float((ratio < 0.98).mean())}


def in_order(trace: Trace, seed: int) -> IntArray:
    """Numbers of all prompts, in a random order."""
    return np.random.default_rng(seed).permutation(trace.prompts)


def timed(
    trace: Trace, controller: str | Controller, costs: Costs, order: IntArray, kind: str, seed: int
) -> Timed:
    """Serve the prompts of `order`, `(n,)` numbers, one at a time by a made-up clock of a `kind`.
    The meter starts from passes of the true `costs`, as from those of a load."""
    made = CONTROLLERS.make(controller)
    clock = VirtualClock(costs_for(made, costs), kind, seed)
    engine = engine_under(clock, trace, made)
    spent, before = np.zeros(len(order)), 0.0
    for event in engine.requests(order):
        spent[event.request] += clock.now - before
        before = clock.now
    clocks = (VirtualClock(costs, kind, seed + other) for other in (1_000_003, 2_000_003))
    return Timed(spent, *(_plainly(trace, clock, order) for clock in clocks))


def engine_under(
    clock: VirtualClock, trace: Trace, controller: Controller, rows: int = 1
) -> Replayed:
    """An engine whose models are a trace and take a made-up clock's time, and whose meter starts
    from true passes of one row, as from those of a load."""
    true, target = clock.costs, _Target(clock)
    levels = tuple(map(round, true.levels))
    widths = sorted({1, 2, *levels, *(n + 1 for n in levels), 16, 32})
    passes = {(1, n): true.verify_seconds(n) for n in widths}
    reading = (READING[0] + READING[1] * WIDEST) * true.plain
    times = Times(passes, {(1, 1): true.draft, (1, WIDEST): reading}, set(passes))
    meter = Meter(true.ratio, times, levels)
    meter.clock = clock
    return Replayed(trace, controller, meter, rows, models=(target, _Drafter(trace, clock, target)))


def _plainly(trace: Trace, clock: VirtualClock, order: IntArray) -> FloatArray:
    """Seconds of plain decoding: a pass that reads the prompt, and one for every further token."""
    target, out = _Target(clock), np.zeros(len(order))
    for place, prompt in enumerate(order.tolist()):
        before = clock.now
        target.run([0], [[0] * int(trace.prompt_tokens[prompt])], [1])
        for _ in range(int(trace.sizes[prompt]) - 1):
            target.run([0], [[0]], [1])
        out[place] = clock.now - before
    return out
