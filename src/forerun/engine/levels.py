"""What the passes of a row alone take whose target has levels: each is timed for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

TIMINGS = 7
"""Timings whose median counts: outliers of a shared machine do not."""
ENOUGH = 2
"""Timings of a level before it is known: the lower of two is no outlier."""
STALE = 128
"""Timings of other levels after which those of one are forgotten: a machine that was busy when it
was timed would else keep a row from trying it again."""


class Levels:
    """Seconds by level, of `Executor.levels`; a pass beyond the last is a level of its own."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._newest: dict[int, int] = {}
        self._count = 0

    def add(self, levels: Sequence[int], tokens: int, seconds: float) -> bool:
        """One more pass that judged drafts; whether little is known of its level yet."""
        level = filled(levels, tokens)
        self._count += 1
        self._newest[level] = self._count
        timings = self._seconds.setdefault(level, deque(maxlen=TIMINGS))
        timings.append(seconds)
        return len(timings) < TIMINGS

    def forget(self, level: int | None = None) -> None:
        """What was timed of a level, or of all."""
        if level is None:
            self._seconds.clear()
        else:
            self._seconds.pop(level, None)

    def table(
        self, levels: Sequence[int], plain: float | None, base: float, slope: float
    ) -> list[tuple[int, float]]:
        """`(width, seconds)` from two tokens on.

        Args:
            levels: of the target.
            plain: seconds of a pass of one token, if it was timed.
            base: seconds of one that judges a token, if nothing was.
            slope: share of a pass that a token adds where nothing else is known. It is low, so
                that levels are tried.
        """
        known = {} if plain is None else {1: plain}
        for level, timings in list(self._seconds.items()):
            if self._count - self._newest[level] > STALE:
                self.forget(level)
            elif len(timings) >= ENOUGH:
                known[level] = median(timings)
        known = known or {filled(levels, 2): base}
        out: list[tuple[int, float]] = []
        taken, last = known.get(1, 0.0), 1
        for level in levels:
            if level > last:
                taken = _bounded(_between(known, level, slope), level, taken, last)
                out += [(width, taken) for width in sorted({last + 1, level})]
                last = level
        beyond = [
            (_bounded(s, n, taken, last) - taken) / (n - last) for n, s in known.items() if n > last
        ]
        adds = median(beyond) if beyond else slope * taken
        return [*out, (last + 1, taken + adds), (last + 2, taken + 2 * adds)]


def filled(levels: Sequence[int], tokens: int) -> int:
    """The level of a pass of so many tokens, or the tokens beyond the last."""
    return next((level for level in levels if level >= tokens), tokens)


def median(values: Collection[float]) -> float:
    """The lower median of values, at least one."""
    return sorted(values)[(len(values) - 1) // 2]


def _bounded(seconds: float, tokens: int, before: float, fewer: int) -> float:
    """More tokens never take less time than fewer did, nor more than passes of so few that make up
    as many: the rest is noise."""
    return max(before, min(seconds, -(-tokens // fewer) * before)) if before else seconds


def _between(known: dict[int, float], level: int, slope: float) -> float:
    """Seconds of a level: timed, between what was, or by the slope from the nearest."""
    if level in known:
        return known[level]
    below, above = (
        max((n for n in known if n < level), default=None),
        min((n for n in known if n > level), default=None),
    )
    if below is None:
        assert above is not None, "something is known"
        return known[above] / (1 + slope * (above - level))
    if above is None:
        return known[below] * (1 + slope * (level - below))
    share = (level - below) / (above - below)
    return known[below] + share * (known[above] - known[below])
