"""Controllers of the engine's rows: requests with equal controllers share one vectorised state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.controllers.base import LengthController
from forerun.types import BoolArray, IntArray, RoundOutcome, Signals


@dataclass
class _Group:
    controller: LengthController
    state: Any
    rows: IntArray  # engine rows, in the order of the state's rows; rising
    changed: bool = True  # rows joined or left since the last round


Memory = dict[LengthController, Any]
"""Per controller the state, of one row, of the newest request that left; see `renew`."""


class Control:
    """Asks each row's controller, one call per distinct controller.

    Args:
        memory: of requests before; kept up to date.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory = {} if memory is None else memory
        self._groups: list[_Group] = []
        self._rows = 0

    def join(self, controller: LengthController) -> None:
        """Add a row at the end."""
        controller = controller.together()
        row = np.array([self._rows])
        self._rows += 1
        past = self._memory.get(controller)
        state = controller.start(1) if past is None else controller.renew(past)
        for group in self._groups:
            if group.controller == controller:
                group.state = group.state.join(state)
                group.rows, group.changed = np.concatenate([group.rows, row]), True
                return
        self._groups.append(_Group(controller, state, row))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        place = {row: i for i, row in enumerate(rows)}
        for group in self._groups:
            gone = [i for i, r in enumerate(group.rows) if int(r) not in place]
            if gone and type(group.controller).renew is not LengthController.renew:
                alone = len(group.rows) == 1
                left = group.state if alone else group.state.take(np.array(gone[-1:]))
                self._memory[group.controller] = left
            moved = sorted((place[int(r)], i) for i, r in enumerate(group.rows) if int(r) in place)
            group.rows = np.array([new for new, _ in moved], dtype=np.int64)
            if moved:
                group.state = group.state.take(np.array([i for _, i in moved], dtype=np.int64))
                group.changed |= bool(gone)
        self._groups = [g for g in self._groups if len(g.rows)]
        self._rows = len(rows)

    @property
    def signals(self) -> frozenset[str]:
        """Everything any row's controller reads."""
        return frozenset().union(*(g.controller.signals for g in self._groups))

    @property
    def asks(self) -> bool:
        """Whether any controller may stop a draft early."""
        return any(
            type(g.controller).keep_going is not LengthController.keep_going for g in self._groups
        )

    @property
    def any_drops(self) -> bool:
        """Whether any row leaves out the token at which drafting stopped."""
        return any(g.controller.drops_last for g in self._groups)

    @property
    def drops_last(self) -> BoolArray:
        """`(rows,)` whether the token at which drafting stopped is left out."""
        return self._gather(bool, lambda g: np.full(len(g.rows), g.controller.drops_last))

    @property
    def any_previews(self) -> bool:
        """Whether any row's length is planned from a preview."""
        return any(g.controller.previews for g in self._groups)

    @property
    def previews(self) -> BoolArray:
        """`(rows,)` whether the length is planned from a preview."""
        return self._gather(bool, lambda g: np.full(len(g.rows), g.controller.previews))

    def plan(self, drafted: IntArray, signals: Signals) -> IntArray:
        """`(rows,)` tokens to draft after a preview."""
        return self._gather(
            np.int64, lambda g: g.controller.plan(g.state, drafted[g.rows], signals.take(g.rows))
        )

    def limit(self) -> IntArray:
        """`(rows,)` most tokens to draft this round."""
        for group in self._groups:
            if group.changed:
                group.state, group.changed = group.controller.regrouped(group.state), False
        return self._gather(np.int64, lambda g: g.controller.limit(g.state))

    def keep_going(self, drafted: IntArray, signals: Signals) -> BoolArray:
        """`(rows,)` whether to draft another token."""
        if len(self._groups) == 1:
            alone = self._groups[0]
            return alone.controller.keep_going(alone.state, drafted, signals)
        return self._gather(
            bool,
            lambda g: g.controller.keep_going(g.state, drafted[g.rows], signals.take(g.rows)),
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell every controller what became of its rows."""
        for group in self._groups:
            seen = outcome if len(self._groups) == 1 else outcome.take(group.rows)
            group.state = group.controller.observe(group.state, seen)

    def _gather(self, dtype: Any, ask: Any) -> Any:
        if len(self._groups) == 1:
            return ask(self._groups[0])
        out = np.zeros(self._rows, dtype=dtype)
        for group in self._groups:
            out[group.rows] = ask(group)
        return out
