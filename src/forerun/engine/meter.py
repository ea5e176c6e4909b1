"""What rounds cost: from the seconds of the load on, corrected by the clock of live rounds."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from forerun.costs import Costs, Passes, bounded
from forerun.drafters.base import Drafter
from forerun.runtime.base import Rows
from forerun.runtime.timing import WIDEST, PassTimer, Times, low

RATIO = 5.0  # cost ratio until a step was timed, unless the models' sizes say less
SLOPE = 0.02  # share of a plain pass that a further token adds, until passes were timed
SAMPLES = 12  # newest samples of a kind that count
LOADED = 3  # samples that the seconds of the load count for; those of another start count for one
EVERY = 8  # rounds between two summings of costs, which take 0.2 ms; at first, none: passes warm up
STALE = 64  # rounds after which the arm that was not chosen is timed anew
HELD_UP = 6.0  # times what it usually takes that reading is booked at most: cold, it takes that
BUSY, PAIRS = 0.2, 8
"""How much longer or shorter, in logarithms, a pass takes in the middle than the one of its kind
before, and of how many, for the machine to be busy: 0.08 under noise of 8 %."""
ABOVE = 0.83  # times that, in logarithms, by which the middle of passes is above their low quantile
GRAIN = 8  # tokens by which passes that rows share are told apart where there are no levels
WIDTHS = 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32  # of the tables where the executor has no levels


class Lap(NamedTuple):
    """The clock of one round of a batch."""

    rows: int
    width: float  # tokens a row that the target's pass was fed; see `Costs.width`
    steps: int = 0  # that the drafter took, but for one that read a prompt
    draft_seconds: float = 0.0  # of these steps
    first_step_seconds: float = 0.0  # of the first of them; 0 if that read a prompt
    free_steps: int = 0  # tokens that a chain drafted without a model
    free_seconds: float = 0.0  # of these
    verify_seconds: float = 0.0  # of the target's pass
    other_seconds: float = 0.0  # of all else, but for reading
    reading_seconds: float = 0.0  # in which the drafter read prompts
    reading_tokens: int = 0  # how many of their tokens
    read_tokens: int = 0  # tokens of prompts that the target's pass read besides
    tree: bool = False  # whether second choices were among its tokens
    compiled: bool = False  # whether a graph was compiled or captured for it

    @property
    def plain(self) -> bool:
        """Whether nothing was drafted, nor judged."""
        return not self.steps and self.width == 1

    @property
    def seconds(self) -> float:
        """Of the round, but for the drafter's reading."""
        return self.draft_seconds + self.free_seconds + self.verify_seconds + self.other_seconds


class Meter:
    """Learns `Costs` from laps, by the size of the batch.

    Samples are of a kind: plain passes, passes by width, draft steps. The first of a shape is none,
    for it may compile, capture or page in; a low quantile of the newest counts. What the load says
    of a kind is a sample, too, in proportion to the next narrower kind that rounds have timed: a
    table that is off is off for its neighbours. Plain passes are never derived from others.

    Args:
        ratio: target passes over draft steps, by the models' sizes.
        times: what passes took before the first round, if any were timed.
        levels: see `Executor.levels`.
        packed: whether the target's passes take the tokens of all rows packed.
        shared: likewise, see `Executor.shared_levels`; asked when a size first comes.
    """

    def __init__(
        self, ratio: float = RATIO, times: Times | None = None, levels: tuple[int, ...] = (),
        packed: bool = False, shared: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:  # fmt: skip
        self._ratio, self._levels, self._packed = min(ratio, RATIO), levels, packed
        self._shared = shared
        self._sizes: dict[int, _Samples] = {}
        self._timer: PassTimer | None = None
        self._rows = 0  # most rows whose passes were asked to be timed
        self._load(times or Times())
        self._given: Callable[[int], Costs] | None = None
        self.clock: Callable[[], float] = time.perf_counter  # seconds; a made-up clock in the lab
        self._rounds = self._ahead = 0
        new = (deque[float](maxlen=SAMPLES) for _ in range(4))
        self._reading, self._prefill, self._plain_off, self._draft_off = new
        """Seconds in which the drafter reads a token, those that it adds to a pass of the target;
        and seconds of rounds over what costs say, of plain ones and of those with a draft."""

    @classmethod
    def of(cls, target: Rows, drafter: Drafter) -> Meter:
        """One that can time these passes; see `warm`."""
        executor = target.executor
        levels, shared = executor.levels, lambda: executor.shared_levels
        meter = cls(drafter.ratio(target), None, levels, executor.packs, shared)
        meter._ahead = drafter.ahead
        if executor.timeable:
            meter._timer = PassTimer(target, drafter.model, lambda: meter.clock())
        return meter

    @classmethod
    def given(cls, costs: Costs | Callable[[int], Costs]) -> Meter:
        """One that always says the same, whatever it is told: costs, or those of so many rows."""
        meter = cls()
        meter._given = cache(
            lambda rows: replace(costs if isinstance(costs, Costs) else costs(rows), batch=rows)
        )
        return meter

    def warm(self, rows: int = 1) -> None:
        """Time passes of up to so many rows, and anew once all graphs are there; see `PassTimer`.
        There must be no rows."""
        timer = self._timer
        if timer is not None and (rows > self._rows or timer.outdated):
            self._rows = max(rows, self._rows)
            before, times = timer.whole, timer.time(self._rows)
            if before not in (None, timer.whole):  # rounds were of passes that took longer
                self._sizes = {}
            self._load(times)

    def expect(self, rows: int) -> None:
        """Likewise, before rows share passes, if those of one row were timed."""
        if self._loaded:
            self.warm(rows)

    def keep(self) -> None:
        """Correct what is kept for later starts by what rounds took; there must be no rows."""
        if self._timer is not None and self._loaded:
            known = {rows: self._summed(size) for rows, size in self._sizes.items() if size.rounds}
            self._timer.correct(known)

    def _load(self, times: Times) -> None:
        """Start from these, but for sizes that rounds have timed already."""
        self._loaded = bool(times.target)
        self._times = times if times.target else Times({(1, 1): 1.0, (1, 2): 1.0 + SLOPE})
        self._sizes = {rows: known for rows, known in self._sizes.items() if known.rounds}

    def costs(self, rows: int) -> Costs:
        """Of a batch of so many rows, ≥ 1."""
        if self._given is not None:
            return self._given(rows)
        samples = self._samples(rows)
        if samples.costs is None:
            samples.costs = self._summed(samples)
        return samples.costs

    def timed(self, rows: int) -> bool:
        """Whether seconds of the clock compare with the costs: a plain pass was timed."""
        return self._given is None and self._samples(rows).timed

    def booked(self, lap: Lap) -> tuple[float | None, float]:
        """Seconds of a round to compare with the costs, without what it takes the target to read
        prompts, and of the drafter's reading. None of rounds that do not compare, as before a plain
        pass, or one that reads, was timed, or of the first of a shape; none of rounds without a
        draft, which nobody books. 0 of reading before its seconds are known.

        Costs are what passes take undisturbed, and the clock's noise is no loss of drafts: of a row
        alone the seconds are divided by how far off costs plain rounds are in the middle; of a
        batch, whose rounds are few and long, they are what costs say times how far off rounds with
        a draft are in the middle. Not at first, where passes get faster: there a row alone goes by
        how far they are from one another, and what is slower yet than the load is booked in full.
        """
        if lap.plain and not lap.reading_tokens:
            return None, 0.0
        settled, noise, reading = self._rounds > STALE, 1.0, 0.0
        if lap.rows == 1 and not settled:
            noise = self._samples(1).noise
            if self._loaded:  # plain passes get warm all the same, later for every draft before
                load, now = self._times.target_seconds(1, 1), self.costs(1).verify_seconds(1)
                noise *= min(load / now, 1.0)
        elif lap.rows == 1 and self._plain_off:
            noise = median(self._plain_off)
        if self._reading and not lap.compiled:
            most = HELD_UP * self._reading_per_token * lap.reading_tokens
            reading = min(lap.reading_seconds, most) / noise
        prefill = _low(self._prefill) if lap.read_tokens else 0.0
        if prefill is None or not self._compares(lap):
            return None, reading
        expected, seconds = self._expected(lap), lap.seconds - lap.read_tokens * prefill
        self._draft_off.append(seconds / expected)
        if settled and lap.rows > 1:  # alone, slow rounds are few and paid in full
            seconds = expected * median(self._draft_off)
        return seconds / noise, reading

    @property
    def _reading_per_token(self) -> float:
        """Seconds in which the drafter reads a token: the least of several, as one that the machine
        held up would keep it from ever reading again."""
        if len(self._reading) > 1:
            return min(self._reading)
        return self._times.draft.get((1, WIDEST), 0.0) / WIDEST

    def _compares(self, lap: Lap) -> bool:
        """Whether seconds of a round compare with the costs."""
        return self.timed(lap.rows) and not self._samples(lap.rows).new(lap)

    def _expected(self, lap: Lap) -> float:
        """Seconds of a round by what costs say, but for reading."""
        costs = self.costs(lap.rows)
        seconds = costs.round_seconds(lap.steps, lap.width, lap.tree)
        return seconds + lap.free_steps * costs.free

    def add(self, lap: Lap) -> None:
        if self._given is not None or lap.verify_seconds <= 0:
            return
        if lap.reading_tokens and lap.reading_seconds and not lap.compiled:
            self._reading.append(lap.reading_seconds / lap.reading_tokens)
        if lap.plain and not lap.read_tokens + lap.reading_tokens and self._compares(lap):
            self._plain_off.append(lap.seconds / self._expected(lap))
        self._rounds += 1
        samples = self._samples(lap.rows)
        more = max(lap.verify_seconds - self.costs(lap.rows).verify_seconds(lap.width), 0.0)
        if not lap.read_tokens:
            samples.add(lap, more)
        elif samples.timed and not lap.compiled:
            self._prefill.append(more / lap.read_tokens)
            samples.costs = None

    def _samples(self, rows: int) -> _Samples:
        if rows not in self._sizes:
            apart, known = rows > 1 and self._packed, self._times if self._loaded else Times()
            levels = self._shared() if apart else self._levels
            self._sizes[rows] = _Samples(rows, levels, known, rows if apart else 1)
        return self._sizes[rows]

    def _passes(self, samples: _Samples) -> Passes:
        """Seconds by width. Those that rounds have not taken are as far off what the load says, in
        proportion to plain passes, as the next narrower ones that they have, or else wider ones."""
        rows, low, unit = samples.rows, samples.low, samples.unit
        known, loaded = self._times.target, partial(self._times.target_seconds, rows)
        plain = low("plain", loaded(1) if (rows, 1) in known else None) or loaded(1)
        scale, off = plain / loaded(1), dict[int, float]()
        for level in samples.judged:
            prior = scale * loaded(level / unit)
            timed = (rows, level / unit) in known
            off[level] = (low(level, prior if timed else None) or prior) / prior
        passes = [(1.0, plain)]
        for width in samples.widths:
            level = samples.level(width)
            near = max((n for n in off if n <= level), default=min(off, default=0))
            at = level / unit if level in samples.levels else width
            seconds = scale * loaded(at) * off.get(near, 1.0)
            passes.append((width, bounded(seconds, width, passes)))
        return tuple(passes)

    def _summed(self, samples: _Samples) -> Costs:
        rows, low, times = samples.rows, samples.low, self._times
        passes, draft = self._passes(samples), times.draft
        plain = passes[0][1]
        scale = plain / times.target_seconds(rows, 1)
        step, first = (draft[rows, n] * scale if (rows, n) in draft else None for n in (1, 2))
        guess = scale * times.draft_seconds(rows) if draft else plain / self._ratio
        ahead = self._ahead if rows == 1 else 0  # a pass takes as long for one of its tokens as all
        step = low("step", step) or guess / (ahead or 1)
        first = low("first", first) or (guess if ahead else step)
        if low("first") is None:  # a look shall be affordable that shows whether that is so
            first = min(first, plain)
        if low("step") is None:
            step = min(step, first)
        behind = low("behind")
        return Costs(
            step, passes, low("other") or 0.0, rows, first=max(first - step, 0.0),
            levels=samples.ends, ahead=ahead,
            cold=max(behind - plain, -step) if behind is not None else 0.0,
            free=low("free") or 0.0, reading=self._reading_per_token,
            prefill=_low(self._prefill), packed=self._packed, tree=low("tree") or 0.0,
            retime=samples.stale,
        )  # fmt: skip


class _Samples:
    """The newest samples in batches of one size, and the costs they amount to."""

    def __init__(self, rows: int, levels: tuple[int, ...], loaded: Times, unit: int) -> None:
        self.rows, self.levels, self.unit = rows, levels, unit
        """`unit`: what passes are of in tokens for each of their width, as levels are."""
        ends = {*levels, *(n + 1 for n in levels), *(n * unit for n in WIDTHS)}
        self.widths = [n / unit for n in sorted(ends) if n > unit]
        self.ends = tuple(n / unit for n in levels if n >= unit)
        self._of = defaultdict[str | int, deque[float]](lambda: deque(maxlen=SAMPLES))
        """By kind: a level of passes that judge, or a name."""
        taken = [width for size, width in loaded.taken if size == rows]
        self._shapes: set[str | int] = set(map(self.level, taken))
        if anew := max(taken, default=1) > 1:
            self._shapes.add("step")
        self.timed = (rows, 1) in loaded.target  # whether a plain pass was
        self._weight = LOADED if anew else int(self.timed)
        """Samples that the seconds of the load count for."""
        self.rounds = self._plain_at = 0
        self._judged_at = -STALE if self.timed and not anew else 0
        """Rounds, and the newest with a plain pass, and with one that judged: a table of another
        start is tried soon."""
        self.costs: Costs | None = None

    def level(self, width: float) -> int:
        """What passes of such a width are timed as."""
        tokens = math.ceil(width * self.unit - 1e-9)
        grain = min(self.unit, GRAIN)
        more = -(-tokens // grain) * grain
        return next((level for level in self.levels if level >= tokens), more)

    @property
    def judged(self) -> list[int]:
        """Levels of passes that judge that rounds have timed."""
        return sorted(kind for kind in self._of if isinstance(kind, int))

    def low(self, kind: str | int, loaded: float | None = None) -> float | None:
        """The low quantile of a kind, None without samples; `loaded` is what the load says."""
        live = self._of.get(kind, ())
        prior = [] if loaded is None else [loaded] * min(self._weight, SAMPLES - len(live))
        return _low([*prior, *live])

    @property
    def noise(self) -> float:
        """How far the middle of passes is above their low quantile where the machine is busy, seen
        by pairs of one kind, which passes that only get faster hardly tell apart; else 1."""
        passes = (of for kind, of in self._of.items() if kind in ("plain", "behind", *self.judged))
        steps = sorted(abs(math.log(b / a)) for of in passes for a, b in pairwise(of))
        busy = len(steps) >= PAIRS and steps[len(steps) // 2] > BUSY
        return math.exp(ABOVE * steps[len(steps) // 2]) if busy else 1.0

    @property
    def stale(self) -> str:
        """The kind of pass to be timed anew, `plain` or `judged`, if one is."""
        if not self.rounds:
            return ""
        if self.rounds - self._plain_at > STALE or not self.timed:
            return "plain"
        return "judged" if self.rounds - self._judged_at > STALE else ""

    def add(self, lap: Lap, more: float) -> None:
        """`more` is what the pass took more than expected, ≥ 0."""
        before, new = self.stale, self.new(lap)
        self.rounds += 1
        self._shapes |= self._shapes_of(lap)
        if lap.free_steps:
            self._of["free"].append(lap.free_seconds / lap.free_steps)
        if not new:
            self._add_known(lap, more)
        if before != self.stale or self.rounds < STALE or not self.rounds % EVERY:
            self.costs = None

    def _add_known(self, lap: Lap, more: float) -> None:
        """Those of a round whose shape is not new."""
        if not lap.steps and not lap.free_steps:
            self._of["other"].append(lap.other_seconds)
            self._plain_at = self.rounds
        kind: str | int = "behind" if lap.steps else "plain"
        if lap.width > 1:
            kind, self._judged_at = self.level(lap.width), self.rounds
        self._of["tree" if lap.tree else kind].append(more if lap.tree else lap.verify_seconds)
        self.timed |= kind == "plain"
        first = lap.first_step_seconds
        later, seconds = lap.steps - (first > 0), lap.draft_seconds - first
        if later > 0 and seconds > 0:
            self._of["step"].append(seconds / later)
        if first > 0:
            self._of["first"].append(first if later else lap.draft_seconds)

    def new(self, lap: Lap) -> bool:
        """Whether a pass or a step of a round was the first of its shape, or needed a graph."""
        return lap.compiled or not self._shapes_of(lap) <= self._shapes

    def _shapes_of(self, lap: Lap) -> set[str | int]:
        level = self.level(lap.width)
        return {f"tree{level}" if lap.tree else level, *["step"] * (lap.steps > 0)}


def _low(values: Collection[float]) -> float | None:
    return low(values) if values else None
