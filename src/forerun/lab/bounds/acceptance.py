"""Acceptance probabilities of drafted tokens, by the draft's signals and a request's past rounds.

Fitted to a trace in hindsight, for the informed bound (docs/bounds.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.lab.bounds.bounds import Path, reach, walk
from forerun.lab.traces.trace import Trace
from forerun.types import BoolArray, FloatArray, IntArray

FADES = np.array([0.6, 0.85, 0.95])  # decay per judged token of three moving averages of the past
USUAL = 0.85  # acceptance that hits are measured against, so that features without a past are 0
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of each signal at which its effect may bend
MOST_SAMPLES = 150_000  # of a regression
RIDGE = 3.0  # its penalty
PAST = 2 * len(FADES) + 7  # number of features of a request's past

Decide = Callable[[IntArray, FloatArray], IntArray]  # of positions `(n,)` and `(n, PAST)`


class TracePositions:
    """A trace with its positions in one row: `first[prompt] + position`."""

    def __init__(self, trace: Trace) -> None:
        self.trace, inside = trace, trace.valid
        self.row, self.position = np.nonzero(inside)
        self.first = np.cumsum(trace.sizes) - trace.sizes
        self.matches, self.reach = trace.matches[inside], reach(trace)[inside]
        signals = {name: values[inside] for name, values in trace.signals.items()}
        parts = [
            _log_odds(signals["top1"]),
            _log_odds(signals["chosen"]),
            np.log(np.maximum(signals["entropy"], 0) + 1e-4),
            np.log(np.minimum(signals["logit_margin"], 1e3) + 1e-2),
            signals["softmax_margin"],
        ]
        self.raw: FloatArray = np.nan_to_num(np.stack(parts, -1))
        """`(positions, K, 5)` signals whose log-odds are nearly linear; 0 where there are none."""

    @property
    def depth(self) -> int:
        return self.raw.shape[1]


class Past:
    """Past rounds of every request, as a controller could record them."""

    def __init__(self, rows: int) -> None:
        self.surprise, self.hits, self.weight = np.zeros((3, rows, len(FADES)))
        self.judged, self.cut, self.newest, self.rounds, self.accepted = np.zeros((5, rows))

    def features(self, rows: IntArray, position: IntArray) -> FloatArray:
        """`(n, PAST)` features of requests that have committed `position` tokens."""
        weight = self.weight[rows] + 1  # one token's worth of "as usual"
        single = (
            np.log1p(self.judged[rows]),
            self.cut[rows],
            self.newest[rows],
            self.rounds[rows] == 0,
            np.log1p(self.rounds[rows]),
            np.log1p(self.accepted[rows]),
            np.log1p(position),
        )
        memories = (self.surprise[rows] / weight, self.hits[rows] / weight)
        return np.concatenate([*memories, np.stack(single, 1)], 1)

    def note(
        self, rows: IntArray, chance: FloatArray, drafted: IntArray, matches: IntArray
    ) -> None:
        """Record a round; `chance` `(n, K)` is each token's acceptance by the signals alone."""
        accepted = np.minimum(drafted, matches)
        judged = np.minimum(accepted + 1, drafted)
        depth = np.arange(chance.shape[1])
        inside = depth < judged[:, None]
        age = np.where(inside, judged[:, None] - 1 - depth, 0)
        weight = np.where(inside[..., None], FADES ** age[..., None], 0)
        hit = depth < accepted[:, None]
        fade = FADES ** judged[:, None]
        for memory, value in (
            (self.surprise, hit - chance),
            (self.hits, hit - USUAL),
            (self.weight, np.ones_like(chance)),
        ):
            memory[rows] = fade * memory[rows] + (weight * value[..., None]).sum(1)
        self.judged[rows] += judged
        self.rounds[rows] += 1
        drafts = drafted > 0
        on, last = rows[drafts], judged[drafts] - 1
        self.cut[on] = (accepted < drafted)[drafts]
        self.accepted[on] = accepted[drafts]
        self.newest[on] = _log_odds(chance[drafts, last])


@dataclass(frozen=True)
class Linear:
    """`x·weights + bias`."""

    weights: FloatArray
    bias: float

    def __call__(self, x: FloatArray) -> FloatArray:
        return x @ self.weights + self.bias


@dataclass(frozen=True)
class WithPast:
    """Log-odds linear in the signals, whose height and slope move with the past."""

    own: Linear
    height: FloatArray  # `(PAST,)`
    slope: FloatArray  # `(PAST,)`

    @classmethod
    def fit(cls, own: FloatArray, odds: FloatArray, past: FloatArray, hit: BoolArray) -> WithPast:
        """Fit to signals `(n, ...)`, log-odds by the newest alone `(n,)`, past and hits."""
        fit = logistic(np.concatenate([own, past, odds[:, None] * past], 1), hit)
        parts = np.split(fit.weights, [own.shape[1], own.shape[1] + PAST])
        return cls(Linear(parts[0], fit.bias), parts[1], parts[2])

    def chance(self, fixed: FloatArray, odds: FloatArray, past: FloatArray) -> FloatArray:
        """`(n, K)`, where `fixed` `(n, K)` is `own` of the signals."""
        return _chance(fixed + (past @ self.height)[:, None] + odds * (past @ self.slope)[:, None])


@dataclass(frozen=True)
class RunOdds:
    """Log-odds by all signals of a run, computed once; those of the past are added later."""

    texts: TracePositions
    odds: FloatArray  # `(positions, K)` log-odds that a token is kept, by its own signals
    chance: FloatArray  # the same as probabilities
    kept: FloatArray  # `(positions, K)` of `Acceptance.kept`
    following: FloatArray  # `(positions, K)` of `Acceptance.following`


@dataclass(frozen=True)
class Acceptance:
    """Acceptance probabilities of drafted tokens, by logistic regression."""

    knots: FloatArray  # `(5, n)` values at which the effect of each signal may bend
    alone: Linear  # log-odds of a token by its own signals
    kept: WithPast  # log-odds of a token, given all before it were kept
    following: WithPast  # log-odds of the token to be drafted next, given all so far are kept
    opening: Linear  # log-odds of a round's first token, before anything is drafted: the past only

    @classmethod
    def fit(cls, texts: TracePositions, seed: int = 0) -> Acceptance:
        """Fit to all tokens that a round could draft and have judged. The past of a round is taken
        from runs over the texts with varied lengths."""
        rng = np.random.default_rng(seed)
        depth = np.arange(texts.depth)
        judged = (depth <= texts.matches[:, None]) & (depth < texts.reach[:, None])
        hit = depth < texts.matches[:, None]
        position, token = _pairs(judged, rng)
        raw = texts.raw[position, token]
        knots = np.quantile(raw, QUANTILES, axis=0).T
        alone = logistic(_bends(raw, knots), hit[position, token])
        every = _alone(texts, alone, knots)
        index, past = _wander(texts, _chance(every), rng)
        turn, token = _pairs(judged[index], rng)
        at = index[turn]
        own, odds = _own(every[at], token), every[at, token]
        kept = WithPast.fit(own, odds, past[turn], hit[at, token])
        turn, token = _pairs(judged[index, 1:], rng)  # the token after this one is judged
        at = index[turn]
        own = _next(every[at], texts.raw[at, token], token, knots)
        following = WithPast.fit(own, every[at, token], past[turn], hit[at, token + 1])
        can = texts.reach[index] > 0
        opening = logistic(past[can], hit[index[can], 0])
        return cls(knots, alone, kept, following, opening)

    def prepare(self, texts: TracePositions) -> RunOdds:
        """Log-odds by the signals alone, for all positions of the texts."""
        odds = _alone(texts, self.alone, self.knots)
        kept, following = np.empty((2, *odds.shape))
        for depth in range(texts.depth):
            token = np.full(len(odds), depth)
            kept[:, depth] = self.kept.own(_own(odds, token))
            signals = _next(odds, texts.raw[:, depth], token, self.knots)
            following[:, depth] = self.following.own(signals)
        return RunOdds(texts, odds, _chance(odds), kept, following)

    def beliefs(
        self, prepared: RunOdds, index: IntArray, past: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """After each number of drafted tokens, from the positions `index` `(n,)` on.

        Returns:
            `(n, K)` chance that all drafted so far are kept, and that the next is, too, if they
            are; entry i is after i tokens.
        """
        odds = prepared.odds[index]
        kept = self.kept.chance(prepared.kept[index], odds, past).cumprod(1)
        following = self.following.chance(prepared.following[index], odds, past)
        start, first = np.ones((len(index), 1)), _chance(self.opening(past))[:, None]
        return (
            np.concatenate([start, kept[:, :-1]], 1),
            np.concatenate([first, following[:, :-1]], 1),
        )


def _alone(texts: TracePositions, alone: Linear, knots: FloatArray) -> FloatArray:
    return np.stack([alone(_bends(texts.raw[:, n], knots)) for n in range(texts.depth)], 1)


def run(
    texts: TracePositions, chance: FloatArray, decide: Decide
) -> tuple[Path, IntArray, FloatArray]:
    """Serve all texts; `decide(positions, past)` gives the tokens to draft, `(n,)`, and `chance`
    `(positions, K)` is each token's acceptance by the signals alone."""
    memory, visited, histories = Past(texts.trace.prompts), [], []

    def draft(rows: IntArray, at: IntArray) -> IntArray:
        index, past = texts.first[rows] + at, memory.features(rows, at)
        length = np.minimum(decide(index, past), texts.reach[index])
        memory.note(rows, chance[index], length, texts.matches[index])
        visited.append(index)
        histories.append(past)
        return length

    return walk(texts.trace, draft), np.concatenate(visited), np.concatenate(histories)


def logistic(x: FloatArray, hit: BoolArray) -> Linear:
    """Ridge logistic regression by Newton's method, columns put on one scale first."""
    middle, scale = x.mean(0), x.std(0) + 1e-9
    z = np.concatenate([(x - middle) / scale, np.ones((len(x), 1))], 1)
    hold = np.append(np.full(x.shape[1], RIDGE), 1e-3)
    weights = np.zeros(len(hold))
    for _ in range(15):
        chance = _chance(z @ weights)
        spread = chance * (1 - chance) + 1e-6
        curve = (z * spread[:, None]).T @ z + np.diag(hold)
        move = np.linalg.solve(curve, z.T @ (hit - chance) - hold * weights)
        weights = weights + move
        if np.abs(move).max() < 1e-4:
            break
    plain = weights[:-1] / scale
    return Linear(plain, float(weights[-1] - middle @ plain))


def _wander(
    texts: TracePositions, chance: FloatArray, rng: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """Positions and pasts of rounds with varied lengths near the likely runs."""
    likely = chance.cumprod(1)
    visited, histories = [], []
    for _ in range(5):

        def decide(index: IntArray, past: FloatArray) -> IntArray:
            length = (likely[index] > 0.3).sum(1) + rng.integers(-3, 4, len(index))
            return np.maximum(length, 0)

        _, index, past = run(texts, chance, decide)
        visited.append(index)
        histories.append(past)
    return np.concatenate(visited), np.concatenate(histories)


def _own(odds: FloatArray, token: IntArray) -> FloatArray:
    """`(n, 7)` features of `token` `(n,)` from the signals up to and with it."""
    rows, likely = np.arange(len(odds)), np.log(_chance(odds)).cumsum(1)
    before = np.maximum(token - 1, 0)
    first = (token == 0).astype(float)
    own, depth = odds[rows, token], np.log1p(token)
    earlier = [np.where(token == 0, 0.0, values[rows, before]) for values in (odds, likely)]
    return np.stack([own, np.abs(own), *earlier, depth, first, depth * own], 1)


def _next(odds: FloatArray, raw: FloatArray, token: IntArray, knots: FloatArray) -> FloatArray:
    """`(n, ...)` features of the token after `token` `(n,)`, likewise."""
    rows, likely = np.arange(len(odds)), np.log(_chance(odds)).cumsum(1)
    own, depth = odds[rows, token], np.log1p(token)
    least = np.minimum.accumulate(odds, 1)[rows, token]
    before, earlier = (
        np.where(token < back, 0.0, odds[rows, np.maximum(token - back, 0)]) for back in (1, 2)
    )
    single = (
        own, np.abs(own), likely[rows, token], depth, depth * own, token == 0, least,
        before, np.abs(before), before * own, earlier, earlier * own,
    )  # fmt: skip
    return np.concatenate([np.stack(single, 1), _bends(raw, knots)], 1)


def _pairs(ok: BoolArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Rounds and tokens in them, at most `MOST_SAMPLES`."""
    index = np.flatnonzero(ok)
    if len(index) > MOST_SAMPLES:
        index = rng.choice(index, MOST_SAMPLES, replace=False)
    turn, token = np.divmod(index, ok.shape[1])
    return turn, token


def _bends(raw: FloatArray, knots: FloatArray) -> FloatArray:
    """`(..., 5·(1 + n))` each signal, and how far it is beyond each knot."""
    over = np.maximum(raw[..., None] - knots, 0)
    parts = np.concatenate([raw[..., None], over], -1)
    return parts.reshape(*raw.shape[:-1], -1)


def _log_odds(chance: FloatArray) -> FloatArray:
    inside = np.clip(chance, 1e-4, 1 - 1e-4)
    return np.log(inside / (1 - inside))


def _chance(odds: FloatArray) -> FloatArray:
    return 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
