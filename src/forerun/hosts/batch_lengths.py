"""Lengths of the requests of another engine's batch, decided from history alone."""

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.controllers import CONTROLLERS, Controller
from forerun.controllers.base import LengthPolicy
from forerun.controllers.fixed import FixedLength
from forerun.costs import Costs
from forerun.engine.lengths import Lengths
from forerun.engine.meter import SAMPLES, STALE
from forerun.errors import SettingError
from forerun.governors.base import Outcome, Seat
from forerun.runtime.timing import low
from forerun.types import RoundOutcome, Stop, Token

logger = logging.getLogger("vllm.forerun")  # below vLLM's, so that its handlers show it

SOON = 8
"""Steps of a shape after which one without drafts is timed for the first time, if one of another
shape was (else it is after one); after `STALE` it is timed anew."""
PRIOR, NOTHING = np.array([0.75, 0.05]), 1e-6
"""Shares of a plain step that drafting a token, and judging one a row, are taken to add, as if each
was timed once: dear, so that the first draft is a token. And the least that they add."""
HELD_UP = 4.0
"""Tokens' time that a step is booked for at most beyond its costs, divided among its rows."""
PLAINLY = "fixed(0)"  # what a request is under whose policy failed
PLAIN, PARTS = (0, 0), 4
"""The kind of a step without drafts, and of a token that means of judged ones are rounded to."""
Shape = tuple[int, int]  # rows, and the power of two that their context reaches
Kinds = dict[tuple[int, int], deque[float]]
"""Seconds of steps by the tokens that they draft, and parts of tokens that they judge."""


class StepCosts:
    """Learns `Costs` from the steps of a batch, by its size and its context.

    A step judges what the last one drafted, and drafts for the next as far as the longest of its
    rows: what a token takes in each is told apart by steps in which the two differ. Of a kind of
    step the first is no sample, for it may compile or capture.
    """

    def __init__(self) -> None:
        self._shapes: dict[Shape, Kinds] = defaultdict(dict)
        self._since_plain: dict[Shape, int] = defaultdict(int)

    def add(self, rows: int, context: float, judged: float, drafts: int, seconds: float) -> None:
        """A step that read no prompt: the `rows` that it decoded, the mean `context` of their texts
        and mean drafted tokens that it `judged`, the most that it `drafts`, in tokens."""
        shape, kind = _shape(rows, context), (drafts, ceil(PARTS * judged))
        samples = self._shapes[shape].setdefault(kind, deque(maxlen=SAMPLES))
        self._since_plain[shape] = 0 if kind == PLAIN and samples else self._since_plain[shape] + 1
        samples.append(seconds)

    def costs(self, rows: int, context: float) -> Costs:
        """Of a batch of so many rows; of the nearest that was timed, if it was not."""
        wanted, timed, plain, added = _shape(rows, context), self._timed(), 1.0, PRIOR
        if timed:
            near = min(timed, key=lambda s: abs(log2(s[0] / wanted[0])) + abs(s[1] - wanted[1]))
            plain, added = _fitted(self._shapes[near])
        draft, judging = (plain * np.maximum(added, NOTHING)).tolist()
        soon = STALE if wanted in timed else SOON if timed else 0
        retime = "plain" if self._since_plain[wanted] > soon else ""
        verify = (1, plain), (2, plain + judging)
        return Costs(draft, verify, batch=rows, packed=True, retime=retime)

    def timed(self, rows: int, context: float) -> bool:
        """Whether a plain step of such a batch was timed."""
        return _shape(rows, context) in self._timed()

    def _timed(self) -> list[Shape]:
        return [shape for shape, kinds in self._shapes.items() if len(kinds.get(PLAIN, ())) > 1]


def _shape(rows: int, context: float) -> Shape:
    return rows, max(int(context), 128).bit_length()


def _fitted(kinds: Kinds) -> tuple[float, NDArray[Any]]:
    """Seconds of a plain step, and the shares of it that a drafted token adds and one judged in
    every row: by least squares over the kinds of steps, begun from `PRIOR`."""
    seconds = {kind: low(samples) for kind, samples in kinds.items() if len(samples) > 1}
    tokens, plain = np.array([*seconds]) / (1, PARTS), seconds[PLAIN]
    missed = np.array([*seconds.values()]) / plain - 1 - tokens @ PRIOR
    weighed = tokens.T * [len(kinds[kind]) - 1 for kind in seconds]
    return plain, PRIOR + np.linalg.solve(weighed @ tokens + np.eye(2), weighed @ missed)


def controller_of(spec: Any) -> Controller:
    """The controller that a request names, if it does not read what the draft says of its tokens:
    no scheduler sees that."""
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
    return RoundOutcome(drafted, accepted, kept, stop, [Token()] * drafted)


class BatchLengths:
    """One engine's requests, by id, whose drafts have `most` tokens at most; see `engine.Lengths`,
    which decides. What a policy raises makes its request plain from then on, and is logged once."""

    def __init__(self, default: str, most: int) -> None:
        self.default, self.most = controller_of(default), most
        self.costs, self._lengths = StepCosts(), Lengths({}, blind=True)
        self.names: dict[str, str] = {}
        """By request the spec of its controller, in the order of the rows of `_lengths`."""

    def join(self, request: str, spec: Any, certain: bool) -> None:
        """A request begins, by its id; `spec` None is the default, `certain` is greedy decoding.
        Nothing if it is here."""
        if request in self.names:
            return
        try:
            controller = self.default if spec is None else controller_of(spec)
            self._lengths.join(controller, certain)
        except Exception as error:  # of anybody's policy; specs are checked where requests enter
            logger.warning("request %s decodes plainly: %s", request, error)
            self._lengths.join(controller := FixedLength(0), certain)
        self.names[request] = CONTROLLERS.text(controller)

    def leave(self, requests: Iterable[str]) -> None:
        """Forget requests that are done; others are not touched."""
        if gone := self.names.keys() & set(requests):
            self._lengths.keep([i for i, name in enumerate(self.names) if name not in gone])
            self.names = {name: spec for name, spec in self.names.items() if name not in gone}

    def limits(self, left: Mapping[str, int], context: float) -> dict[str, int]:
        """Most tokens that requests shall draft in the step that begins, of those that may: by how
        many they have `left` to write. Their texts have `context` tokens in the mean."""
        able = [Seat(False, left=left[r], by_row=True) if r in left else None for r in self.names]
        costs, requests = self.costs.costs(max(len(left), 1), context), [*self.names]
        limits = dict(zip(requests, self._lengths.limits(costs, able), strict=True))
        for request, error in ((requests[i], e) for i, e in self._lengths.failed.items()):
            if (spec := self.names[request]) != PLAINLY:
                self.names[request] = PLAINLY
                logger.warning("request %s decodes plainly: %s failed: %r", request, spec, error)
        return {r: max(0, min(limits.get(r, 0), self.most, n - 1)) for r, n in left.items()}

    def observe(
        self, judged: Mapping[str, RoundOutcome], context: float, drafts: int, seconds: float | None
    ) -> None:
        """What became of a step: what was `judged` of every request that got tokens, the most that
        it `drafts` for the next one, and its `seconds`, None if it read prompts, too."""
        if not judged:
            return
        rows, took = len(judged), None
        mean = sum(one.drafted for one in judged.values()) / rows
        costs = self.costs.costs(rows, context)
        if seconds is not None:
            # The time of drafts is this step's, whatever they bring in the next. Of a step that the
            # machine held up little is booked beyond what costs say.
            known = costs.round_seconds(drafts, 1 + mean) + HELD_UP * costs.plain / rows
            took = min(seconds, known) if self.costs.timed(rows, context) else None
            self.costs.add(rows, context, mean, drafts, seconds)
        rounds = [judged.get(request) for request in self.names]
        seen = {i: one for i, one in enumerate(rounds) if one is not None}
        committed = {i: one.accepted + 1 for i, one in seen.items()}
        counts = {i: one.drafted for i, one in seen.items()}
        self._lengths.observe(costs, rounds, Outcome(committed, counts, drafts, took))
