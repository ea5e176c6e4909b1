"""Bounds on the speed of a trace: the clairvoyant oracle, the same with rules, and the best of
simple policies.

The maths is in docs/bounds.md; the bound for policies that see only what a real controller sees
is in `forerun.lab.bounds.informed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.errors import SettingError, require
from forerun.lab.traces.costs import Cell, passes
from forerun.lab.traces.replay import replay
from forerun.lab.traces.results import Rounds, geometric, mean_speed
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray, IntArray

BUDGETS = (0.0, 0.01, 0.02, 0.05)  # mean drifts per token that are asked for
SEARCHED = 16  # prices tried


@dataclass(frozen=True)
class Path:
    """Lengths that a policy drafts, round by round; -1 beyond a prompt's last round."""

    drafted: IntArray  # `(prompts, rounds)` tokens put before the target
    steps: IntArray  # `(prompts, rounds)` tokens the drafter was stepped for, ≥ drafted

    def seconds(self, cell: Cell) -> FloatArray:
        return self.round_seconds(cell).sum(1)

    def round_seconds(self, cell: Cell) -> FloatArray:
        """`(prompts, rounds)` seconds of each round; 0 beyond the last."""
        verify = passes(cell, int(self.drafted.max()))
        seconds = cell.draft_seconds(self.steps) + verify[np.maximum(self.drafted, 0)]
        return np.where(self.drafted >= 0, seconds, 0.0)


@dataclass(frozen=True)
class Bound:
    """The best that a class of policies reaches on a trace, all arrays per prompt."""

    name: str  # the policy that reaches it
    path: Path
    seconds: FloatArray  # `(prompts,)`
    plain_seconds: FloatArray  # `(prompts,)` of plain decoding

    @classmethod
    def of(cls, name: str, path: Path, trace: Trace, cell: Cell) -> Bound:
        plain = trace.sizes.astype(np.float64) * cell.plain
        return cls(name, path, path.seconds(cell), plain)

    @property
    def speedup(self) -> FloatArray:
        return self.plain_seconds / self.seconds

    @property
    def mean(self) -> float:
        """Geometric mean of the speed-up."""
        return mean_speed(self.speedup)


def reach(trace: Trace) -> IntArray:
    """`(prompts, T)` most tokens a round can draft from each position. It ends with the budget (one
    token is always the target's own), with a drafted end of text, and with the recorded run; 0
    beyond the text."""
    room = trace.budgets[:, None] - np.arange(trace.tokens.shape[1]) - 1
    most = np.minimum(np.minimum(room, trace.ends), trace.lengths)
    return np.where(trace.valid, np.maximum(most, 0), 0)


def oracle(trace: Trace, cell: Cell) -> Bound:
    """The cheapest path through every text, all matches known beforehand. No controller's replay in
    this cell takes less time for any prompt unless it judges second choices: its path is a sequence
    of drafted lengths, and this is the cheapest of all sequences."""
    return Bound.of("oracle", follow(trace, _cheapest(trace, cell, None)[0]), trace, cell)


def tree_oracle(trace: Trace, cell: Cell, comb: bool = False) -> FloatArray:
    """`(prompts,)` seconds of the cheapest path where a round may judge second choices, too: beside
    each drafted token if `comb`, else beside one, the best."""
    lengths = np.arange(trace.depth + 1)
    return _cheapest(trace, cell, lengths if comb else np.minimum(lengths, 1))[1]


def _cheapest(trace: Trace, cell: Cell, leaves: IntArray | None) -> tuple[IntArray, FloatArray]:
    """From the end of each text backwards: tokens to draft `(prompts, T)`, and seconds in all.
    `leaves` are by tokens drafted the second choices that a round may judge besides."""
    prompts, T = trace.tokens.shape
    rows, lengths = np.arange(prompts)[:, None], np.arange(trace.depth + 1)
    drafting, judging = cell.draft_seconds(lengths), passes(cell, 2 * trace.depth)
    price, right = drafting + judging[lengths], trace.second_kept
    most, remaining = reach(trace), np.zeros((prompts, T + 1))
    best = np.zeros((prompts, T), np.int64)
    for at in reversed(range(T)):
        matches = trace.matches[:, at, None]
        following = at + 1 + np.minimum(lengths, matches)
        # What is beyond the end of a text costs nothing.
        total = price + remaining[rows, np.minimum(following, T)]
        if leaves is not None:
            following = following + ((lengths > matches) & right[:, at, None])
            tree = drafting + judging[lengths + leaves] + cell.tree
            total = np.minimum(total, tree + remaining[rows, np.minimum(following, T)])
        total[lengths > most[:, at, None]] = np.inf
        best[:, at] = total.argmin(1)
        remaining[:, at] = np.where(at < trace.sizes, total.min(1), 0.0)
    return best, remaining[:, 0]


def walk(trace: Trace, decide: Callable[[IntArray, IntArray], IntArray]) -> Path:
    """The rounds of a policy; `decide` tells of prompts `(n,)`, each with so many tokens committed,
    `(n,)`, how many to draft, ≥ 0; cut to `reach`."""
    drafted, most, at = [], reach(trace), np.zeros(trace.prompts, np.int64)
    while len(rows := np.flatnonzero(at < trace.sizes)):
        here = rows, at[rows]
        length = np.minimum(decide(*here), most[here])
        drafted.append(np.full(trace.prompts, -1))
        drafted[-1][rows] = length
        at[rows] += np.minimum(length, trace.matches[here]) + 1
    path = np.stack(drafted, 1)
    return Path(path, np.maximum(path, 0))


def follow(trace: Trace, planned: IntArray) -> Path:
    """The rounds of a policy that drafts `planned` `(prompts, T)` tokens from each position."""
    return walk(trace, lambda *here: planned[here])


def best_fixed(trace: Trace, cell: Cell) -> tuple[Bound, int]:
    """The best γ up to the trace's depth for all prompts, by geometric mean of the speed-up: its
    bound, and γ."""
    bounds = [
        Bound.of(f"fixed({n})", follow(trace, np.full(trace.tokens.shape, n)), trace, cell)
        for n in range(trace.depth + 1)
    ]
    length = int(np.argmax([bound.mean for bound in bounds]))
    return bounds[length], length


def paths(trace: Trace, specs: Iterable[str]) -> dict[str, Path]:
    """Paths of controllers that do not depend on costs, replayed once each, to be priced in any
    cell; see `Path.seconds`."""
    drafted = {}
    for spec in specs:
        series: list[IntArray] = []

        def note(rounds: Rounds, series: list[IntArray] = series) -> None:
            series.append(np.full((2, trace.prompts), -1))
            series[-1][:, rounds.prompt] = rounds.drafted, rounds.steps

        replay(trace, spec, Cell.synthetic(1), note)
        lengths, steps = np.stack(series, 2)
        drafted[spec] = Path(lengths, np.maximum(steps, 0))
    return drafted


def tuned(trace: Trace, cell: Cell, drafted: dict[str, Path]) -> list[Bound]:
    """Controllers in a cell, the best first, by geometric mean of the speed-up."""
    bounds = [Bound.of(spec, path, trace, cell) for spec, path in drafted.items()]
    return sorted(bounds, key=lambda bound: -bound.mean)


def lenient_bounds(
    trace: Trace, cell: Cell, budgets: tuple[float, ...] = BUDGETS
) -> list[dict[str, Any]]:
    """The bound with rules at each budget, a mean drift per token in [0, 1]: `lenient_bound` of the
    document of `replay --json`. `SettingError` for a trace without what rules read.

    Knowing a run's acceptance ratios, but not the coins, a round drafts k tokens and keeps each for
    sure or by its coin. Kept for sure, a token costs a drift of 1 less its ratio. Dynamic
    programming finds the cheapest such policy in seconds and price · drift, from the end of a text
    backwards; the price is the least at which the mean drift a token stays within a budget
    (docs/bounds.md).
    """
    if np.isnan(trace.judged["ratio"]).any():
        raise SettingError("bounds of rules need what rules read; record with a draft model")
    plain = trace.sizes.astype(np.float64) * cell.plain
    tokens = trace.sizes.sum()

    def priced(price: float) -> tuple[float, FloatArray, float]:
        """The price of a unit of drift, `(prompts,)` seconds, and the mean drift."""
        seconds, drift = _at_price(trace, cell, price)
        return price, seconds, float(drift.sum() / tokens)

    out = []
    for budget in budgets:
        require(0 <= budget <= 1, "drift", budget, "in [0, 1]")
        low, high = 0.0, float(cell.plain) * 64
        best = priced(np.inf)
        for _ in range(SEARCHED if budget else 0):
            tried = priced((low + high) / 2)
            if tried[2] <= budget:
                best, high = tried, tried[0]
            else:
                low = tried[0]
        price, seconds, drift = best
        shown = price / cell.plain if budget else None
        speedup = geometric(plain / seconds)
        out.append({"budget": budget, "drift": drift, "price": shown, "speedup": speedup})
    return out


def _at_price(trace: Trace, cell: Cell, price: float) -> tuple[FloatArray, FloatArray]:
    """`(prompts,)` expected seconds and drift of the policy that is cheapest at a price."""
    (prompts, size), depth = trace.tokens.shape, trace.depth
    count = np.arange(depth + 1)
    taken = cell.draft_seconds(count) + passes(cell, depth)
    most, ratio, finite = reach(trace), trace.judged["ratio"], np.isfinite(price)
    # (what, prompts, position): seconds and drift yet to come; behind the end nothing is.
    ahead = np.zeros((2, prompts, size + depth + 2))
    weight = np.array([1.0, price if finite else 0.0])
    for at in reversed(range(size)):
        value = ahead[:, :, at + 1 : at + depth + 2].copy()  # by length, all kept
        for j in reversed(range(depth)):
            chance, kept = ratio[:, at, j, None], value[:, :, j + 1 :]
            tossed = chance * kept + (1 - chance) * ahead[:, :, at + j + 1, None]
            if finite:
                sure = kept.copy()
                sure[1] += 1 - chance
                better = np.tensordot(weight, sure - tossed, 1) < 0
                tossed = np.where(better, sure, tossed)
            value[:, :, j + 1 :] = tossed
        value[0] += taken
        total = np.tensordot(weight, value, 1)
        total[count > most[:, at, None]] = np.inf
        best = total.argmin(1)[None, :, None]
        chosen = np.take_along_axis(value, np.broadcast_to(best, (2, prompts, 1)), 2)[..., 0]
        ahead[:, :, at] = np.where(at < trace.sizes, chosen, 0.0)
    return ahead[0, :, 0], ahead[1, :, 0]
