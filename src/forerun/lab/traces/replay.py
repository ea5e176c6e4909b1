"""Run any controller over a trace: what the live engine would do, without running a model.

Exact for greedy traces: rounds, drafted and accepted tokens are those of the live engine, whose
steps (`engine.drafting`, `engine.loop`) are followed here over all prompts at once. For sampled
traces they are distributed as the live engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forerun.controllers import CONTROLLERS, LengthController
from forerun.errors import require
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.trace import Trace
from forerun.types import BoolArray, FloatArray, IntArray, RoundOutcome, Signals, Stop

RESAMPLES = 2000


@dataclass(frozen=True)
class Replay:
    """What became of each prompt; all arrays `(prompts,)`."""

    rounds: IntArray
    drafted: IntArray
    """Tokens put before the target."""
    accepted: IntArray
    committed: IntArray
    """Tokens of the text."""
    steps: IntArray
    """Tokens the drafter was stepped for: those drafted, those dropped, those of a preview."""
    capped: IntArray
    """Rounds whose draft went on to the trace's depth and would have gone beyond. Where there are
    none, the replay is that of the live engine; elsewhere it is that of an engine whose drafter
    has nothing more to propose."""
    seconds: FloatArray
    plain_seconds: FloatArray
    """Of plain decoding."""

    @property
    def speedup(self) -> FloatArray:
        """Plain seconds over seconds."""
        return self.plain_seconds / self.seconds

    @property
    def wasted(self) -> IntArray:
        """Drafted tokens that were not accepted."""
        return self.drafted - self.accepted

    def take(self, index: Any) -> Replay:
        """Some prompts only: numbers, a mask or a slice."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class Rounds:
    """One round of every prompt that is still running; all arrays `(rows,)`."""

    prompt: IntArray
    """Its number in the trace."""
    at: IntArray
    """Tokens of its text before the round."""
    drafted: IntArray
    accepted: IntArray
    steps: IntArray
    stopped_by: IntArray
    """Values of `Stop`."""
    seconds: FloatArray


Watch = Callable[[Rounds], None]


def replay(
    trace: Trace, controller: str | LengthController, cell: Cell, watch: Watch | None = None
) -> Replay:
    """Every prompt by itself, each with a fresh state, as the live engine serves requests.

    Args:
        trace: the texts.
        controller: a spec or an object.
        cell: what a round costs. Controllers that read the clock see it, too: `draft_seconds` and
            `verify_seconds` of a `RoundOutcome` are `(rows,)` here, each prompt having its own.
        watch: told every round.

    Sampled texts: a preview (`LengthController.previews`) is thrown away live and drawn anew; a
    trace has one run per position, which is taken for both. So the counts of such a controller
    are not exactly distributed as live.

    Raises:
        UnknownNameError: the controller's name or a setting is not known.
        SettingError: the spec cannot be read, or a setting is refused.
    """
    order = np.arange(trace.prompts)[:, None]
    return _serve(trace, CONTROLLERS.make(controller), cell, order, watch).take((slice(None), 0))


def stream(
    trace: Trace,
    controller: str | LengthController,
    cell: Cell,
    order: ArrayLike,
    watch: Watch | None = None,
) -> Replay:
    """The prompts as requests of one engine, one after another: each starts from the one before.

    A controller that carries nothing from request to request (`LengthController.renew`) does in
    each what it does in `replay`.

    Args:
        trace: the texts.
        controller: a spec or an object.
        cell: what a round costs.
        order: `(n,)` numbers of prompts, which may repeat, or `(streams, n)` for several streams,
            each with its own state, which are run side by side (much faster than in turn).
        watch: told every round.

    Returns:
        Arrays shaped like `order`.

    Raises:
        UnknownNameError, SettingError: the controller, or an order that is empty or out of range.
    """
    places = np.asarray(order)
    good = places.ndim in (1, 2) and places.size > 0 and places.dtype.kind in "iu"
    require(good, "order", order, "(n,) or (streams, n) whole numbers")
    low, high = int(places.min()), int(places.max())
    inside = low >= 0 and high < trace.prompts
    require(inside, "order", f"{low}..{high}", f"in 0..{trace.prompts - 1}")
    made = CONTROLLERS.make(controller)
    out = _serve(trace, made, cell, np.atleast_2d(places).astype(np.int64), watch)
    return out.take(0) if places.ndim == 1 else out


def geometric(ratios: ArrayLike, seed: int = 0) -> dict[str, float]:
    """Geometric mean of `(n,)` paired ratios, n ≥ 1, with a 95 % bootstrap interval over prompts.

    >>> cell = geometric([1.0, 2.0, 4.0])
    >>> round(cell["mean"], 12), cell["n"]
    (2.0, 3)
    """
    logs = np.log(np.asarray(ratios, dtype=float))
    low, high = np.quantile(logs[_draws(len(logs), seed)].mean(1), [0.025, 0.975])
    mean, low, high = (float(np.exp(value)) for value in (logs.mean(), low, high))
    return {"mean": mean, "low": low, "high": high, "n": len(logs)}


def rate(tokens: ArrayLike, seconds: ArrayLike, seed: int = 0) -> dict[str, float]:
    """All tokens over all seconds, both `(n,)`, with a 95 % bootstrap interval over prompts.

    >>> rate([10, 20], [1.0, 2.0])["mean"]
    10.0
    """
    top, bottom = np.asarray(tokens, dtype=float), np.asarray(seconds, dtype=float)
    index = _draws(len(top), seed)
    low, high = np.quantile(top[index].sum(1) / bottom[index].sum(1), [0.025, 0.975])
    mean = float(top.sum() / bottom.sum())
    return {"mean": mean, "low": float(low), "high": float(high), "n": len(top)}


def summarise(trace: Trace, found: Replay, batch: int = 1) -> dict[str, dict[str, Any]]:
    """Totals and figures with intervals of a `replay`: of ``"all"`` prompts and of each family.

    Args:
        trace: the texts.
        found: what became of them.
        batch: rows that share the seconds (`Cell.batch`); tokens per second are those of all.
    """
    families = np.array(trace.families)
    groups = {"all": np.ones(trace.prompts, dtype=bool)}
    groups |= {name: families == name for name in dict.fromkeys(trace.families)}
    out: dict[str, dict[str, Any]] = {}
    for name, chosen in groups.items():
        some = found.take(chosen)
        out[name] = {
            "prompts": len(some.rounds),
            "tokens": int(some.committed.sum()),
            "speedup": geometric(some.speedup),
            "tokens_per_second": rate(some.committed * batch, some.seconds),
            **{key: int(getattr(some, key).sum()) for key in (*_COUNTED, "wasted")},
            "seconds": float(some.seconds.sum()),
            "plain_seconds": float(some.plain_seconds.sum()),
        }
    return out


def _draws(size: int, seed: int) -> IntArray:
    require(size >= 1, "prompts", size, "at least one")
    return np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))


@dataclass(frozen=True)
class _Drafted:
    """What the rows drafted in one round; arrays `(rows,)`."""

    lengths: IntArray
    steps: IntArray
    stopped_by: IntArray
    shown: IntArray
    """Tokens whose signals the controller is shown."""


_DRAFTED = tuple(f.name for f in fields(_Drafted))
_Said = dict[str, FloatArray]
"""What the draft says to full depth: fields of `Signals`, `(rows, K)`."""


def _serve(
    trace: Trace,
    controller: LengthController,
    cell: Cell,
    order: IntArray,
    watch: Watch | None,
) -> Replay:
    """`(rows, places)` numbers of prompts, one row's prompts after another by one state."""
    count = {name: np.zeros(order.shape, np.int64) for name in _COUNTED}
    spent = np.zeros(order.shape)
    texts = _Texts(trace, controller)
    verify = cell.verify_seconds(np.arange(trace.depth + 2)) + cell.fixed
    row, place, at = np.arange(len(order)), *np.zeros((2, len(order)), np.int64)
    prompt, state = order[:, 0], controller.start(len(order))
    while len(row):
        here = prompt * trace.tokens.shape[1] + at
        room = np.maximum(trace.budgets[prompt] - at - 1, 0)
        drafted, said, capped = texts.draft(state, here, room)
        accepted = np.minimum(drafted.lengths, texts.matches[here])
        # Scalars live, where the rows of a batch share the clock; here each row has its own.
        clock: Any = (cell.draft_seconds(drafted.steps), verify[drafted.lengths + 1])
        outcome = RoundOutcome(
            drafted.lengths,
            accepted,
            texts.accept_prob(here, drafted.lengths),
            drafted.stopped_by,
            said,
            draft_seconds=clock[0],
            verify_seconds=clock[1],
            draft_steps=drafted.steps,
            first_step_seconds=np.minimum(drafted.steps, 1) * (cell.draft + cell.first),
        )
        state = controller.observe(state, outcome)
        seconds = clock[0] + clock[1]
        if watch is not None:
            told = (drafted.lengths, accepted, drafted.steps, drafted.stopped_by, seconds)
            watch(Rounds(prompt, at, *told))
        done = (1, drafted.lengths, accepted, drafted.steps, capped)
        for name, value in zip(_COUNTED, done, strict=True):
            count[name][row, place] += value
        spent[row, place] += seconds
        at = at + accepted + 1
        over = at >= trace.sizes[prompt]
        if not over.any():
            continue
        place, at = place + over, np.where(over, 0, at)
        stay = np.flatnonzero(place < order.shape[1])
        if len(stay) < len(row):
            row, place, at, state = row[stay], place[stay], at[stay], state.take(stay)
            over = over[stay]
        prompt = order[row, place]
        if (new := np.flatnonzero(over)).size:
            index = np.arange(len(row))
            index[new] = len(row) + np.arange(len(new))
            state = state.join(controller.renew(state.take(new))).take(index)
    sizes = trace.sizes[order]
    plain = cell.plain * sizes.astype(np.float64)
    return Replay(committed=sizes, seconds=spent, plain_seconds=plain, **count)


_COUNTED = ("rounds", "drafted", "accepted", "steps", "capped")


class _Texts:
    """A trace as a drafter for one controller; places are flat, `prompt · T + position`."""

    def __init__(self, trace: Trace, controller: LengthController) -> None:
        self._controller, self._depth = controller, trace.depth
        self._asks = type(controller).keep_going is not LengthController.keep_going
        self.matches, self._ends = trace.matches.reshape(-1), trace.ends.reshape(-1)
        self._prob = trace.accept_prob.reshape(-1, trace.depth)
        self._signals = {
            name: trace.signals[name].reshape(-1, trace.depth) for name in controller.signals
        }
        if controller.previews:  # a sampled one is thrown away
            prob = trace.accept_prob
            sampled = ((prob > 0) & (prob < 1)).any((1, 2))
            self._anew = np.repeat(sampled, trace.tokens.shape[1])

    def accept_prob(self, here: IntArray, lengths: IntArray) -> FloatArray:
        """`(rows, n)` as in `RoundOutcome`; 0 beyond the first miss, where a trace ends."""
        return _upto(self._prob.take(here, 0), lengths)

    def draft(
        self, state: Any, here: IntArray, room: IntArray
    ) -> tuple[_Drafted, Signals, IntArray]:
        """What each row drafts, what the draft says, and which rounds the depth cut short."""
        wanted = self._controller.limit(state)
        limit = np.minimum(wanted, room)
        stopped = np.where(room < wanted, Stop.BUDGET, Stop.LIMIT)
        stopped = np.where(limit > self._depth, Stop.EXHAUSTED, stopped)
        reach, ends = np.minimum(limit, self._depth), self._ends[here]
        said = {name: values.take(here, 0) for name, values in self._signals.items()}
        out = self._run(state, reach, ends, stopped, said)
        if self._controller.previews:
            out = self._planned(out, state, here, reach, said)
        return out, _signals(said, out.shown), out.stopped_by == Stop.EXHAUSTED

    def _planned(
        self, seen: _Drafted, state: Any, here: IntArray, reach: IntArray, said: _Said
    ) -> _Drafted:
        """What becomes of a preview: kept as far as planned, or only counted and drawn anew."""
        signals = _signals(said, seen.shown)
        planned = self._controller.plan(state, seen.lengths, signals)
        why = np.where(planned < seen.lengths, Stop.CONFIDENCE, seen.stopped_by)
        kept = replace(seen, lengths=np.minimum(planned, seen.lengths), stopped_by=why)
        anew = self._anew[here]
        if not anew.any():
            return kept
        new = self._run(state, np.minimum(planned, reach), self._ends[here], why, said)
        new = replace(new, steps=seen.steps + new.steps)
        pairs = [(getattr(new, name), getattr(kept, name)) for name in _DRAFTED]
        return _Drafted(*(np.where(anew, *pair) for pair in pairs))

    def _run(
        self,
        state: Any,
        reach: IntArray,
        ends: IntArray,
        stopped_by: IntArray,
        said: _Said,
    ) -> _Drafted:
        """Draft up to `reach`; rows that reach it were `stopped_by`."""
        lengths = np.minimum(reach, ends)
        steps, stopped = lengths.copy(), np.where(ends <= reach, Stop.END_OF_TEXT, stopped_by)
        if not self._asks:
            return _Drafted(lengths, steps, stopped, steps)
        part, depth = np.arange(len(reach)), 0
        active = lengths > 0
        while (left := int(np.count_nonzero(active))) > 0:
            if 2 * left <= len(part):  # rows that stopped are not worth asking any more
                index = np.flatnonzero(active)
                part, active, state = part[index], active[index], state.take(index)
                said = {name: values[index] for name, values in said.items()}
            depth += 1
            newest = Signals(**{name: values[:, :depth] for name, values in said.items()})
            go = self._controller.keep_going(state, np.full(len(part), depth), newest)
            stop = part[active & ~go]
            steps[stop] = depth
            if self._controller.drops_last:
                lengths[stop], stopped[stop] = depth - 1, Stop.CONFIDENCE
            else:
                lengths[stop] = depth
                stopped[stop] = np.where(ends[stop] == depth, Stop.END_OF_TEXT, Stop.CONFIDENCE)
            active = steps[part] > depth
        return _Drafted(lengths, steps, stopped, steps)


def _signals(said: _Said, shown: IntArray) -> Signals:
    """As much as was drafted; without a draft there is nothing to say."""
    if not shown.any():
        return Signals()
    return Signals(**{name: _upto(values, shown) for name, values in said.items()})


def _upto(values: FloatArray, lengths: IntArray) -> FloatArray:
    """`(rows, n)` of `(rows, K)`, n the longest of the lengths; 0 beyond each."""
    inside: BoolArray = np.arange(lengths.max()) < lengths[:, None]
    return np.where(inside, values[:, : inside.shape[1]], 0.0)
