"""What passes of a target and of its draft take here: timed before the first round, and kept."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from forerun.cache import keep_json, kept_json
from forerun.costs import Costs
from forerun.lazy import threads, torch
from forerun.runtime.base import Rows

ROWS = 1, 2, 4, 8, 16  # sizes of batches that are timed
WIDTHS = 1, 2, 4, 5, 8  # tokens of a row alone, where the executor has no levels; and of any
WIDEST = 16
SHARED = 1, 4  # tokens in each of several rows
SAMPLES, SHARED_SAMPLES = 4, 2
"""Passes of a shape of one row, and of several, as far as there is time: the largest batch shall be
timed before the smallest is known to a hundredth."""
LOW = 0.25  # quantile of samples taken for the truth: no machine is too fast
SECONDS, PLAIN = 0.3, 10  # what all this may take before a first round, the longer of these
OFF = 1.3  # how many times more or less a plain pass may take than is kept; else all is timed anew
FORMAT = 3  # goes up when what older versions kept must not be used
MARGIN = frozenset({"logit_margin"})  # what `auto` reads of a draft

Shape = tuple[int, int]  # rows of a pass, and tokens in each


def low(seconds: Collection[float]) -> float:
    """The low quantile of at least one sample."""
    return sorted(seconds)[int(LOW * (len(seconds) - 1))]


@dataclass
class Times:
    """Seconds of passes by shape."""

    target: dict[Shape, float] = field(default_factory=dict)
    draft: dict[Shape, float] = field(default_factory=dict)
    """Of two tokens a row right behind a pass of the target, of one right behind these."""
    taken: set[Shape] = field(default_factory=set)
    """Shapes of the target's passes that this process has taken: the first takes longer."""

    @cached_property
    def _sizes(self) -> tuple[dict[int, Costs], dict[int, Costs]]:
        wide = {rows for rows, tokens in self.target if rows == 1 or tokens > 1}
        target = {shape: s for shape, s in self.target.items() if shape[0] in wide}
        return _by_rows(target), _by_rows(self.draft)

    @cached_property
    def target_seconds(self) -> Callable[[int, float], float]:
        """Of a pass of the target of so many rows, and tokens a row; asked 40 times after a
        round."""
        return cache(partial(_seconds, self._sizes[0]))

    def draft_seconds(self, rows: int) -> float:
        """Of a step of the draft, where it was timed."""
        return _seconds(self._sizes[1], rows, 1)

    @classmethod
    def kept(cls, key: str) -> Times:
        lists = kept_json("timings", key)
        try:
            target, draft = ({(rows, n): float(s) for rows, n, s in shapes} for shapes in lists)
            return cls(target, draft)
        except (TypeError, ValueError):
            return cls()

    def keep(self, key: str) -> None:
        """Leave it on disk for later starts on this machine."""
        lists = [[(*shape, s) for shape, s in of.items()] for of in (self.target, self.draft)]
        keep_json("timings", key, lists)


def _by_rows(times: Mapping[Shape, float]) -> dict[int, Costs]:
    """Passes of each size, as costs."""
    return {
        size: Costs(1.0, tuple(sorted((n, s) for (rows, n), s in times.items() if rows == size)))
        for size in {rows for rows, _ in times}
    }


def _seconds(timed: Mapping[int, Costs], rows: int, width: float) -> float:
    """Of a pass of so many rows, linear between the sizes timed. Beyond the largest, rows that
    share a pass are, to weights and arithmetic, tokens of fewer."""
    below = max(size for size in timed if size <= rows)
    above = min((size for size in timed if size > rows), default=0)
    if not above or below == rows:
        return timed[below].verify_seconds(width * rows / below)
    share = (rows - below) / (above - below)
    ends = timed[below].verify_seconds(width), timed[above].verify_seconds(width)
    return (1 - share) * ends[0] + share * ends[1]


def _far(now: Mapping[Shape, float], before: Mapping[Shape, float]) -> dict[Shape, float]:
    return {n: s for n, s in now.items() if not before[n] / OFF <= s <= before[n] * OFF}


class PassTimer:
    """Times passes as rounds take them: steps of the draft, then a pass of the target.

    What it learns is kept by models, machine, threads and versions, and counts at the next start if
    a plain pass takes as long as it says. Target and draft have no rows whenever passes are timed;
    there is no draft where a step of it is no pass over tokens alone.
    """

    def __init__(
        self, target: Rows, draft: Rows | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._target, self._draft, self._clock = target, draft, clock
        self._models = [target] if draft is None else [target, draft]
        self._key = ""
        self.whole: bool | None = None
        """Whether all graphs were there when passes were timed: without, they take longer, which is
        kept apart. None: none were timed."""
        self._plain = self._left = self._rate = 0.0
        """Seconds of a plain pass, those that may yet be spent, and the least that a token took in
        any pass."""
        self.times = Times()

    def time(self, rows: int = 1) -> Times:
        """Time passes of up to so many rows, but for shapes that are known, while time is left. The
        others are timed at a later start, and by rounds as they come."""
        if rows > 1:
            for model in self._models:
                model.executor.finish()
        began = self._clock()
        if self.whole is None or self.outdated:
            self.whole = self._finished
            self._key = self._name()
            self._begin(Times.kept(self._key))
        self._check(rows)
        self._left = max(SECONDS, PLAIN * self._plain) - (self._clock() - began)
        known = len(self.times.target)
        levels = self._target.executor.levels
        beyond = [n + 1 for n in levels[-1:]]  # what the longest takes says nothing of these
        alone = sorted({1, *(levels or WIDTHS), *beyond, WIDEST})
        longest = min(WIDEST, *(model.limit - 1 for model in self._models))
        for size in ROWS:
            widths = [n for n in (alone if size == 1 else SHARED) if n <= longest]
            new = [n for n in widths if (size, n) not in self.times.target]
            if size < 2 * rows and any(self._affords(2, size, n) for n in new):
                with self._joined(size):
                    self._sample(size, new)
        for shorter, level in pairwise(levels):  # as long as the longest
            if (1, level) in self.times.target:
                self.times.target.setdefault((1, shorter + 1), self.times.target[1, level])
        if len(self.times.target) > known:
            self.times = replace(self.times)  # what it derives is of these
            self.times.keep(self._key)
        return self.times

    def correct(self, known: Mapping[int, Costs]) -> None:
        """Keep for later starts what rounds of so many rows took, where that is far off."""
        times, now = self.times, Times()
        for rows, costs in known.items():
            for width in (n for size, n in times.target if size == rows):
                now.target[rows, width] = costs.verify_seconds(width)
            steps = {1: costs.draft, 2: costs.draft_seconds(1), WIDEST: costs.reading * WIDEST}
            for width in (n for size, n in times.draft if size == rows):
                now.draft[rows, width] = steps[width] or times.draft[rows, width]  # 0: not known
        target, draft = _far(now.target, times.target), _far(now.draft, times.draft)
        if (target or draft) and not self.outdated:
            self.times = Times(times.target | target, times.draft | draft, times.taken)
            self.times.keep(self._key)

    @property
    def outdated(self) -> bool:
        """Whether graphs are there by now that were not when passes were timed."""
        return self.whole is False and self._finished

    @property
    def _finished(self) -> bool:
        return all(model.executor.finished for model in self._models)

    def _begin(self, kept: Times) -> None:
        """Take a plain pass, and believe what is kept if that says the same."""
        with self._joined(1):
            plain = self._plain = self._rate = self._pass(self._target, 1, 1)
        self.times = Times()
        if not _far({(1, 1): plain}, {(1, 1): kept.target.get((1, 1), 0.0)}):
            self.times = kept
            self._rate = min(s / (rows * n) for (rows, n), s in kept.target.items())
        self.times.taken.add((1, 1))

    def _check(self, rows: int) -> None:
        """Forget what is kept of rows that share passes if one of the largest says otherwise."""
        times = self.times
        size = max((n for n, tokens in times.target if tokens == 1 and n < 2 * rows), default=1)
        if size == 1 or (size, 1) in times.taken:
            return
        with self._joined(size):
            seconds = min(self._pass(self._target, size, 1) for _ in range(2))
        if _far({(size, 1): seconds}, times.target):
            both = times.target, times.draft
            target, draft = ({n: s for n, s in x.items() if n[0] == 1} for x in both)
            self.times = Times(target, draft, times.taken)
        self.times.taken.add((size, 1))

    def _sample(self, rows: int, widths: Sequence[int]) -> None:
        """Time passes of several widths in turns, so that each finds the caches as in a round."""
        target: dict[int, list[float]] = {}
        draft: dict[int, list[float]] = {}
        for width in [*widths] * (SAMPLES if rows == 1 else SHARED_SAMPLES):
            began = self._clock()
            if not self._affords(2 - (width in target), rows, width):
                continue
            if self._draft is not None:
                reads = [WIDEST] if (rows, width) == (1, WIDEST) else []
                for tokens in (*reads, 2, 1):
                    self._add(self._draft, rows, tokens, draft)
            self._rate = min(self._add(self._target, rows, width, target), self._rate)
            self._left -= self._clock() - began
        self.times.target.update({(rows, n): low(seconds) for n, seconds in target.items()})
        self.times.draft.update({(rows, n): low(seconds) for n, seconds in draft.items()})
        self.times.taken.update((rows, n) for n in target)

    def _affords(self, passes: int, rows: int, tokens: int) -> bool:
        return passes * rows * tokens * self._rate <= self._left

    def _add(self, model: Rows, rows: int, tokens: int, samples: dict[int, list[float]]) -> float:
        """Add a sample, behind a pass that is none if it is the first of its shape. Returns the
        seconds of a token."""
        if tokens not in samples:
            self._pass(model, rows, tokens)
        seconds = self._pass(model, rows, tokens)
        samples.setdefault(tokens, []).append(seconds)
        return seconds / (rows * tokens)

    def _pass(self, model: Rows, rows: int, tokens: int) -> float:
        """Seconds of a pass behind the one token that each row holds."""
        pieces = [[0] * tokens for _ in range(rows)]
        drafts = model is self._draft
        began = self._clock()
        model.best(pieces, [1 if drafts else tokens] * rows, MARGIN if drafts else frozenset())
        seconds = self._clock() - began
        for row in range(rows):
            model.rollback(row, 1)
        return seconds

    @contextmanager
    def _joined(self, rows: int) -> Iterator[None]:
        """Rows of one token each, for as long as it is entered."""
        try:
            for model in self._models:
                encodes = model.facts.source_limit is not None
                model.join(rows, 1 + WIDEST, [[0]] * rows if encodes else None)
                model.feed([[0]] * rows, [0] * rows)
            yield
        finally:
            for model in self._models:
                model.keep([])

    def _name(self) -> str:
        versions = map(_version, ("forerun", "torch", "openvino"))
        parts: list[object] = [FORMAT, self.whole, machine(self._target.device), *versions]
        for model in self._models:
            count = getattr(model.executor, "threads", None) or threads()
            parts += [{**asdict(model.facts), "name": ""}, count]
        return sha256(json.dumps(parts, default=sorted).encode()).hexdigest()[:32]


def _version(name: str) -> str | None:
    """Of a package; None of one that is not installed, like forerun run from a checkout."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine(device: torch.device | str) -> str:
    """The name of a GPU, or of the CPU and how many cores there are."""
    if str(device).startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} × {os.cpu_count()}"
