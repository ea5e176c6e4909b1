"""Run any controller over a trace: what the live engine would do, without running a model.

Exact for greedy traces: rounds, drafted and accepted tokens are those of the live engine, whose
steps (`engine.drafting`, `engine.loop`) are followed here over all prompts at once. For sampled
traces they are distributed as the live engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from forerun.controllers import CONTROLLERS
from forerun.controllers.base import Controller, LengthPolicy
from forerun.controllers.elementwise import column, joined, stacked, taken
from forerun.costs import Costs
from forerun.engine.endings import draft_limit, draft_stop, proposal_stop
from forerun.errors import require
from forerun.governors.base import Governor
from forerun.lab.traces.costs import passes
from forerun.lab.traces.results import (
    COUNTED,
    AsRecorded,
    Kept,
    Replay,
    Rounds,
    Watch,
    costs_for,
)  # fmt: skip
from forerun.lab.traces.trace import Trace
from forerun.types import (
    DRAWN,
    LIVE_SIGNALS,
    SIGNALS,
    BoolArray,
    FloatArray,
    IntArray,
    RoundOutcome,
    Stop,
    Token,
)

if TYPE_CHECKING:
    from forerun.lab.traces.rules import RecordedRule

_, _, _, EXHAUSTED, END_OF_TEXT, _ = map(int, Stop)  # numpy is slow with enums


def replay(
    trace: Trace,
    controller: str | Controller,
    cell: Costs,
    watch: Watch | None = None,
    rule: RecordedRule | None = None,
    draws: int = 1,
) -> Replay:
    """Every prompt by itself, each with a fresh state, as the live engine serves requests.

    Args:
        trace: the texts.
        controller: a spec or an object.
        cell: what a round costs; governors go by these.
        watch: called with every round.
        rule: what to keep; by default what was kept when the texts were recorded.
        draws: times that every prompt is served, by other coins of the rule, ≥ 1; results are sums.

    Raises:
        UnknownNameError: the controller's name or a setting is not known.
        SettingError: the spec cannot be read, or a setting is refused.
    """
    order = np.tile(np.arange(trace.prompts), draws)[:, None]
    done = _serve(trace, CONTROLLERS.make(controller), cell, order, watch, rule)
    sums = {f.name: getattr(done, f.name).reshape(draws, -1).sum(0) for f in fields(done)}
    return Replay(**sums)


def stream(
    trace: Trace,
    controller: str | Controller,
    cell: Costs,
    order: ArrayLike,
    watch: Watch | None = None,
) -> Replay:
    """The prompts as requests of one engine, one after another: each starts from the one before.

    A policy that starts every request afresh does in each what it does in `replay`, whose other
    arguments and errors it has. `order` is `(n,)` numbers of prompts, which may repeat, or
    `(streams, n)` for several streams, each with its own state, which are run side by side (much
    faster than in turn); the results' arrays are shaped like it.
    """
    places = np.asarray(order)
    good = places.ndim in (1, 2) and places.size > 0 and places.dtype.kind in "iu"
    require(good, "order", order, "(n,) or (streams, n) whole numbers")
    low, high = int(places.min()), int(places.max())
    inside = low >= 0 and high < trace.prompts
    require(inside, "order", f"{low}..{high}", f"in 0..{trace.prompts - 1}")
    policy = CONTROLLERS.make(controller)
    out = _serve(trace, policy, cell, np.atleast_2d(places).astype(np.int64), watch)
    return out.take(0) if places.ndim == 1 else out


def _serve(
    trace: Trace,
    controller: Controller,
    cell: Costs,
    order: IntArray,
    watch: Watch | None,
    rule: RecordedRule | None = None,
) -> Replay:
    """`(rows, places)` numbers of prompts, one row's prompts after another by one state."""
    if isinstance(controller, Governor):
        from forerun.lab.traces.batches import serve_alone  # only this needs torch

        return serve_alone(trace, controller, cell, order, watch, rule)
    assert isinstance(controller, LengthPolicy)
    cell = costs_for(controller, cell)
    count = {name: np.zeros(order.shape, np.int64) for name in COUNTED}
    spent, drift = np.zeros((2, *order.shape))
    texts = _Texts(trace, controller)
    judge = rule or AsRecorded(trace)
    verify, bonus = passes(cell, trace.depth), judge.has_bonus
    row, place, at = np.arange(len(order)), *np.zeros((2, len(order)), np.int64)
    prompt = order[:, 0]
    state = stacked([controller.start(certain) for certain in texts.certain[prompt].tolist()])
    while len(row):
        here = prompt * trace.tokens.shape[1] + at
        room = np.maximum(trace.budgets[prompt] - at - bonus, 0)
        drafted, capped = texts.draft(state, here, room)
        kept = judge.judge(here, drafted.lengths, np.stack([drift[row, place], at], 1))
        accepted, drafts = kept.accepted, drafted.lengths > 0
        drift[row, place] += kept.drift
        own = np.where(drafts & (accepted == drafted.lengths), int(bonus), 1)
        fed = drafted.lengths - (0 if bonus else drafts)
        took = cell.draft_seconds(drafted.lengths) + verify[fed]
        seen = texts.seen(here, drafted, kept, took / cell.plain)
        state = controller.observe(state, seen)
        seconds = cell.draft_seconds(drafted.steps) + verify[fed]
        seconds = seconds + cell.cold * ((drafted.steps > 0) & (drafted.lengths == 0))
        if watch is not None:
            counts = (drafted.lengths, accepted, drafted.steps, drafted.stopped_by)
            watch(Rounds(prompt, at, *counts, seconds))
        no_leaves = np.zeros((2, len(at)), np.int64)
        done = (np.ones_like(at), drafted.lengths, accepted, drafted.steps, capped, *no_leaves)
        for name, value in zip(COUNTED, done, strict=True):
            count[name][row, place] += value
        spent[row, place] += seconds
        at = at + accepted + own
        over = at >= trace.sizes[prompt]
        if not over.any():
            continue
        place, at = place + over, np.where(over, 0, at)
        stay = np.flatnonzero(place < order.shape[1])
        if len(stay) < len(row):
            row, place, at, state = row[stay], place[stay], at[stay], taken(state, stay)
            over = over[stay]
        prompt = order[row, place]
        if (new := np.flatnonzero(over)).size:
            state = _begun(controller, state, new, texts.certain[prompt])
    sizes = trace.sizes[order]
    plain = cell.plain * sizes.astype(np.float64)
    return Replay(committed=sizes, seconds=spent, plain_seconds=plain, drift=drift, **count)


def _begun(controller: LengthPolicy, state: Any, new: IntArray, certain: BoolArray) -> Any:
    """The state with that of rows `new` at the start of a request that follows another."""
    index = np.arange(len(certain))
    index[new] = len(certain) + np.arange(len(new))
    begun = [controller.start(bool(certain[i]), column(state, i)) for i in new.tolist()]
    return taken(joined(state, stacked(begun)), index)


@dataclass(frozen=True)
class _Drafted:
    """The rows' drafts of one round; arrays `(rows,)`."""

    lengths: IntArray
    steps: IntArray
    stopped_by: IntArray


class _Texts:
    """A trace as a drafter for one policy; places are flat, `prompt · T + position`."""

    def __init__(self, trace: Trace, policy: LengthPolicy) -> None:
        self._policy, self._depth = policy, trace.depth
        self._ends, self._stops = trace.ends.reshape(-1), trace.stops.reshape(-1)
        self._lengths = trace.lengths.reshape(-1)
        signals = [policy.signals(certain) for certain in (False, True)]
        read = frozenset().union(*signals)
        live = sorted(read & frozenset(LIVE_SIGNALS))
        require(not live, "signals of the controller", ", ".join(live), "in the trace; run it live")
        self._signals = {
            name: trace.signals[name].reshape(-1)
            for name in read & frozenset(SIGNALS)
            if trace.knows(name)
        }
        self._ids = bool(read & {"id", "previous"})
        self._most_trimmed = np.array([not signals[0] & DRAWN, trace.depth], np.int64)
        """Of rows over which coins are tossed, and of certain ones; see `engine.lengths`."""
        self._tokens = trace.draft_tokens.reshape(-1)
        self._before = np.pad(trace.tokens, ((0, 0), (1, 0)), constant_values=-1)[:, :-1].reshape(
            -1
        )
        self.certain: Any = ~trace.tossed  # `(prompts,)`
        self._certain = np.repeat(self.certain, trace.tokens.shape[1])

    def token(self, here: IntArray, depth: int) -> Token:
        """The draft's signals of its token at a depth of the run."""
        index = here * self._depth + depth
        signals: dict[str, Any] = {
            name: values.take(index) for name, values in self._signals.items()
        }
        if self._ids:
            before = self._tokens.take(index - 1) if depth else self._before.take(here)
            signals |= {"id": self._tokens.take(index), "previous": before}
        return Token(**signals)

    def seen(self, here: IntArray, drafted: _Drafted, kept: Kept, took: FloatArray) -> RoundOutcome:
        """The round as the policy sees it, its fields looked up when they are read."""
        most = int(drafted.lengths.max())
        return RoundOutcome(
            drafted.lengths,
            kept.accepted,
            _Lazy(most, kept.chance),
            drafted.stopped_by,
            _Lazy(most, lambda depth: self.token(here, depth)),
            took,
        )

    def draft(self, state: Any, here: IntArray, room: IntArray) -> tuple[_Drafted, IntArray]:
        """What each row drafts, and which rounds the depth cut short."""
        wanted = np.broadcast_to(self._policy.limit(state), here.shape)
        limit, why = draft_limit(wanted, room)
        length = self._lengths[here]
        reach = np.minimum(limit, length)
        why = proposal_stop(reach, limit, why)
        ends = (why == EXHAUSTED) & (length < self._depth)  # the drafter's own doing
        out = self._run(state, here, reach, np.where(ends, self._stops[here], why))
        return out, (out.stopped_by == EXHAUSTED) & ~ends

    def _run(self, state: Any, here: IntArray, reach: IntArray, stopped_by: IntArray) -> _Drafted:
        """Draft up to `reach`; rows that reach it were `stopped_by`."""
        policy, ends = self._policy, self._ends[here]
        lengths = np.minimum(reach, ends)
        steps, stopped = lengths.copy(), np.where(ends <= reach, END_OF_TEXT, stopped_by)
        if not policy.stops_early:
            return _Drafted(lengths, steps, stopped)
        part, depth, memo = np.arange(len(reach)), 0, None
        active = lengths > 0
        while (left := int(np.count_nonzero(active))) > 0:
            if 2 * left <= len(part):  # rows that stopped are not worth asking any more
                index = np.flatnonzero(active)
                part, active, here = part[index], active[index], here[index]
                state, memo = taken(state, index), taken(memo, index)
            goes_on, memo = policy.step(state, memo, self.token(here, depth))
            goes, depth = np.broadcast_to(goes_on, part.shape), depth + 1
            over = active & (~goes | (steps[part] == depth))
            if over.any():
                end = part[over]
                trimmed = np.broadcast_to(policy.trim(state, memo), part.shape)[over]
                trimmed = np.minimum(trimmed, self._most_trimmed[self._certain[here][over] * 1])
                why = draft_stop(goes[over], trimmed, ends[end] == depth)
                stopped[end] = np.where(why < 0, stopped[end], why)
                lengths[end] = np.maximum(depth - trimmed, 0)
                steps[end] = depth
                active = active & ~over
        return _Drafted(lengths, steps, stopped)


class _Lazy(Sequence[Any]):
    """A sequence whose elements are made when they are read."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)

    def __iter__(self) -> Iterator[Any]:
        return (self._make(index) for index in range(self._size))
