"""How likely drafted tokens are kept, given the draft's signals and a request's past rounds.

Fitted to a trace in hindsight, for the informed bound (docs/bounds.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.lab.bounds.bounds import Path, reach
from forerun.lab.traces.trace import Trace
from forerun.types import BoolArray, FloatArray, IntArray

FADES = np.array([0.6, 0.85, 0.95])
"""How much of the past stays after each judged token, for three memories."""
USUAL = 0.85  # acceptance from which hits are counted, so that no past at all reads 0
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of each signal, where its effect may bend."""
MOST_SAMPLES = 150_000  # of a regression
SEEN = 2 * len(FADES) + 7
"""Features of the past."""

Decide = Callable[[IntArray, FloatArray], IntArray]
"""Of positions `(n,)` and the past seen there `(n, SEEN)`, how many tokens to draft `(n,)`."""


class Texts:
    """A trace with its positions in one row: `first[prompt] + place`."""

    def __init__(self, trace: Trace) -> None:
        self.trace, inside = trace, trace.valid
        self.row, self.place = np.nonzero(inside)
        self.first = np.cumsum(trace.sizes) - trace.sizes
        self.matches, self.reach = trace.matches[inside], reach(trace)[inside]
        said = {name: values[inside] for name, values in trace.signals.items()}
        self.raw: FloatArray = np.stack(
            [
                _log_odds(said["top1"]),
                _log_odds(said["chosen"]),
                np.log(np.maximum(said["entropy"], 0) + 1e-4),
                np.log(np.minimum(said["logit_margin"], 1e3) + 1e-2),
                said["softmax_margin"],
            ],
            -1,
        )
        """`(positions, K, 5)` signals, where a line is a fair guess of the log-odds."""

    @property
    def depth(self) -> int:
        """K of the trace."""
        return self.raw.shape[1]


class Past:
    """What every request has seen of its own rounds, as a controller would note it."""

    def __init__(self, rows: int) -> None:
        self.surprise, self.hits, self.weight = np.zeros((3, rows, len(FADES)))
        self.judged, self.cut, self.newest, self.rounds, self.kept = np.zeros((5, rows))

    def seen(self, rows: IntArray, place: IntArray) -> FloatArray:
        """`(n, SEEN)` features of some requests that have committed `place` tokens."""
        weight = self.weight[rows] + 1  # one token's worth of "as usual"
        single = (
            np.log1p(self.judged[rows]),
            self.cut[rows],
            self.newest[rows],
            self.rounds[rows] == 0,
            np.log1p(self.rounds[rows]),
            np.log1p(self.kept[rows]),
            np.log1p(place),
        )
        memories = (self.surprise[rows] / weight, self.hits[rows] / weight)
        return np.concatenate([*memories, np.stack(single, 1)], 1)

    def note(
        self, rows: IntArray, chance: FloatArray, drafted: IntArray, matches: IntArray
    ) -> None:
        """One round: `chance` `(n, K)` is what the signals alone promised of each token."""
        kept = np.minimum(drafted, matches)
        judged = np.minimum(kept + 1, drafted)
        place = np.arange(chance.shape[1])
        inside = place < judged[:, None]
        age = np.where(inside, judged[:, None] - 1 - place, 0)
        weight = np.where(inside[..., None], FADES ** age[..., None], 0)
        hit = place < kept[:, None]
        fade = FADES ** judged[:, None]
        for memory, value in (
            (self.surprise, hit - chance),
            (self.hits, hit - USUAL),
            (self.weight, np.ones_like(chance)),
        ):
            memory[rows] = fade * memory[rows] + (weight * value[..., None]).sum(1)
        self.judged[rows] += judged
        self.rounds[rows] += 1
        some = drafted > 0
        on, last = rows[some], judged[some] - 1
        self.cut[on] = (kept < drafted)[some]
        self.kept[on] = kept[some]
        self.newest[on] = _log_odds(chance[some, last])


@dataclass(frozen=True)
class Linear:
    """`x·weights + bias`."""

    weights: FloatArray
    bias: float

    def __call__(self, x: FloatArray) -> FloatArray:
        """`(...)` of `(..., n)`."""
        out: FloatArray = x @ self.weights + self.bias
        return out


@dataclass(frozen=True)
class WithPast:
    """Log-odds linear in the signals, whose height and slope move with the past."""

    own: Linear
    height: FloatArray
    """`(SEEN,)`."""
    slope: FloatArray
    """`(SEEN,)`."""

    @classmethod
    def fit(cls, own: FloatArray, odds: FloatArray, seen: FloatArray, hit: BoolArray) -> WithPast:
        """Of the signals `(n, ...)`, the log-odds by the newest alone `(n,)`, and the past."""
        found = logistic(np.concatenate([own, seen, odds[:, None] * seen], 1), hit)
        parts = np.split(found.weights, [own.shape[1], own.shape[1] + SEEN])
        return cls(Linear(parts[0], found.bias), parts[1], parts[2])

    def chance(self, fixed: FloatArray, odds: FloatArray, seen: FloatArray) -> FloatArray:
        """`(n, K)`, where `fixed` `(n, K)` is what `own` makes of the signals."""
        return _chance(fixed + (seen @ self.height)[:, None] + odds * (seen @ self.slope)[:, None])


@dataclass(frozen=True)
class Alone:
    """What each token's own signals tell of it."""

    texts: Texts
    odds: FloatArray
    """`(positions, K)` log-odds that it is kept."""
    chance: FloatArray
    """The same as a probability."""


@dataclass(frozen=True)
class Known(Alone):
    """What all signals of a run tell, computed once; the past is still to be added."""

    kept: FloatArray
    """`(positions, K)` of `Acceptance.kept`."""
    following: FloatArray
    """`(positions, K)` of `Acceptance.following`."""


@dataclass(frozen=True)
class Acceptance:
    """How likely drafted tokens are kept, by logistic regression."""

    knots: FloatArray
    """`(5, n)` where the effect of each signal may bend."""
    alone: Linear
    """Log-odds of a token by its own signals."""
    kept: WithPast
    """Log-odds of a token, given all before it were kept."""
    following: WithPast
    """Log-odds of the token to be drafted next, given all so far are kept."""
    opening: Linear
    """Log-odds of a round's first token, before anything is drafted: the past only."""

    @classmethod
    def fit(cls, texts: Texts, seed: int = 0) -> Acceptance:
        """Fit to what became of all tokens that rounds could draft and see judged.

        The past that goes with a round is that of some various runs over the texts.
        """
        rng = np.random.default_rng(seed)
        depth = np.arange(texts.depth)
        judged = (depth <= texts.matches[:, None]) & (depth < texts.reach[:, None])
        hit = depth < texts.matches[:, None]
        place, token = _pairs(judged, rng)
        raw = texts.raw[place, token]
        knots = np.quantile(raw, QUANTILES, axis=0).T
        alone = logistic(_bends(raw, knots), hit[place, token])
        known = _alone(texts, alone, knots)
        index, seen = _wander(known, rng)
        turn, token = _pairs(judged[index], rng)
        at = index[turn]
        own, odds = _own(known.odds[at], token), known.odds[at, token]
        kept = WithPast.fit(own, odds, seen[turn], hit[at, token])
        turn, token = _pairs(judged[index, 1:], rng)  # the token after this one is judged
        at = index[turn]
        own, odds = _next(known.odds[at], texts.raw[at, token], token, knots), known.odds[at, token]
        following = WithPast.fit(own, odds, seen[turn], hit[at, token + 1])
        can = texts.reach[index] > 0
        opening = logistic(seen[can], hit[index[can], 0])
        return cls(knots, alone, kept, following, opening)

    def know(self, texts: Texts) -> Known:
        """What signals alone tell of some texts."""
        known = _alone(texts, self.alone, self.knots)
        kept, following = np.empty((2, *known.odds.shape))
        for depth in range(texts.depth):
            token = np.full(len(known.odds), depth)
            kept[:, depth] = self.kept.own(_own(known.odds, token))
            signals = _next(known.odds, texts.raw[:, depth], token, self.knots)
            following[:, depth] = self.following.own(signals)
        return Known(texts, known.odds, known.chance, kept, following)

    def beliefs(
        self, known: Known, index: IntArray, seen: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """After each number of drafted tokens, from the positions `index` `(n,)` on.

        Returns:
            `(n, K)` chance that all drafted so far are kept, and that the next is, too, if they
            are; entry i is after i tokens.
        """
        odds = known.odds[index]
        kept = self.kept.chance(known.kept[index], odds, seen).cumprod(1)
        following = self.following.chance(known.following[index], odds, seen)
        start, first = np.ones((len(index), 1)), _chance(self.opening(seen))[:, None]
        return (
            np.concatenate([start, kept[:, :-1]], 1),
            np.concatenate([first, following[:, :-1]], 1),
        )


def _alone(texts: Texts, alone: Linear, knots: FloatArray) -> Alone:
    odds = np.stack([alone(_bends(texts.raw[:, n], knots)) for n in range(texts.depth)], 1)
    return Alone(texts, odds, _chance(odds))


def run(known: Alone, decide: Decide) -> tuple[Path, IntArray, FloatArray]:
    """Serve all texts; `decide(positions, seen)` says how many tokens to draft, `(n,)`."""
    texts, sizes = known.texts, known.texts.trace.sizes
    past, at = Past(len(sizes)), np.zeros(len(sizes), np.int64)
    drafted, visited, saw = [], [], []
    while len(rows := np.flatnonzero(at < sizes)):
        index = texts.first[rows] + at[rows]
        seen = past.seen(rows, at[rows])
        length = np.minimum(decide(index, seen), texts.reach[index])
        matches = texts.matches[index]
        past.note(rows, known.chance[index], length, matches)
        at[rows] += np.minimum(length, matches) + 1
        drafted.append(np.full(len(sizes), -1))
        drafted[-1][rows] = length
        visited.append(index)
        saw.append(seen)
    path = np.stack(drafted, 1)
    return Path(path, np.maximum(path, 0)), np.concatenate(visited), np.concatenate(saw)


def logistic(x: FloatArray, hit: BoolArray, ridge: float = 3.0) -> Linear:
    """Ridge logistic regression by Newton's method, columns put on one scale first."""
    middle, scale = x.mean(0), x.std(0) + 1e-9
    z = np.concatenate([(x - middle) / scale, np.ones((len(x), 1))], 1)
    hold = np.append(np.full(x.shape[1], ridge), 1e-3)
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


def _wander(known: Alone, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """Positions and pasts of rounds whose lengths are roughly sensible, and various."""
    likely = known.chance.cumprod(1)
    visited, saw = [], []
    for _ in range(5):

        def decide(index: IntArray, seen: FloatArray) -> IntArray:
            wanted = (likely[index] > 0.3).sum(1) + rng.integers(-3, 4, len(index))
            return np.maximum(wanted, 0)

        _, index, seen = run(known, decide)
        visited.append(index)
        saw.append(seen)
    return np.concatenate(visited), np.concatenate(saw)


def _own(odds: FloatArray, token: IntArray) -> FloatArray:
    """`(n, 7)` of what the signals up to and with `token` `(n,)` say about it."""
    every, likely = np.arange(len(odds)), np.log(_chance(odds)).cumsum(1)
    before = np.maximum(token - 1, 0)
    first = (token == 0).astype(float)
    own, depth = odds[every, token], np.log1p(token)
    earlier = [np.where(token == 0, 0.0, values[every, before]) for values in (odds, likely)]
    return np.stack([own, np.abs(own), *earlier, depth, first, depth * own], 1)


def _next(odds: FloatArray, raw: FloatArray, token: IntArray, knots: FloatArray) -> FloatArray:
    """`(n, ...)` of what the signals up to and with `token` `(n,)` say about the one after it."""
    every, likely = np.arange(len(odds)), np.log(_chance(odds)).cumsum(1)
    own, depth = odds[every, token], np.log1p(token)
    least = np.minimum.accumulate(odds, 1)[every, token]
    before, earlier = (
        np.where(token < back, 0.0, odds[every, np.maximum(token - back, 0)]) for back in (1, 2)
    )
    single = (
        own, np.abs(own), likely[every, token], depth, depth * own, token == 0, least,
        before, np.abs(before), before * own, earlier, earlier * own,
    )  # fmt: skip
    return np.concatenate([np.stack(single, 1), _bends(raw, knots)], 1)


def _pairs(ok: BoolArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Rounds and tokens in them, at most `MOST_SAMPLES`."""
    turn, token = np.divmod(_some(np.flatnonzero(ok), rng), ok.shape[1])
    return turn, token


def _some(index: IntArray, rng: np.random.Generator) -> IntArray:
    if len(index) <= MOST_SAMPLES:
        return index
    chosen: IntArray = rng.choice(index, MOST_SAMPLES, replace=False)
    return chosen


def _bends(raw: FloatArray, knots: FloatArray) -> FloatArray:
    """`(..., 5·(1 + n))` each signal, and how far it is beyond each knot."""
    over = np.maximum(raw[..., None] - knots, 0)
    parts = np.concatenate([raw[..., None], over], -1)
    return parts.reshape(*raw.shape[:-1], -1)


def _log_odds(chance: FloatArray) -> FloatArray:
    inside = np.clip(chance, 1e-4, 1 - 1e-4)
    out: FloatArray = np.log(inside / (1 - inside))
    return out


def _chance(odds: FloatArray) -> FloatArray:
    out: FloatArray = 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
    return out
