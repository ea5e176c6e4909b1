"""What rounds cost, learned from the clock of live ones, per size of the batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from forerun.costs import Costs, Passes, bounded
from forerun.drafters.base import Drafter
from forerun.runtime.base import Rows

RATIO = 5.0
"""Cost ratio until a round was timed, unless the models' sizes say less."""
WARM_STEP = 0.7
"""A later draft step over a round's first, until one was timed."""
PLAIN_GUESS = 0.75
"""A plain pass over one that judges a token, until one was timed: low, so that one is tried."""
SLOPE = 0.02
"""Share of a pass that each further token adds, until widths were compared."""
SLOPE_WEIGHT = 20.0
"""Prior weight of that, in squared tokens of difference in width."""
MOST_JUMP = 0.3
"""Most by which the difference of two passes is taken to be off what their widths make expected,
as a share of the shorter: more is an outlier."""
TIMINGS = 7
"""Timings whose median counts: outliers of a shared machine do not."""
PLAIN_TIMINGS = 3 * TIMINGS
"""Timings of plain rounds whose lower quartile counts: the first ones behind a prompt or a draft
find its weights in the caches."""
CATCH_UPS = 3
"""Likewise of reading what the drafter had not followed, which may have been a prompt."""
REFRESH = 8
"""Rounds from one summing up to the next, once there are so many timings."""
ENOUGH = 2
"""Timings of rounds with a draft before costs mean anything: the lower of two is no outlier."""
MOST_SLOW = 2.0
"""Times what is expected that drafting is taken to cost at most until it was timed more often: a
pass by those timed when the model was loaded, a step by the models' sizes, a round's first step by
later ones. A slow one is rare, but would end drafting, so its timing, too, for hundreds of
rounds."""
STALE = 256
"""Rounds after which the next draft replaces what drafting took, and so is followed by another. A
machine that was busy when it was first timed would else keep a row from drafting for good."""
FADE = 0.9
"""Share of what was seen of reading, and of requests, that still counts at the next."""
LEAST_CHANGE = 0.1
"""Share by which reading must change to be charged anew: all that follows from costs is, too."""
MOST_SIZES = 6
"""Doublings of the batch beyond which sizes are taken together."""


class Lap(NamedTuple):
    """The clock of one round of a batch. Rounds that read prompts have none."""

    rows: int
    width: int
    """The longest draft: most tokens judged in a row besides the one that always is."""
    steps: int = 0
    """Steps the drafter took, but for one that caught up."""
    draft_seconds: float = 0.0
    """Of these steps."""
    first_step_seconds: float = 0.0
    """Of the first of them; 0 if that caught up."""
    verify_seconds: float = 0.0
    """Everything else of the round."""
    catch_up_seconds: float = 0.0
    """Of reading what the drafter had not followed."""


class Meter:
    """Learns `Costs` from laps.

    A batch of so many rows costs what batches up to the next power of two did; of a size that is
    new, what is known of the nearest.

    Args:
        ratio: target passes over draft steps by the models' sizes, > 0. A draft as large as the
            target is not tried for many tokens just to be timed.
        passes, levels: of the target's executor; see there.
        alternates: whether the text decides when there is a draft.
        shares_layers: whether a pass leaves out what the draft before it has run.
    """

    def __init__(
        self,
        ratio: float = RATIO,
        passes: Passes = (),
        levels: tuple[int, ...] = (),
        alternates: bool = False,
        shares_layers: bool = False,
    ) -> None:
        self._ratio, self._alternates = min(ratio, RATIO), alternates
        self._shares_layers = shares_layers
        self._shape = Costs(1.0, passes, levels=levels) if passes else None
        self._sizes: dict[int, _Timings] = {}
        self._given: Callable[[int], Costs] | None = None
        self._caught_up = 0.0, 0.0
        """Seconds of drafters' reading, and tokens, fading."""
        self._finished = 0.0, 0.0
        """Tokens of prompts that joined, and of outputs, fading."""
        self._charged: dict[int, tuple[Costs, Costs]] = {}
        """Per batch the costs in force, without the drafter's reading and with it."""

    @classmethod
    def of(cls, target: Rows, drafter: Drafter) -> Meter:
        """One for these."""
        executor = target.executor
        alternates = not drafter.has_distribution
        ratio, shares = drafter.ratio(target), drafter.shares_layers
        return cls(ratio, executor.timed, executor.levels, alternates, shares)

    @classmethod
    def given(cls, costs: Costs | Callable[[int], Costs]) -> Meter:
        """One that always says the same, whatever it is told: costs, or those of so many rows."""
        meter = cls()
        meter._given = (lambda _: costs) if isinstance(costs, Costs) else costs
        return meter

    def costs(self, rows: int) -> Costs:
        """Of a batch of so many rows, ≥ 1."""
        if self._given is not None:
            return self._given(rows)
        costs = self._timings(rows).costs
        (prompts, outputs), (seconds, tokens) = self._finished, self._caught_up
        if not seconds or not outputs:
            return costs
        reading = rows * seconds / tokens * prompts / outputs
        before, charged = self._charged.get(rows, (None, costs))
        if before is not costs or abs(reading - charged.reading) > LEAST_CHANGE * charged.reading:
            charged = replace(costs, reading=reading)
            self._charged[rows] = costs, charged
        return charged

    def wants(self, rows: int) -> Literal["draft", "plain"] | None:
        """The kind of round that must be timed before costs mean anything, if there is one.

        Some with a draft first; and where a batch of a size is new a plain one, to compare with.
        """
        if self._given is not None:
            return None
        timings = self._timings(rows)
        known = any(timings.enough for timings in self._sizes.values())
        if not timings.enough and (timings.judged or not known):
            return "draft"
        new = rows > 1 and not timings.plain
        return "plain" if new else None

    def tell(self, lap: Lap) -> None:
        """Learn from a round. One that drafted and had nothing judged is of neither kind."""
        if self._given is not None or lap.verify_seconds <= 0:
            return
        timings = self._timings(lap.rows)
        if lap.catch_up_seconds:
            timings.catch_up.append(lap.catch_up_seconds)
        if lap.width or not lap.steps:
            timings.add(lap)
        else:
            timings.looked(lap)

    def caught_up(self, rows: int, seconds: float, tokens: int) -> None:
        """Learn from a draft step in which so many tokens were read that were not followed."""
        extra = seconds - self._timings(rows).costs.draft
        if tokens and extra > 0:
            seen, count = self._caught_up
            self._caught_up = FADE * seen + extra, FADE * count + tokens

    def finished(self, prompt: int, output: int) -> None:
        """Learn from a request that ended: tokens of its output, and of its prompt if it joined
        while others ran; of those that begin together all is read before anything is decided."""
        prompts, outputs = self._finished
        self._finished = FADE * prompts + prompt, FADE * outputs + output

    def _timings(self, rows: int) -> _Timings:
        size = min((rows - 1).bit_length(), MOST_SIZES)
        timings = self._sizes.get(size)
        if timings is None:
            shape = None if size else self._shape
            timings = self._sizes[size] = _Timings(
                size, self._ratio, shape, not (size or self._alternates), self._shares_layers
            )
        if not timings.known:
            timed = [other for other in self._sizes.values() if other.known]
            if timed:
                timings.like(min(timed, key=lambda other: abs(other.size - size)))
        return timings


class _Timings:
    """The newest timings in batches of one size, and the costs they amount to.

    Of a row alone, plain decoding is compared with drafting, each `going_on`: what a round takes
    after one of the other kind is more, as its graph and weights have left the caches. So such a
    round counts only as long as there is no other, or if it was faster than what is known. Drafts
    after a long time without replace what was known. Rows together, and drafts that come when the
    text repeats itself, change between the kinds anyway.
    """

    def __init__(
        self, size: int, ratio: float, shape: Costs | None, going_on: bool, shares_layers: bool
    ) -> None:
        self.size, self._shape, self._going_on = size, shape, going_on
        self._shares_layers = shares_layers
        self.step: deque[float] = deque(maxlen=TIMINGS)
        self.first: deque[float] = deque(maxlen=TIMINGS)
        self.plain: deque[float] = deque(maxlen=PLAIN_TIMINGS)
        self.judged: deque[tuple[int, float]] = deque(maxlen=TIMINGS)
        """Width and seconds."""
        self.behind: deque[float] = deque(maxlen=TIMINGS)
        """Plain passes behind drafts that were thrown away."""
        self.catch_up: deque[float] = deque(maxlen=CATCH_UPS)
        """Readings of what the drafter had not followed."""
        self._of_level: dict[int, deque[tuple[int, float]]] = {}
        """Number of the lap and seconds of passes, by the level they are of."""
        self._drafting: bool | None = None
        """Whether the newest round had a draft."""
        self._settled: set[bool] = set()
        """The kinds, likewise, of which one was timed after another."""
        self._age = 0
        """Rounds since the newest draft that counted."""
        self._newest: tuple[int, float] | None = None
        self._slope_sums = SLOPE_WEIGHT * SLOPE, SLOPE_WEIGHT
        self._slope, self._base, self._step, self._ratio = SLOPE, 1.0, 1 / ratio, ratio
        self._laps = 0
        self.costs = self._summed()

    @property
    def known(self) -> bool:
        """Whether a round was timed."""
        return self._newest is not None

    @property
    def enough(self) -> bool:
        """Whether drafting was timed well enough to decide by it."""
        return len(self.judged) >= (1 if self.size else ENOUGH)

    def like(self, other: _Timings) -> None:
        """Take costs from another size, but for the plain pass, and the slope: that is taken to be
        between that of a pass that reads weights, where it doubles with the batch, and that of one
        that computes, where it stays."""
        self._slope = min(other._slope * 2 ** ((self.size - other.size) / 2), 1.0)
        self._slope_sums = SLOPE_WEIGHT * self._slope, SLOPE_WEIGHT
        self._base, self._step = other._base, other._step
        self.costs = self._summed()

    def looked(self, lap: Lap) -> None:
        """A round whose draft was thrown away."""
        self._drafting = True
        self.behind.append(lap.verify_seconds)

    def add(self, lap: Lap) -> None:
        """One more round."""
        if lap.width or self.size:
            self._compare(lap.width, lap.verify_seconds)
        self._age += 1
        if not self._counts(lap):
            return
        if lap.width:
            self._age = 0
            self.judged.append((lap.width, lap.verify_seconds))
            own = self._of_level.setdefault(self._level(lap.width + 1), deque(maxlen=TIMINGS))
            own.append((self._laps, lap.verify_seconds))
            later = lap.steps - (lap.first_step_seconds > 0)
            if later > 0 and lap.draft_seconds > 0:
                self.step.append((lap.draft_seconds - lap.first_step_seconds) / later)
            if lap.first_step_seconds > 0:
                # What is not of a step, as asking controllers, is of the first if there is but one.
                self.first.append(lap.first_step_seconds if later else lap.draft_seconds)
        else:
            self.plain.append(lap.verify_seconds)
        self._laps += 1
        kind = self.judged if lap.width else self.plain
        # A batch's drafts are dear, and may cost other than the last one's.
        at_once = len(kind) < TIMINGS or (self.size and lap.width)
        if at_once or self._laps % REFRESH == 0:
            self.costs = self._summed()

    def _counts(self, lap: Lap) -> bool:
        """Whether a round is taken; forgets those that it replaces."""
        if not self._going_on:
            return True
        drafts, before = lap.width > 0, self._drafting
        self._drafting = drafts
        expected = self.costs.verify_seconds(lap.width + 1)
        known, after_its_kind = drafts in self._settled, drafts == before
        faster = lap.verify_seconds < expected
        stale = drafts and self._age > STALE
        if known and not (after_its_kind or faster or stale):
            return False
        if stale or known != after_its_kind:
            for timings in (self.judged, self.step, self.first) if drafts else (self.plain,):
                timings.clear()
        if after_its_kind:
            self._settled.add(drafts)
        return True

    def _compare(self, width: int, seconds: float) -> None:
        """Ridge regression of differences between a pass and the one before."""
        if self._newest is not None and (wider := width - self._newest[0]):
            before_width, before = self._newest
            narrow = (before_width, before) if wider > 0 else (width, seconds)
            unit = narrow[1] / max(1 + self._slope * (narrow[0] - 1), 0.5)  # width may be 0
            expected = self._slope * wider
            # The start of a row alone is about right; a batch's is a guess, which the first two
            # passes settle.
            settled = not self.size or self._slope_sums[1] > SLOPE_WEIGHT
            most = MOST_JUMP if settled else math.inf
            off = min(max((seconds - before) / unit - expected, -most), most)
            xy, xx = self._slope_sums
            self._slope_sums = xy + wider * (expected + off), xx + wider * wider
            self._slope = min(max(self._slope_sums[0] / self._slope_sums[1], 0.0), 1.0)
        self._newest = width, seconds

    def _summed(self) -> Costs:
        """The costs in force."""
        step, first, behind = map(_median, (self.step, self.first, self.behind))
        base = _median([self._narrow(seconds, width + 1) for width, seconds in self.judged])
        plain = _quartile(self.plain)
        if step is None and first is not None:
            step = WARM_STEP * first
        ratio = self._base / self._step  # what was not timed is as it was beside the other
        if base is None:
            base = plain or (self._base if step is None else ratio * step)
        if step is None:
            step = base / ratio
        if plain is not None and self._going_on:
            if self._shape is not None and len(self.judged) <= ENOUGH:
                warm = self._shape.verify_seconds(2) / self._shape.plain
                base = min(base, MOST_SLOW * plain * warm)
            if len(self.step) == 1:
                step = min(step, MOST_SLOW * plain / self._ratio)
        self._base, self._step = base, step
        if first is not None and len(self.first) == 1:
            first = min(first, MOST_SLOW * step / WARM_STEP)
        if plain is None:
            plain = PLAIN_GUESS * base
        elif not self._shares_layers:  # more tokens never take less time: the rest is noise
            plain = min(plain, base)
        return Costs(
            step,
            ((1, plain), *self._judging(base)),
            batch=2**self.size,
            first=max(first - step, 0.0) if first is not None else 0.0,
            levels=self._shape.levels if self._shape else (),
            catch_up=_median(self.catch_up) or 0.0,
            cold=max(behind - plain, -step * self._shares_layers) if behind is not None else 0.0,
            prefill=True,
        )

    def _judging(self, base: float) -> Passes:
        """Passes that judge tokens; `base` is the seconds of one that judges a single one."""
        if self._shape is None:
            return (2, base), (3, base * (1 + self._slope))
        out: list[tuple[int, float]] = []
        for width, _ in self._shape.verify[1:]:
            own = self._of_level.get(self._level(width), ())
            recent = [seconds for lap, seconds in own if lap > self._laps - STALE]
            known = _median(recent) if len(recent) > ENOUGH else None
            seconds = self._wide(base, width) if known is None else known
            out.append((width, bounded(seconds, width, out)))
        return tuple(out)

    def _narrow(self, seconds: float, tokens: int) -> float:
        """Seconds of a pass that judges one token where one of so many takes these."""
        if self._shape is None:
            return seconds / (1 + self._slope * (tokens - 2))
        narrow, wide = map(self._shape.verify_seconds, (2, tokens))
        return max(seconds - (wide - narrow), seconds * narrow / wide)

    def _wide(self, base: float, tokens: int) -> float:
        """The reverse, where passes were compared when the model was loaded. Slower ones are so by
        cold caches, which cost the same at any width; faster ones in proportion."""
        assert self._shape is not None
        narrow, wide = map(self._shape.verify_seconds, (2, tokens))
        return min(base + (wide - narrow), base * wide / narrow)

    def _level(self, tokens: int) -> int:
        """The level of a pass of so many tokens; beyond all of them the tokens."""
        levels = self._shape.levels if self._shape else ()
        return next((level for level in levels if level >= tokens), tokens)


def _quartile(values: deque[float]) -> float | None:
    """The lower quartile; None if there are no values."""
    return sorted(values)[(len(values) - 1) // 4] if values else None


def _median(values: deque[float] | list[float]) -> float | None:
    """The lower median; None if there are no values."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
