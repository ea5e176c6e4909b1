"""Lengths of the requests of another engine's batch, decided from history alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forerun.controllers import CONTROLLERS, Controller
from forerun.controllers.base import LengthPolicy
from forerun.controllers.fixed import FixedLength
from forerun.engine.lengths import Lengths, Memory
from forerun.errors import SettingError
from forerun.governors.base import Outcome, Seat
from forerun.hosts.step_costs import StepCosts
from forerun.types import RoundOutcome, Stop, Token

logger = logging.getLogger("vllm.forerun")  # below vLLM's, so that its handlers show it


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


class DraftOutcome(NamedTuple):
    """What became of a request's draft in a step."""

    drafted: int
    accepted: int
    asked: int
    """Most tokens that it was to draft."""


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
        memory: Memory = {}
        self._lengths = Lengths(memory, blind=True)
        self._ids: list[str] = []
        self._names: dict[str, str] = {}
        self._reported: set[str] = set()

    def name(self, request: str) -> str:
        """The spec of a request's controller, for reports."""
        return self._names.get(request, "")

    def join(self, request: str, spec: Any, certain: bool) -> None:
        """A request begins; nothing if it is here.

        Args:
            request: its id.
            spec: of its controller; None is the default.
            certain: whether it decodes greedily.
        """
        if request in self._names:
            return
        try:
            controller = self.default if spec is None else controller_of(spec)
            self._lengths.join(controller, certain)
        except Exception as error:  # of anybody's policy; specs are checked where requests enter
            logger.warning("request %s decodes plainly: %s", request, error)
            controller = FixedLength(0)
            self._lengths.join(controller, certain)
        self._ids.append(request)
        self._names[request] = CONTROLLERS.text(controller)

    def leave(self, requests: Sequence[str]) -> None:
        """Forget requests that are done; others are not touched."""
        gone = {request for request in requests if request in self._names}
        if not gone:
            return
        staying = [i for i, request in enumerate(self._ids) if request not in gone]
        self._lengths.keep(staying)
        self._ids = [self._ids[i] for i in staying]
        for request in gone:
            del self._names[request]
        self._reported -= gone

    def limits(self, left: Mapping[str, int], context: float) -> dict[str, int]:
        """Most tokens that requests shall draft in the step that begins.

        Args:
            left: by request that may draft, the tokens that it may write yet.
            context: mean tokens of their texts.
        """
        able = [Seat(left=left[r], trims=False) if r in left else None for r in self._ids]
        costs = self.costs.costs(max(len(left), 1), context)
        limits = dict(zip(self._ids, self._lengths.limits(costs, able), strict=True))
        self._report()
        return {r: max(0, min(limits.get(r, 0), self.most, n - 1)) for r, n in left.items()}

    def observe(
        self, judged: Mapping[str, DraftOutcome], context: float, drafts: int, seconds: float | None
    ) -> None:
        """What became of a step.

        Args:
            judged: of every request that got tokens.
            context: mean tokens of their texts.
            drafts: most tokens a request that the step drafted for the next one.
            seconds: that it took; None if it read prompts, too.
        """
        if not judged:
            return
        rows, drafted = len(judged), [one.drafted for one in judged.values()]
        timed = seconds is not None and self.costs.timed(rows, context)
        costs = self.costs.costs(rows, context)
        if seconds is not None:
            self.costs.add(rows, context, sum(drafted) / rows, drafts, seconds)
        rounds: list[RoundOutcome | None] = [
            _round(judged[request]) if request in judged else None for request in self._ids
        ]
        committed = [one.accepted + 1 for one in judged.values()]
        outcome = Outcome(committed, drafted, max(drafted), seconds if timed else None)
        shown = [[Token()] * (r.drafted if r else 0) for r in rounds]
        self._lengths.observe(costs, rounds, shown, outcome)
        self._report()

    def _report(self) -> None:
        for i, error in self._lengths.failed.items():
            if (request := self._ids[i]) not in self._reported:
                self._reported.add(request)
                logger.warning(
                    "request %s decodes plainly, for its controller %s failed: %r",
                    request, self._names[request], error,
                )  # fmt: skip


def _round(one: DraftOutcome) -> RoundOutcome:
    """As a controller sees it. A draft shorter than asked for ended from outside."""
    chances = [1.0] * one.accepted + [0.0] * (one.drafted - one.accepted)
    stop = Stop.LIMIT if one.drafted >= one.asked else Stop.EXHAUSTED
    return RoundOutcome(one.drafted, one.accepted, chances, stop)
