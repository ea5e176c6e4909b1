"""Costs from the seconds of whole steps, where draft and target are not timed apart."""

from __future__ import annotations

from collections import defaultdict, deque
from math import log2

from forerun.costs import Costs, bounded

SAMPLES, LOW = 12, 0.25
"""Newest steps of a shape that count, and their quantile that is taken for the truth."""
STALE = 64
"""Steps after which one without drafts is timed anew."""
PRIOR = 0.25
"""Share of a plain step that a drafted token is taken to add, until steps with drafts were timed:
a draft step of a fifth, and what judging adds."""
NOTHING = 1e-6
"""Share of a plain step that drafting takes on top: it is in the seconds of wider steps."""
Shape = tuple[int, int]
"""Rows, and the power of two that their context reaches."""


class StepCosts:
    """Learns `Costs` from the steps of a batch, by its size, its context and what it drafts.

    A step drafts for the next one and judges what the last one drafted. It is a sample where both
    are about as many tokens a row; the first of a shape is none, for it may compile or capture.
    """

    def __init__(self) -> None:
        self._shapes: dict[Shape, dict[int, deque[float]]] = {}
        self._since_plain: dict[Shape, int] = defaultdict(int)

    def add(self, rows: int, context: float, judged: float, drafts: int, seconds: float) -> None:
        """A step that read no prompt: the `rows` that it decoded, the mean `context` of their texts
        and mean drafted tokens that it `judged`, the most that it `drafts`, in tokens."""
        shape, drafted = _shape(rows, context), round((judged + drafts) / 2)
        self._since_plain[shape] += 1
        if abs(judged - drafts) > 1 or (drafted > 0) != (judged > 0 and drafts > 0):
            return
        if not drafted:
            self._since_plain[shape] = 0
        kinds = self._shapes.setdefault(shape, {})
        if drafted in kinds:
            kinds[drafted].append(seconds)
        else:
            kinds[drafted] = deque(maxlen=SAMPLES)

    def costs(self, rows: int, context: float) -> Costs:
        """Of a batch of so many rows; of the nearest that was timed, if it was not."""
        wanted = _shape(rows, context)
        timed = [shape for shape, kinds in self._shapes.items() if kinds.get(0)]
        if not timed:
            return Costs(NOTHING, ((1, 1.0), (2, 1.0 + PRIOR)), batch=rows, packed=True)
        near = min(timed, key=lambda s: abs(log2(s[0] / wanted[0])) + abs(s[1] - wanted[1]))
        passes: list[tuple[int, float]] = []
        for drafted, samples in sorted(self._shapes[near].items()):
            if samples:
                low = sorted(samples)[int(LOW * (len(samples) - 1))]
                passes.append((drafted + 1, bounded(low, drafted + 1, passes)))
        plain = passes[0][1]
        if len(passes) == 1:
            passes.append((2, plain * (1 + PRIOR)))
        retime = "plain" if self._since_plain[wanted] > STALE else ""
        return Costs(NOTHING * plain, tuple(passes), batch=rows, packed=True, retime=retime)

    def timed(self, rows: int, context: float) -> bool:
        """Whether a plain step of such a batch was timed."""
        return bool(self._shapes.get(_shape(rows, context), {}).get(0))


def _shape(rows: int, context: float) -> Shape:
    return rows, max(int(context), 128).bit_length()
