"""Placeholder until the control branch lands: old vectorised controllers behind the new seam."""
from __future__ import annotations

from typing import Any

import numpy as np

from forerun.engine.control import Control
from forerun.types import RoundOutcome, Signals

Memory = dict


class Crew:
    def __init__(self, meter: Any, memory: Any = None) -> None:
        self.meter = meter
        self.control = Control(memory)
        self.controllers: list[Any] = []
        self.failed: dict[int, Exception] = {}
        self._refresh()

    def join(self, controller: Any, ratio: Any) -> None:
        if ratio is not None:
            controller = controller.timeless(ratio)
        self.control.join(controller)
        self.controllers.append(controller)
        self._refresh()

    def keep(self, rows: Any) -> None:
        self.control.keep(rows)
        self.controllers = [self.controllers[r] for r in rows]
        self._refresh()

    def _refresh(self) -> None:
        self.signals = self.control.signals if self.controllers else frozenset()
        self.asks = self.control.asks
        self.drops_last = [c.drops_last for c in self.controllers]
        self.previews = [c.previews for c in self.controllers]

    def limits(self) -> list[int]:
        self.seen: dict[int, list[Any]] = {}
        return self.control.limit().tolist()

    def _signals(self, shown: Any) -> Signals:
        n = max(map(len, shown), default=0)
        if not n:
            return Signals()
        out = {}
        for name in self.signals:
            v = np.zeros((len(self.controllers), n))
            for r, ts in enumerate(shown):
                for i, t in enumerate(ts):
                    x = getattr(t, name)
                    if x is None:
                        return Signals()
                    v[r, i] = x
            out[name] = v
        return Signals(**out)

    def go(self, tokens: Any) -> list[bool]:
        for r, t in enumerate(tokens):
            if t is not None:
                self.seen.setdefault(r, []).append(t)
        shown = [self.seen.get(r, []) for r in range(len(self.controllers))]
        n = max(map(len, shown))
        drafted = np.array([len(s) for s in shown])
        return self.control.keep_going(drafted, self._signals(shown)).tolist()

    def plan(self, shown: Any) -> list[int]:
        drafted = np.array([len(s) for s in shown])
        return self.control.plan(drafted, self._signals(shown)).tolist()

    def observe(self, outcomes: Any) -> None:
        rows = [r for r, o in enumerate(outcomes) if o is not None]
        if len(rows) != len(outcomes):
            outcomes = [o for o in outcomes if o is not None]
            if not outcomes:
                return
            raise NotImplementedError
        k = max(o.drafted for o in outcomes)
        prob = np.zeros((len(outcomes), k))
        for r, o in enumerate(outcomes):
            prob[r, : len(o.accept_prob)] = o.accept_prob
        self.control.observe(RoundOutcome(
            np.array([o.drafted for o in outcomes]), np.array([o.accepted for o in outcomes]), prob,
            np.array([int(o.stopped_by) for o in outcomes]), self._signals([o.tokens[:k] for o in outcomes])))
