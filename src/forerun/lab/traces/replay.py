"""Run any controller over a trace: what the live engine would do, without running a model.

Exact for greedy traces: rounds, drafted and accepted tokens are those of the live engine, whose
steps (`engine.drafting`, `engine.loop`) are followed here over all prompts at once. For sampled
traces they are distributed as the live engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forerun.controllers import CONTROLLERS, LengthController
from forerun.controllers.elementwise import filled, joined, select, spread, taken
from forerun.costs import Costs
from forerun.engine.endings import draft_limit, draft_stop, proposal_stop
from forerun.errors import require
from forerun.lab.traces.costs import passes
from forerun.lab.traces.trace import Trace
from forerun.types import LIVE_SIGNALS, SIGNALS, FloatArray, IntArray, Round, Stop, Token

RESAMPLES = 2000  # bootstrap samples of an interval
_, CONFIDENCE, _, EXHAUSTED, END_OF_TEXT, _ = map(int, Stop)  # numpy is slow with enums


@dataclass(frozen=True)
class Replay:
    """Counts and seconds of each prompt; all arrays `(prompts,)`."""

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
        """A selection of the prompts: numbers, a mask or a slice."""
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
    trace: Trace, controller: str | LengthController, cell: Costs, watch: Watch | None = None
) -> Replay:
    """Every prompt by itself, each with a fresh state, as the live engine serves requests.

    Args:
        trace: the texts.
        controller: a spec or an object.
        cell: what a round costs; controllers that weigh costs go by these.
        watch: called with every round.

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
    cell: Costs,
    order: ArrayLike,
    watch: Watch | None = None,
) -> Replay:
    """The prompts as requests of one engine, one after another: each starts from the one before.

    A controller that carries nothing from request to request (`LengthController.carries`) does in
    each what it does in `replay`.

    Args:
        trace: the texts.
        controller: a spec or an object.
        cell: what a round costs.
        order: `(n,)` numbers of prompts, which may repeat, or `(streams, n)` for several streams,
            each with its own state, which are run side by side (much faster than in turn).
        watch: called with every round.

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
    policy = CONTROLLERS.make(controller)
    out = _serve(trace, policy, cell, np.atleast_2d(places).astype(np.int64), watch)
    return out.take(0) if places.ndim == 1 else out


def costs_for(controller: LengthController, cell: Costs) -> Costs:
    """What rounds cost under a controller: one that is shown drafted tokens pays for it."""
    return cell.asked if controller.asks or controller.previews else cell


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


def summarise(trace: Trace, result: Replay, batch: int = 1) -> dict[str, dict[str, Any]]:
    """Totals and figures with intervals of a `replay`: of ``"all"`` prompts and of each family.

    Args:
        trace: the texts.
        result: their replay.
        batch: rows that share the seconds (`Cell.batch`); tokens per second are those of all.
    """
    families = np.array(trace.families)
    groups = {"all": np.ones(trace.prompts, dtype=bool)}
    groups |= {name: families == name for name in dict.fromkeys(trace.families)}
    out: dict[str, dict[str, Any]] = {}
    for name, chosen in groups.items():
        group = result.take(chosen)
        out[name] = {
            "prompts": len(group.rounds),
            "tokens": int(group.committed.sum()),
            "speedup": geometric(group.speedup),
            "tokens_per_second": rate(group.committed * batch, group.seconds),
            **{key: int(getattr(group, key).sum()) for key in (*_COUNTED, "wasted")},
            "seconds": float(group.seconds.sum()),
            "plain_seconds": float(group.plain_seconds.sum()),
        }
    return out


def _draws(size: int, seed: int) -> IntArray:
    require(size >= 1, "prompts", size, "at least one")
    return np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))


_COUNTED = ("rounds", "drafted", "accepted", "steps", "capped")


def _serve(
    trace: Trace,
    controller: LengthController,
    cell: Costs,
    order: IntArray,
    watch: Watch | None,
) -> Replay:
    """`(rows, places)` numbers of prompts, one row's prompts after another by one state."""
    cell = costs_for(controller, cell)
    count = {name: np.zeros(order.shape, np.int64) for name in _COUNTED}
    spent = np.zeros(order.shape)
    texts = _Texts(trace, controller, cell)
    verify = passes(cell, trace.depth)
    row, place, at = np.arange(len(order)), *np.zeros((2, len(order)), np.int64)
    prompt = order[:, 0]
    state = controller.begin(spread(controller.start(), len(order)), texts.certain[prompt])
    while len(row):
        here = prompt * trace.tokens.shape[1] + at
        room = np.maximum(trace.budgets[prompt] - at - 1, 0)
        drafted, capped = texts.draft(state, here, room)
        accepted = np.minimum(drafted.lengths, texts.matches[here])
        seen = texts.seen(here, drafted, accepted)
        state = controller.observe(state, cell, seen)
        seconds = cell.draft_seconds(drafted.steps) + verify[drafted.lengths]
        seconds = seconds + cell.cold * ((drafted.steps > 0) & (drafted.lengths == 0))
        if watch is not None:
            counts = (drafted.lengths, accepted, drafted.steps, drafted.stopped_by)
            watch(Rounds(prompt, at, *counts, seconds))
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
            row, place, at, state = row[stay], place[stay], at[stay], taken(state, stay)
            over = over[stay]
        prompt = order[row, place]
        if (new := np.flatnonzero(over)).size:
            index = np.arange(len(row))
            index[new] = len(row) + np.arange(len(new))
            begun = controller.begin(_next(controller, state, new), texts.certain[prompt[new]])
            state = taken(joined(state, begun), index)
    sizes = trace.sizes[order]
    plain = cell.plain * sizes.astype(np.float64)
    return Replay(committed=sizes, seconds=spent, plain_seconds=plain, **count)


def _next(controller: LengthController, state: Any, rows: IntArray) -> Any:
    """The states with which the next requests of rows start."""
    if controller.carries:
        return filled(controller.carry(taken(state, rows)), len(rows))
    return spread(controller.start(), len(rows))


@dataclass(frozen=True)
class _Drafted:
    """The rows' drafts of one round; arrays `(rows,)`."""

    lengths: IntArray
    steps: IntArray
    stopped_by: IntArray


class _Texts:
    """A trace as a drafter for one controller; places are flat, `prompt · T + position`."""

    def __init__(self, trace: Trace, controller: LengthController, cell: Costs) -> None:
        self._controller, self._cell, self._depth = controller, cell, trace.depth
        self.matches, self._ends = trace.matches.reshape(-1), trace.ends.reshape(-1)
        live = sorted(controller.signals & frozenset(LIVE_SIGNALS))
        require(not live, "signals of the controller", ", ".join(live), "in the trace; run it live")
        wanted = controller.signals & frozenset(SIGNALS)
        self._signals = {name: trace.signals[name].reshape(-1) for name in wanted}
        self._prob = trace.accept_prob.reshape(-1)
        self._tokens = trace.draft_tokens.reshape(-1)
        self._before = np.pad(trace.tokens, ((0, 0), (1, 0)), constant_values=-1)[:, :-1].reshape(
            -1
        )
        prob = trace.accept_prob
        sampled = ((prob > 0) & (prob < 1)).any((1, 2))
        self.certain: Any = ~sampled
        """`(prompts,)`."""
        self._sampled = np.repeat(sampled, trace.tokens.shape[1])

    def token(self, here: IntArray, depth: int) -> Token:
        """The draft's signals of its token at a depth of the run."""
        index = here * self._depth + depth
        signals: dict[str, Any] = {
            name: values.take(index) for name, values in self._signals.items()
        }
        before = self._tokens.take(index - 1) if depth else self._before.take(here)
        return Token(self._tokens.take(index), before, **signals)

    def seen(self, here: IntArray, drafted: _Drafted, accepted: IntArray) -> Round:
        """The round as the controller sees it, its fields looked up when they are read."""
        most = int(drafted.lengths.max())
        return Round(
            drafted.lengths,
            accepted,
            _Lazy(most, lambda depth: self._prob.take(here * self._depth + depth)),
            drafted.stopped_by,
            _Lazy(most, lambda depth: self.token(here, depth)),
            left_out=drafted.steps - drafted.lengths,
        )

    def draft(self, state: Any, here: IntArray, room: IntArray) -> tuple[_Drafted, IntArray]:
        """What each row drafts, and which rounds the depth cut short."""
        sampled = self._sampled[here]
        opening = self._controller.look(state, self._cell)
        if sampled.any():
            opening = select(sampled, self._controller.open(state, self._cell), opening)
        wanted = np.broadcast_to(opening.alone, here.shape)
        limit, why = draft_limit(wanted, room)
        reach = np.minimum(limit, self._depth)
        stopped = proposal_stop(reach, limit, why)
        out = self._run(state, opening.memo, here, reach, stopped)
        if self._controller.previews:
            out = self._planned(out, state, opening.memo, here, reach)
        return out, out.stopped_by == EXHAUSTED

    def _planned(
        self, seen: _Drafted, state: Any, memo: Any, here: IntArray, reach: IntArray
    ) -> _Drafted:
        """What becomes of a preview: kept as far as planned, or only counted and drawn anew."""
        begun = memo
        for depth in range(int(seen.lengths.max())):
            longer = self._controller.fold(state, memo, self.token(here, depth))
            # Rows without a preview keep nothing, whatever is planned for them.
            memo = longer if depth == 0 else select(depth < seen.lengths, longer, memo)
        planned = np.minimum(self._controller.plan(state, self._cell, memo), seen.lengths)
        why = np.where(planned < seen.lengths, CONFIDENCE, seen.stopped_by)
        kept = replace(seen, lengths=planned, stopped_by=why)
        anew = self._sampled[here]  # a sampled preview is thrown away
        if not anew.any():
            return kept
        new = self._run(state, begun, here, np.minimum(planned, reach), why)
        return _Drafted(
            np.where(anew, new.lengths, kept.lengths),
            np.where(anew, seen.steps + new.steps, kept.steps),
            np.where(anew, new.stopped_by, kept.stopped_by),
        )

    def _run(
        self, state: Any, memo: Any, here: IntArray, reach: IntArray, stopped_by: IntArray
    ) -> _Drafted:
        """Draft up to `reach`; rows that reach it were `stopped_by`."""
        controller, ends = self._controller, self._ends[here]
        lengths = np.minimum(reach, ends)
        steps, stopped = lengths.copy(), np.where(ends <= reach, END_OF_TEXT, stopped_by)
        if not controller.asks:
            return _Drafted(lengths, steps, stopped)
        part, depth = np.arange(len(reach)), 0
        active = lengths > 0
        while (left := int(np.count_nonzero(active))) > 0:
            if 2 * left <= len(part):  # rows that stopped are not worth asking any more
                index = np.flatnonzero(active)
                part, active, here = part[index], active[index], here[index]
                state, memo = taken(state, index), taken(memo, index)
            memo = controller.fold(state, memo, self.token(here, depth))
            depth += 1
            stops = active & ~np.broadcast_to(
                controller.keep_going(state, self._cell, memo), part.shape
            )
            if stops.any():
                stop = part[stops]
                steps[stop] = depth
                left_out = controller.left_out(state, self._cell, memo)
                left_out = np.where(self._sampled[here], controller.drops_last, left_out)[stops]
                ended = ends[stop] == depth
                lengths[stop], stopped[stop] = draft_stop(depth, False, left_out, ended)
            active = steps[part] > depth
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
