"""Stopping policies for the informed bound: draft on while a linear form is above 0.

The form is in what follows from `Acceptance`; how it is fitted is in docs/bounds.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.lab.bounds.acceptance import SEEN, Acceptance, Known, Texts, run
from forerun.lab.bounds.bounds import Path
from forerun.lab.traces.costs import Cell, passes
from forerun.types import FloatArray, IntArray

COLUMNS = 12 + 2 * SEEN
HOPELESS = 0.01  # no policy goes on below this chance that all drafted so far is kept
ELSEWHERE = 0.1  # weight of a position where the policy begins no round
NEAR = 0.1  # choices whose gain is beyond this, in plain tokens' time, count little
RIDGE = 300.0
MOST_POSITIONS = 25_000  # of the regression; a trace's depth times as many choices


@dataclass(frozen=True)
class Stopper:
    """Draft on while a linear form is above 0."""

    acceptance: Acceptance
    weights: FloatArray
    """Of the columns of `columns`, in plain tokens' time."""
    step: FloatArray
    """`(K,)` what one more token costs after each number of them, in plain tokens' time."""

    def gain(self, known: Known, index: IntArray, seen: FloatArray) -> FloatArray:
        """`(n, K)` expected gain of one more token after each number of them."""
        parts = []
        for begin in range(0, len(index), 2048):
            some = slice(begin, begin + 2048)
            kept, following = self.acceptance.beliefs(known, index[some], seen[some])
            form = columns(kept, following, seen[some], self.step) @ self.weights
            parts.append(np.where(kept < HOPELESS, -1.0, form))
        return np.concatenate(parts)

    def path(self, known: Known) -> Path:
        """What it drafts."""
        return self.run(known)[0]

    def run(self, known: Known) -> tuple[Path, IntArray, FloatArray]:
        """What it drafts; also the positions `(n,)` of all rounds, and the past seen there."""

        def decide(index: IntArray, seen: FloatArray) -> IntArray:
            lengths: IntArray = (self.gain(known, index, seen) > 0).cumprod(1).sum(1)
            return lengths

        return run(known, decide)


def improved(stopper: Stopper, known: Known, cell: Cell, seed: int = 0) -> FloatArray:
    """Weights that predict what one more token gained or lost under a policy, in hindsight.

    Args:
        stopper: the policy.
        known: the texts.
        cell: what a round costs.
        seed: of the choice of positions, where there are very many.
    """
    texts = known.texts
    path, visited, saw = stopper.run(known)
    spent = path.seconds(cell) / cell.plain
    every = np.arange(len(texts.row))
    seen = _carried(texts, visited, saw)
    go = stopper.gain(known, every, seen) > 0
    lengths = np.minimum(go.cumprod(1).sum(1), texts.reach)
    count = np.arange(texts.depth + 1)
    price = cell.draft_seconds(count) + passes(cell, texts.depth)
    price = price / cell.plain
    left = _left(texts, lengths, price)
    some = np.flatnonzero(texts.reach > 0)
    if len(some) > MOST_POSITIONS:
        some = np.random.default_rng(seed).choice(some, MOST_POSITIONS, replace=False)
    row, place, most = texts.row[some], texts.place[some], texts.reach[some]
    following = place[:, None] + 1 + np.minimum(count, texts.matches[some][:, None])
    stop = price + left[row[:, None], np.minimum(following, left.shape[1] - 1)]
    goes = go[some] & (count[:-1] < most[:, None])
    onward = stop.copy()
    for n in reversed(range(texts.depth)):
        onward[:, n] = np.where(goes[:, n], onward[:, n + 1], stop[:, n])
    gain = stop[:, :-1] - onward[:, 1:]
    kept, after = stopper.acceptance.beliefs(known, some, seen[some])
    ok = (count[:-1] < most[:, None]) & (kept > HOPELESS)
    begun = np.full(len(texts.row), ELSEWHERE)
    begun[visited] = 1.0
    weight = begun[some] / spent[row]
    weight = np.broadcast_to((weight / weight.mean())[:, None], ok.shape)
    x, weight = columns(kept, after, seen[some], stopper.step)[ok], weight[ok]
    said = x @ stopper.weights
    # What matters is on which side of 0 it is.
    weight = weight * np.exp(-np.abs(said) / NEAR)
    return stopper.weights + least_squares(x, gain[ok] - said, weight, RIDGE)


def columns(
    kept: FloatArray, following: FloatArray, seen: FloatArray, step: FloatArray
) -> FloatArray:
    """`(n, K, columns)` of what a stopping decision may depend on.

    The first is the cost of one more token, the second the chance that it is committed: with
    weights of −1 and the price of a token, the form is a one-step look-ahead. The others let its
    price, and what further tokens may be worth, change with depth, doubt and the past.
    """
    both, depth = kept * following, np.log1p(np.arange(kept.shape[1])) + 0 * kept
    first = np.zeros_like(kept)
    first[:, 0] = 1
    single = (
        step + 0 * kept, both, np.ones_like(kept), first, first * both, kept, kept * kept,
        both * following, both * both, both * depth, kept * depth, depth,
    )  # fmt: skip
    past = seen[:, None, :]
    return np.concatenate(
        [np.stack(single, -1), both[..., None] * past, (1 - kept)[..., None] * past], -1
    )


def steps(cell: Cell, depth: int) -> FloatArray:
    """`(K,)` what one more token costs after each number of them, in plain tokens' time."""
    count = np.arange(depth + 1)
    found: FloatArray = np.diff(cell.draft_seconds(count) + passes(cell, depth))
    found = found / cell.plain
    return found


def least_squares(x: FloatArray, y: FloatArray, weight: FloatArray, ridge: float) -> FloatArray:
    """Weighted ridge regression without a bias, columns put on one scale first; the weights."""
    scale = np.sqrt((x * x).mean(0)) + 1e-9
    z = x / scale
    heavy = z * weight[:, None]
    found = np.linalg.solve(heavy.T @ z + ridge * np.eye(x.shape[1]), heavy.T @ y)
    weights: FloatArray = found / scale
    return weights


def _carried(texts: Texts, visited: IntArray, saw: FloatArray) -> FloatArray:
    """`(positions, SEEN)` the past of the last round that began at or before each position."""
    order = np.zeros(len(texts.row), np.int64)
    order[visited] = np.arange(len(visited)) + 1
    # Every text starts with a round, so nothing is carried from one to the next.
    last = np.maximum.accumulate(np.where(order > 0, np.arange(len(order)), 0))
    seen = saw[order[last] - 1]
    seen[:, -1] = np.log1p(texts.place)
    return seen


def _left(texts: Texts, lengths: IntArray, price: FloatArray) -> FloatArray:
    """`(prompts, T + 1)` time a policy takes from each position to the end of the text."""
    trace = texts.trace
    T = trace.tokens.shape[1]
    wanted, cost = np.zeros((trace.prompts, T), np.int64), np.zeros((trace.prompts, T))
    wanted[texts.row, texts.place], cost[texts.row, texts.place] = lengths, price[lengths]
    left, rows = np.zeros((trace.prompts, T + 1)), np.arange(trace.prompts)
    following = np.minimum(np.arange(T) + 1 + np.minimum(wanted, trace.matches), T)
    for at in reversed(range(T)):
        left[:, at] = np.where(trace.valid[:, at], cost[:, at] + left[rows, following[:, at]], 0)
    return left
