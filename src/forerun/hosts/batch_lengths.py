"""Lengths of the requests of another engine's batch, decided from history alone."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from math import log2
from typing import Any

from forerun.controllers import CONTROLLERS, Controller
from forerun.controllers.base import LengthPolicy
from forerun.controllers.fixed import FixedLength
from forerun.costs import Costs, bounded
from forerun.engine.lengths import Lengths
from forerun.errors import SettingError
from forerun.governors.base import Outcome, Seat
from forerun.types import RoundOutcome, Stop, Token

logger = logging.getLogger("vllm.forerun")  # below vLLM's, so that its handlers show it

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


def controller_of(spec: Any) -> Controller:
    """The controller that a request names.

    Raises:
        SettingError, UnknownNameError: no such controller, or one that reads what the draft says
            of its tokens, which no scheduler sees.
    """
    if not isinstance(spec, str):
        raise SettingError(f"a controller is named by text like 'gammatune', got {spec!r}")
    controller: Controller = CONTROLLERS.make(spec)
    if isinstance(controller, LengthPolicy) and (signals := controller.signals(True)):
        raise SettingError(
            f"controller {spec!r} reads what the draft says of its tokens "
            f"({', '.join(sorted(signals))}), which vLLM's scheduler does not see; use auto, or "
            "one that goes by what was accepted, like gammatune"
        )
    return controller


def judged_round(drafted: int, accepted: int, asked: int) -> RoundOutcome:
    """A request's draft as controllers see it. One shorter than asked for ended from outside."""
    kept = [1.0] * accepted + [0.0] * (drafted - accepted)
    stop = Stop.LIMIT if drafted >= asked else Stop.EXHAUSTED
    return RoundOutcome(drafted, accepted, kept, stop)


class BatchLengths:
    """One engine's requests, by id; see `engine.Lengths`, which decides.

    What a policy raises makes its request plain from then on, and is logged once.

    Args:
        default: spec of requests that name none.
        most: tokens that the engine drafts at most.
    """

    def __init__(self, default: str, most: int) -> None:
        self.default, self.most = controller_of(default), most
        self.costs = StepCosts()
        self._lengths = Lengths({}, blind=True)
        self.names: dict[str, str] = {}
        """By request the spec of its controller, in the order of the rows of `_lengths`."""
        self._logged: set[str] = set()

    def join(self, request: str, spec: Any, certain: bool) -> None:
        """A request begins, by its id; `spec` None is the default, `certain` is greedy decoding.
        Nothing if it is here."""
        if request in self.names:
            return
        controller = self.default
        try:
            controller = controller if spec is None else controller_of(spec)
            self._lengths.join(controller, certain)
        except Exception as error:  # of anybody's policy; specs are checked where requests enter
            logger.warning("request %s decodes plainly: %s", request, error)
            controller = FixedLength(0)
            self._lengths.join(controller, certain)
        self.names[request] = CONTROLLERS.text(controller)

    def leave(self, requests: Iterable[str]) -> None:
        """Forget requests that are done; others are not touched."""
        if gone := self.names.keys() & set(requests):
            self._lengths.keep([i for i, name in enumerate(self.names) if name not in gone])
            self.names = {name: spec for name, spec in self.names.items() if name not in gone}
            self._logged -= gone

    def limits(self, left: Mapping[str, int], context: float) -> dict[str, int]:
        """Most tokens that requests shall draft in the step that begins, of those that may: by how
        many they have `left` to write. Their texts have `context` tokens in the mean."""
        able = [Seat(left=left[r], trims=False) if r in left else None for r in self.names]
        costs = self.costs.costs(max(len(left), 1), context)
        limits = dict(zip(self.names, self._lengths.limits(costs, able), strict=True))
        self._log()
        return {r: max(0, min(limits.get(r, 0), self.most, n - 1)) for r, n in left.items()}

    def observe(
        self, judged: Mapping[str, RoundOutcome], context: float, drafts: int, seconds: float | None
    ) -> None:
        """What became of a step: what was `judged` of every request that got tokens, the most that
        it `drafts` for the next one, and its `seconds`, None if it read prompts, too."""
        if not judged:
            return
        rows, drafted = len(judged), [one.drafted for one in judged.values()]
        timed = seconds is not None and self.costs.timed(rows, context)
        costs = self.costs.costs(rows, context)
        if seconds is not None:
            self.costs.add(rows, context, sum(drafted) / rows, drafts, seconds)
        rounds = [judged.get(request) for request in self.names]
        seen = {i: one for i, one in enumerate(rounds) if one is not None}
        outcome = Outcome(
            {i: one.accepted + 1 for i, one in seen.items()},
            {i: one.drafted for i, one in seen.items()},
            max(drafted),
            seconds if timed else None,
        )
        shown = [[Token()] * (r.drafted if r else 0) for r in rounds]
        self._lengths.observe(costs, rounds, shown, outcome)
        self._log()

    def _log(self) -> None:
        names = list(self.names)
        for i, error in self._lengths.failed.items():
            if (request := names[i]) not in self._logged:
                self._logged.add(request)
                spec = self.names[request]
                logger.warning(
                    "request %s decodes plainly, for %s failed: %r", request, spec, error
                )
