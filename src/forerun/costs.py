"""What a round costs: seconds of draft steps, of target passes by width, and of the rest.

One type for the engine's meter, the lab's tables, and every policy that weighs tokens against
time. Plain floats; this module imports no numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from forerun.checks import whole
from forerun.errors import require

Passes = tuple[tuple[float, float], ...]  # `(width, seconds)` of the target, widths rising from 1


def bounded(seconds: float, width: float, shorter: Sequence[tuple[float, float]]) -> float:
    """Seconds of a pass, without noise: more tokens take no less time than fewer do, nor more than
    shorter passes, bounded likewise, that hold as many.

    >>> [bounded(seconds, 5, [(1, 1.0), (4, 1.2)]) for seconds in (1.0, 2.0, 9.0)]
    [1.2, 2.0, 2.4]
    """
    if shorter:
        seconds = max(seconds, shorter[-1][1])
    for n, taken in shorter:
        if (several := -(-width // n) * taken) < seconds:
            seconds = several
    return seconds


@dataclass(frozen=True)
class Costs:
    """Costs in seconds at one batch size and context. With a batch they are those of the whole
    batch: one step that drafts a token in every row, one pass that verifies every row."""

    draft: float  # one more drafted token: the drafter's forward, and the engine's work
    verify: Passes  # of the target; linear in between, beyond the last width by the last slope
    fixed: float = 0.0  # per round, outside both models
    batch: int = 1
    context: int = 128
    first: float = 0.0
    """What a round's first draft step takes more than others: the target's weights are in the
    caches then, after a round that kept everything there are two tokens to read, and the engine
    has more to do than in a round without a draft."""
    levels: tuple[float, ...] = ()
    """Rising widths up to which a pass takes as long as that; of others each token adds."""
    cold: float = 0.0
    """What a plain pass takes more right behind a draft that was thrown away, as its weights have
    left the caches; less, where the drafter is made of the target's layers and has run some."""
    free: float = 0.0  # a token of what drafts without a model, in a chain before one that does
    asking: float = 0.0  # what a drafted token takes more where the controller sees it (`asked`)
    reading: float = 0.0
    """What the drafter takes for each token of a prompt that it must read first. Only a `Meter`
    knows it; it is no part of a round's seconds here."""
    prefill: float | None = None
    """What the target takes for each token of a prompt that it reads in a pass. Tokens to judge add
    little to such a pass. Only a `Meter` knows it; None elsewhere, and before it was timed."""
    packed: bool = False
    """Whether a pass takes all rows' tokens packed: its width is their mean, not the longest."""
    tree: float = 0.0  # what second choices among a pass's tokens take, besides its width
    ahead: int = 0
    """Tokens after which `first` comes again, as each pass of the drafter writes so many; 0: never.
    Only a `Meter` knows it."""
    retime: str = ""
    """The kind of pass that was not timed for long, `plain` or `judged`: the next round should be
    one, if it can be afforded. Only a `Meter` says so."""

    def __post_init__(self) -> None:
        widths = [width for width, _ in self.verify]
        rising = bool(widths) and widths[0] == 1 and sorted(set(widths)) == widths
        require(rising, "widths of verify", widths, "rising from 1")
        for name, value in [("draft", self.draft), *[(f"verify({w})", s) for w, s in self.verify]]:
            require(0 < value < math.inf, name, value, "a number of seconds above 0")
        for name in ("fixed", "first", "free", "asking", "reading", "tree"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "a number of seconds ≥ 0")
        least = -self.draft_seconds(1)
        message = "a number of seconds, at most as many below 0 as a draft step takes"
        require(least <= self.cold < math.inf, "cold", self.cold, message)
        rising = all(a < b for a, b in pairwise((0, *self.levels)))
        require(rising, "levels", self.levels, "widths, rising")
        whole("batch", self.batch, 1)
        whole("context", self.context, 1)

    def verify_seconds(self, width: float) -> float:
        """Seconds of a target pass fed `width` tokens (drafted + 1).

        >>> costs = Costs(0.1, ((1, 1.0), (3, 1.2)))
        >>> [round(costs.verify_seconds(width), 9) for width in (1, 2, 5)]
        [1.0, 1.1, 1.4]
        """
        points = self.verify
        if width <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = bisect_left(points, (width,))
        if at < len(points):
            (w0, s0), (w1, s1) = points[at - 1], points[at]
            return s0 + (s1 - s0) / (w1 - w0) * (width - w0)
        (w0, s0), (w1, s1) = points[-2:]
        # A slope below 0 is noise of the measurement; it must not make wide passes free.
        return s1 + max((s1 - s0) / (w1 - w0), 0.0) * (width - w1)

    @cached_property
    def asked(self) -> Costs:
        """Those of a controller that is asked about drafted tokens: what the draft says of each is
        computed, and the controller called.

        >>> Costs(0.25, ((1, 1.0),), asking=0.125).asked.draft_seconds(2)
        0.75
        """
        return replace(self, draft=self.draft + self.asking, asking=0.0) if self.asking else self

    def draft_seconds(self, steps: Any) -> Any:
        """Seconds of so many draft steps in a round, a number or an array.

        >>> [round(Costs(0.1, ((1, 1.0),), first=0.05).draft_seconds(n), 9) for n in (0, 1, 2)]
        [0.0, 0.15, 0.25]
        >>> round(Costs(0.1, ((1, 1.0),), first=0.05, ahead=2).draft_seconds(3), 9)
        0.4
        """
        passes = -(-steps // self.ahead) if self.ahead else steps > 0
        return steps * self.draft + passes * self.first

    def round_seconds(self, steps: int, width: float, tree: bool = False) -> float:
        """Seconds of a round of draft steps and a pass of `width` tokens, in a `tree` or not."""
        seconds: float = self.draft_seconds(steps) + self.cold * (steps > 0 and width == 1)
        return seconds + self.verify_seconds(width) + self.fixed + self.tree * tree

    @property
    def plain(self) -> float:
        """Seconds of a plain token (of one per row, with a batch)."""
        return self.verify[0][1] + self.fixed

    @property
    def _wider(self) -> float:
        """Width that a drafted token adds to a pass: of the longest row, or if packed of all."""
        return 1 / self.batch if self.packed else 1.0

    @cached_property
    def passes(self) -> tuple[float, ...]:
        """Seconds of target passes that judge 1, 2, … tokens (of the longest row, or packed of all
        together), up to beyond the last level; each further token adds `widening`. Passes of a
        level take their mean: all else is noise."""
        judging, first = [], 1
        for level in self.levels:
            last = round((level - 1) / self._wider)
            if last >= first:
                taken = [self.verify_seconds(1 + n * self._wider) for n in range(first, last + 1)]
                judging += [sum(taken) / len(taken)] * len(taken)
                first = last + 1
        return tuple(accumulate([*judging, self.verify_seconds(1 + first * self._wider)], max))

    def seconds(self, drafted: int) -> float:
        """Seconds of a round that drafts and judges so many tokens of every row, ≥ 0.

        >>> costs = Costs(0.1, ((1, 1.0), (2, 1.2), (4, 1.2), (5, 2.2), (8, 2.2)), levels=(4, 8))
        >>> [round(costs.seconds(drafted), 9) for drafted in (0, 1, 3, 4, 9)]
        [1.0, 1.3, 1.5, 2.6, 3.1]
        """
        if not drafted:
            return self.plain
        tokens = drafted * self.batch if self.packed else drafted
        beyond = max(tokens - len(self.passes), 0)
        judging = self.passes[tokens - beyond - 1] + beyond * self.widening
        return self.draft_seconds(drafted) + judging + self.fixed

    def width(self, drafted: Sequence[int], rows: int) -> float:
        """Width of a pass of so many rows, some of which have drafted tokens to judge.

        >>> costs = Costs(0.1, ((1, 1.0),))
        >>> costs.width([3, 0], 4), replace(costs, packed=True).width([3, 0], 4)
        (4, 1.75)
        """
        return 1 + (sum(drafted) / rows if self.packed else max(drafted, default=0))

    @cached_property
    def widening(self) -> float:
        """Seconds that a token behind the levels adds to a pass: the mean over these widths."""
        width = 1 + len(self.passes) * self._wider
        widest = max(self.verify[-1][0], width + self._wider)
        added = self.verify_seconds(widest) - self.verify_seconds(width)
        return max(added, 0.0) / (widest - width) * self._wider

    @cached_property
    def judging(self) -> tuple[float, ...]:
        """Seconds that so many drafted tokens add to the pass that the target runs anyway; each
        beyond the last adds `widening`.

        >>> costs = Costs(0.1, ((1, 1.0), (2, 1.2), (4, 1.2), (5, 2.2), (8, 2.2)), levels=(4, 8))
        >>> [round(seconds, 9) for seconds in costs.judging]
        [0.0, 0.2, 0.2, 0.2, 1.2, 1.2, 1.2, 1.2, 1.2]
        """
        first = self.passes[0]
        look = max(first - self.verify[0][1] - self.cold, 0.0)
        return 0.0, *(look + seconds - first for seconds in self.passes)

    @property
    def ratio(self) -> float:
        """The cost ratio c: one target pass over one draft step."""
        return self.verify[0][1] / self.draft

    def to_json(self) -> dict[str, Any]:
        """The documented fields; what only a `Meter` knows is no part of them."""
        hidden = {"ahead", "free", "reading", "prefill", "packed", "retime"}
        return {name: value for name, value in asdict(self).items() if name not in hidden}

    @classmethod
    def synthetic(
        cls,
        c: float,
        slope: float = 0.0,
        fixed: float = 0.0,
        seconds: float = 1.0,
        tree: float = 0.0,
    ) -> Costs:
        """A made-up machine, in units of one plain target pass.

        Args:
            c: cost ratio, > 0: a draft step takes 1/c.
            slope: what each further token to verify adds to a target pass, ≥ 0.
            fixed: per round, outside both models, ≥ 0.
            seconds: the unit.
            tree: what second choices add to a target pass besides its width, ≥ 0.

        >>> costs = Costs.synthetic(10, slope=0.02)
        >>> costs.draft, costs.plain, costs.verify_seconds(6)
        (0.1, 1.0, 1.1)
        """
        require(0 < c < math.inf, "c", c, "above 0")
        require(0 <= slope < math.inf, "slope", slope, "at least 0")
        require(0 <= fixed < math.inf, "fixed", fixed, "at least 0")
        require(0 <= tree < math.inf, "tree", tree, "at least 0")
        require(0 < seconds < math.inf, "seconds of a target pass", seconds, "above 0")
        verify = ((1, seconds), (2, seconds * (1 + slope)))
        return cls(seconds / c, verify, seconds * fixed, tree=seconds * tree)
