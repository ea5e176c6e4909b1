"""Stopping policies for the informed bound: draft on while a linear form is above 0.

Its columns are derived from `Acceptance`; how it is fitted is in docs/bounds.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.lab.bounds.acceptance import PAST, Acceptance, RunOdds, TracePositions, run
from forerun.lab.bounds.bounds import Path
from forerun.lab.traces.costs import Cell, passes
from forerun.types import FloatArray, IntArray

COLUMNS = 12 + 2 * PAST  # of the linear form, see `columns`
HOPELESS = 0.01  # no policy goes on below this chance that all drafted so far is kept
ELSEWHERE = 0.1  # weight of a position where the policy begins no round
NEAR = 0.1  # choices whose gain is beyond this, in plain tokens' time, count little
RIDGE = 300.0  # ridge penalty of the regression
MOST_POSITIONS = 25_000  # of the regression; a trace's depth times as many choices


@dataclass(frozen=True)
class Stopper:
    """Draft on while a linear form is above 0."""

    acceptance: Acceptance
    weights: FloatArray
    """Weights of the columns (`columns`), in plain tokens' time."""
    step: FloatArray
    """`(K,)` cost of one more token after each number of them, in plain tokens' time."""

    def gain(self, prepared: RunOdds, index: IntArray, past: FloatArray) -> FloatArray:
        """`(n, K)` expected gain of one more token after each number of them."""
        parts = []
        for begin in range(0, len(index), 2048):
            part = slice(begin, begin + 2048)
            kept, following = self.acceptance.beliefs(prepared, index[part], past[part])
            form = columns(kept, following, past[part], self.step) @ self.weights
            parts.append(np.where(kept < HOPELESS, -1.0, form))
        return np.concatenate(parts)

    def path(self, prepared: RunOdds) -> Path:
        """The path of the policy."""
        return self.run(prepared)[0]

    def run(self, prepared: RunOdds) -> tuple[Path, IntArray, FloatArray]:
        """Its path; also the positions `(n,)` of all rounds, and their past."""

        def decide(index: IntArray, past: FloatArray) -> IntArray:
            lengths: IntArray = (self.gain(prepared, index, past) > 0).cumprod(1).sum(1)
            return lengths

        return run(prepared, decide)


def improved(stopper: Stopper, prepared: RunOdds, cell: Cell, seed: int = 0) -> FloatArray:
    """Weights that predict the gain of one more token under a policy, in hindsight.

    Args:
        stopper: the policy.
        prepared: the texts.
        cell: what a round costs.
        seed: of the choice of positions, where there are very many.
    """
    texts = prepared.texts
    path, visited, histories = stopper.run(prepared)
    spent = path.seconds(cell) / cell.plain
    every = np.arange(len(texts.row))
    past = _carried(texts, visited, histories)
    go = stopper.gain(prepared, every, past) > 0
    lengths = np.minimum(go.cumprod(1).sum(1), texts.reach)
    count = np.arange(texts.depth + 1)
    price = cell.draft_seconds(count) + passes(cell, texts.depth)
    price = price / cell.plain
    remaining = _remaining(texts, lengths, price)
    sample = np.flatnonzero(texts.reach > 0)
    if len(sample) > MOST_POSITIONS:
        sample = np.random.default_rng(seed).choice(sample, MOST_POSITIONS, replace=False)
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
    seconds: FloatArray = np.diff(cell.draft_seconds(count) + passes(cell, depth))
    seconds = seconds / cell.plain
    return seconds


def least_squares(x: FloatArray, y: FloatArray, weight: FloatArray, ridge: float) -> FloatArray:
    """Weighted ridge regression without a bias, columns put on one scale first; the weights."""
    scale = np.sqrt((x * x).mean(0)) + 1e-9
    z = x / scale
    heavy = z * weight[:, None]
    scaled = np.linalg.solve(heavy.T @ z + ridge * np.eye(x.shape[1]), heavy.T @ y)
    weights: FloatArray = scaled / scale
    return weights


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
