"""The informed bound: the best policy in hindsight on the inputs of a real controller.

One kind of policies drafts on while a linear form is above 0. Its columns are derived from
`Acceptance`; how it is fitted is in docs/bounds.md.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from forerun.lab.bounds.acceptance import PAST, Acceptance, RunOdds, TracePositions, run
from forerun.lab.bounds.bounds import Bound, Path, paths, tuned
from forerun.lab.traces.costs import Cell, passes
from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray, IntArray

GRID = (
    *(f"fixed({n})" for n in range(25)),
    *(
        f"hf-threshold(threshold={t},length={n})"
        for t, n in product((0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (4, 8, 24))
    ),
    *(
        f"svip(threshold={h},length=24,keep={keep})"
        for h, keep in product(
            (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0), ("true", "false")
        )
    ),
    *(
        f"adaedl(threshold={t},length=24,keep={keep})"
        for t, keep in product((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), ("true", "false"))
    ),
    *(
        f"cm-asd(alpha={alpha},high={high},{weights})"
        for alpha, high, weights in product(
            (0.4, 0.55, 0.7, 0.85, 1.0), (4, 8, 12, 16, 24),
            ("sharpness=1", "entropy=0,margin=0,softmax=1"),
        )
    ),
    *(
        f"gammatune+(length={length},eta={eta},threshold={tau},keep={keep})"
        for length, eta, tau, keep in product(
            (4, 7, 12, 20), (0.1, 0.3), (0.1, 0.2, 0.3, 0.4, 0.6), ("true", "false")
        )
    ),
    *(f"goodput(cost={cost},slope=0)" for cost in (2, 4, 8, 16, 32, 64)),
)  # fmt: skip
"""Specs that are tuned over: settings of stopping rules that may win in some cell."""

COLUMNS = 12 + 2 * PAST  # of the linear form, see `columns`
HOPELESS = 0.01  # no policy goes on below this chance that all drafted so far is kept
ELSEWHERE = 0.1  # weight of a position where the policy begins no round
NEAR = 0.1  # choices whose gain is beyond this, in plain tokens' time, count little
RIDGE = 300.0  # ridge penalty of the regression
MOST_POSITIONS = 25_000  # of the regression; a trace's depth times as many choices

PRICES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.1)
"""Prices of a token in plain tokens' time, for the one-step look-ahead."""
ROUNDS = 5  # of policy improvement
ADJUSTED = ((2, 1.0), (1, 1.0), (3, 2.0), (5, 1.0), (11, 0.5), (13, 2.0), (24, 0.5))
"""Columns of the form that are then moved one by one, and how far in the mean cost of a token."""


@dataclass(frozen=True)
class Stopper:
    """Draft on while a linear form is above 0."""

    acceptance: Acceptance
    weights: FloatArray  # weights of the columns (`columns`), in plain tokens' time
    step: FloatArray  # `(K,)` cost of a token after each number of them, in plain tokens' time

    def gain(self, prepared: RunOdds, index: IntArray, past: FloatArray) -> FloatArray:
        """`(n, K)` expected gain of one more token after each number of them."""
        parts = []
        for begin in range(0, len(index), 2048):
            part = slice(begin, begin + 2048)
            kept, following = self.acceptance.beliefs(prepared, index[part], past[part])
            form = columns(kept, following, past[part], self.step) @ self.weights
            parts.append(np.where(kept < HOPELESS, -1.0, form))
        return np.concatenate(parts)

    def run(self, prepared: RunOdds) -> tuple[Path, IntArray, FloatArray]:
        """Its path; also the positions `(n,)` of all rounds, and their past."""

        def decide(index: IntArray, past: FloatArray) -> IntArray:
            return (self.gain(prepared, index, past) > 0).cumprod(1).sum(1)

        return run(prepared.texts, prepared.chance, decide)


def improved(stopper: Stopper, prepared: RunOdds, cell: Cell) -> FloatArray:
    """Weights that predict the gain of one more token under a policy, in hindsight."""
    texts = prepared.texts
    path, visited, histories = stopper.run(prepared)
    spent = path.seconds(cell) / cell.plain
    every = np.arange(len(texts.row))
    past = _carried(texts, visited, histories)
    go = stopper.gain(prepared, every, past) > 0
    lengths = np.minimum(go.cumprod(1).sum(1), texts.reach)
    count = np.arange(texts.depth + 1)
    price = (cell.draft_seconds(count) + passes(cell, texts.depth)) / cell.plain
    remaining = _remaining(texts, lengths, price)
    sample = np.flatnonzero(texts.reach > 0)
    if len(sample) > MOST_POSITIONS:
        sample = np.random.default_rng(0).choice(sample, MOST_POSITIONS, replace=False)
    row, position, most = texts.row[sample], texts.position[sample], texts.reach[sample]
    following = position[:, None] + 1 + np.minimum(count, texts.matches[sample][:, None])
    stop = price + remaining[row[:, None], np.minimum(following, remaining.shape[1] - 1)]
    goes = go[sample] & (count[:-1] < most[:, None])
    onward = stop.copy()
    for n in reversed(range(texts.depth)):
        onward[:, n] = np.where(goes[:, n], onward[:, n + 1], stop[:, n])
    gain = stop[:, :-1] - onward[:, 1:]
    kept, after = stopper.acceptance.beliefs(prepared, sample, past[sample])
    ok = (count[:-1] < most[:, None]) & (kept > HOPELESS)
    begun = np.full(len(texts.row), ELSEWHERE)
    begun[visited] = 1.0
    weight = begun[sample] / spent[row]
    weight = np.broadcast_to((weight / weight.mean())[:, None], ok.shape)
    x, weight = columns(kept, after, past[sample], stopper.step)[ok], weight[ok]
    form = x @ stopper.weights
    # Only the sign of the form decides, so choices near 0 weigh most.
    weight = weight * np.exp(-np.abs(form) / NEAR)
    return stopper.weights + least_squares(x, gain[ok] - form, weight, RIDGE)


def columns(
    kept: FloatArray, following: FloatArray, past: FloatArray, step: FloatArray
) -> FloatArray:
    """`(n, K, COLUMNS)` inputs of a stopping decision.

    The first is the cost of one more token, the second the chance that it is committed: with
    weights of −1 and the price of a token, the form is a one-step look-ahead. The others let its
    price, and what further tokens may be worth, change with depth, doubt and the past.
    """
    committed, depth = kept * following, np.log1p(np.arange(kept.shape[1])) + 0 * kept
    first = np.zeros_like(kept)
    first[:, 0] = 1
    single = (
        step + 0 * kept, committed, np.ones_like(kept), first, first * committed, kept, kept * kept,
        committed * following, committed * committed, committed * depth, kept * depth, depth,
    )  # fmt: skip
    past = past[:, None, :]
    return np.concatenate(
        [np.stack(single, -1), committed[..., None] * past, (1 - kept)[..., None] * past], -1
    )


def steps(cell: Cell, depth: int) -> FloatArray:
    """`(K,)` cost of one more token after each number of them, in plain tokens' time."""
    count = np.arange(depth + 1)
    return np.diff(cell.draft_seconds(count) + passes(cell, depth)) / cell.plain


def least_squares(x: FloatArray, y: FloatArray, weight: FloatArray, ridge: float) -> FloatArray:
    """Weighted ridge regression without a bias, columns put on one scale first; the weights."""
    scale = np.sqrt((x * x).mean(0)) + 1e-9
    z = x / scale
    heavy = z * weight[:, None]
    scaled = np.linalg.solve(heavy.T @ z + ridge * np.eye(x.shape[1]), heavy.T @ y)
    return scaled / scale


def _carried(texts: TracePositions, visited: IntArray, histories: FloatArray) -> FloatArray:
    """`(positions, PAST)` the past of the last round that began at or before each position."""
    order = np.zeros(len(texts.row), np.int64)
    order[visited] = np.arange(len(visited)) + 1
    # Every text starts with a round, so nothing is carried from one to the next.
    last = np.maximum.accumulate(np.where(order > 0, np.arange(len(order)), 0))
    past = histories[order[last] - 1]
    past[:, -1] = np.log1p(texts.position)
    return past


def _remaining(texts: TracePositions, lengths: IntArray, price: FloatArray) -> FloatArray:
    """`(prompts, T + 1)` time a policy takes from each position to the end of the text."""
    trace = texts.trace
    T = trace.tokens.shape[1]
    drafted, cost = np.zeros((trace.prompts, T), np.int64), np.zeros((trace.prompts, T))
    drafted[texts.row, texts.position], cost[texts.row, texts.position] = lengths, price[lengths]
    time, rows = np.zeros((trace.prompts, T + 1)), np.arange(trace.prompts)
    following = np.minimum(np.arange(T) + 1 + np.minimum(drafted, trace.matches), T)
    for at in reversed(range(T)):
        time[:, at] = np.where(trace.valid[:, at], cost[:, at] + time[rows, following[:, at]], 0)
    return time


class Study:
    """A trace with the fits that all cells share: paths of controllers on it, by default of all of
    `GRID`, and acceptance, fitted in hindsight, where anything is kept."""

    def __init__(self, trace: Trace, drafted: dict[str, Path] | None = None) -> None:
        self.trace, texts = trace, TracePositions(trace)
        self.paths = paths(trace, GRID) if drafted is None else drafted
        self.acceptance = Acceptance.fit(texts) if trace.matches.any() else None
        self.prepared = None if self.acceptance is None else self.acceptance.prepare(texts)

    def tried(self, cell: Cell) -> list[Bound]:
        """What each policy reaches, the fastest for all prompts first, by geometric mean of the
        speed-up. `look-ahead`, `improved` and `adjusted` are fitted; the others are specs."""
        cell = cell.asked
        bounds = [bound for bound, _ in self._fitted(cell)] + tuned(self.trace, cell, self.paths)
        return sorted(bounds, key=lambda bound: -bound.mean)

    def _fitted(self, cell: Cell) -> list[tuple[Bound, Stopper]]:
        """Look-ahead at its best price, improved policies, and the best of these adjusted."""
        acceptance, prepared = self.acceptance, self.prepared
        if acceptance is None or prepared is None:
            return []
        step = steps(cell, self.trace.depth)

        def scored(name: str, weights: FloatArray) -> tuple[Bound, Stopper]:
            stopper = Stopper(acceptance, weights, step)
            return Bound.of(name, stopper.run(prepared)[0], self.trace, cell), stopper

        ahead = [scored("look-ahead", _look_ahead(price)) for price in PRICES]
        out = [max(ahead, key=lambda pair: pair[0].mean)]
        weights = out[0][1].weights
        for _ in range(ROUNDS):
            stopper = Stopper(acceptance, weights, step)
            # Half the way: gains hold only near the policy under which they were computed.
            weights = (weights + improved(stopper, prepared, cell)) / 2
            out.append(scored("improved", weights))
        best = max(out, key=lambda pair: pair[0].mean)
        size = 0.15 * float(step.mean())
        while size > 0.02 * step.mean():
            before = best[0].mean
            for column, scale in ADJUSTED:
                for sign in (1, -1):
                    weights = best[1].weights.copy()
                    weights[column] += sign * scale * size
                    trial = scored("adjusted", weights)
                    if trial[0].mean > best[0].mean:
                        best = trial
                        break
            size /= 1 if best[0].mean > before * 1.0005 else 2.5
        return [*out, best]


def informed(trace: Trace, cell: Cell) -> Bound:
    """The fastest policy in hindsight with the inputs of a real controller.

    It knows the draft's signals and the request's own past rounds, neither the family nor later
    tokens; but its settings are fitted to the very trace it is scored on.

    For several cells make one `Study`, which fits once.
    """
    return Study(trace).tried(cell)[0]


def _look_ahead(price: float) -> FloatArray:
    """Draft on while the next token's chance is worth its cost."""
    weights = np.zeros(COLUMNS)
    weights[:2] = -1, price
    return weights
