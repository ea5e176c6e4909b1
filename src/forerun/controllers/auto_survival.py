"""How likely `auto` takes drafted tokens, and the next one, to be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.controllers.base import State
from forerun.types import BoolArray, FloatArray, IntArray, RoundOutcome, Signals

GREEDY = (-0.44, 1.37, 0.0, 1.23, 0.70, 0.14, 0.21)
SAMPLED = (0.52, 0.0, 3.34, 0.97, 0.83, 0.17, 0.12)
"""Log-odds before the row has said anything: constant, margin and chosen probability of a token
that was drafted; the first token of a round, before it is; constant, newest margin and mean margin
of the next one. `python -m benchmarks.auto_prior` made them."""
PRIOR = np.array([GREEDY, SAMPLED])
CAP = 8.0
"""Margins beyond this say nothing more."""
TYPICAL = 4.0
"""A margin as drafts have it on average."""
NEUTRAL = np.array([0.0, 1.0])
"""Constant and slope of a row that is as expected."""
SOFT = -2.0
"""Log-odds, before anything was judged, that coins decide what is kept."""
ONE, FRACTION, NEVER = -0.7, 20.0, -5.0
"""What a probability of 1, between 0 and 1, or of 0 adds to them."""
SCALE_INFO = (4.0, 10.0)
"""Weight of the prior against the row's own constant and slope, in `Σ w`, `Σ w·z²`."""
AHEAD_INFO = 4.0
"""Likewise against the row's own constant for the next token."""
FADE = 0.98
"""Of what a row has seen, what still counts a round later."""
USELESS = -6.0
"""Log-odds, at first and at least, that a draft is of no use."""
USELESS_STEP, MOST_USELESS = 2.0, 2.0
"""How much a request that found it of no use moves the next one's start, and its upper end: one
hard text says little about the next, several say it is the draft."""
LEFT = 0.05
"""What is kept of such a draft."""
BLIND = np.array([[0.8, 2.0], [3.4, 4.0]])
"""Of a drafter that says nothing about its tokens: kept and judged first tokens of a round, and
further ones, before any was seen."""
MOST, MOST_SOFT = 4.0, 10.0
"""Largest corrections of log-odds."""
LEAST_SCALE = np.array([-MOST, 0.25])
"""Least constant and slope of a row: confidence never counts against itself."""


@dataclass(frozen=True)
class SurvivalState(State):
    """What a row has taught, and the log-odds that follow from it."""

    soft: FloatArray
    """`(rows,)` log-odds that coins decide what is kept (the request samples)."""
    scale: FloatArray
    """`(rows, 2)` the row's constant and slope, `(0, 1)` at first."""
    scale_info: FloatArray
    """`(rows, 3)` what is known of them: `Σ w`, `Σ w·z`, `Σ w·z²`."""
    ahead: FloatArray
    """`(rows,)` the row's constant for tokens not yet drafted."""
    ahead_info: FloatArray
    """`(rows,)` what is known of it: `Σ w`."""
    useless: FloatArray
    """`(rows,)` log-odds that the draft is no use here."""
    useless_start: FloatArray
    """`(rows,)` what they were when the request began."""
    useful: FloatArray
    """`(rows,)` probability that it is of use."""
    counts: FloatArray
    """`(rows, 2, 2)` tokens of drafts without signals: first ones of a round and further ones, kept
    and judged (fading)."""
    kept: FloatArray
    """`(rows, 3)` log-odds in force of a drafted token: constant, per margin, per chosen."""
    next: FloatArray
    """`(rows, 4)` of the next token: of a first one; else constant, per newest, per mean margin."""


def unseen(rows: int) -> dict[str, Any]:
    """The fields of `SurvivalState` of new rows."""
    soft, scale, ahead = np.full(rows, SOFT), np.tile(NEUTRAL, (rows, 1)), np.zeros(rows)
    return {
        "soft": soft,
        "scale": scale,
        "scale_info": np.zeros((rows, 3)),
        "ahead": ahead,
        "ahead_info": np.zeros(rows),
        "useless": np.full(rows, USELESS),
        "useless_start": np.full(rows, USELESS),
        "useful": odds(np.full(rows, -USELESS)),
        "counts": np.zeros((rows, 2, 2)),
        **in_force(soft, scale, ahead)[1],
    }


def in_force(
    soft: FloatArray, scale: FloatArray, ahead: FloatArray
) -> tuple[FloatArray, dict[str, Any]]:
    """The prior `(rows, 7)` between greedy and sampled, and the fields that follow from it."""
    prior = PRIOR[0] + odds(soft)[:, None] * (PRIOR[1] - PRIOR[0])
    kept = scale[:, 1:] * prior[:, :3]
    kept[:, 0] += scale[:, 0]
    coming = prior[:, 3:].copy()
    coming[:, :2] += ahead[:, None]
    return prior, {"kept": kept, "next": coming}


def odds(x: FloatArray) -> FloatArray:
    """Probability of log-odds."""
    chance: FloatArray = 1 / (1 + np.exp(-x))
    return chance


def faded(state: SurvivalState, share: float) -> dict[str, Any]:
    """What changes for the rows' next requests: they start from a share of the corrections."""
    scale, ahead = NEUTRAL + share * (state.scale - NEUTRAL), share * state.ahead
    start, end = state.useless_start, state.useless
    worse = np.minimum(start + USELESS_STEP, MOST_USELESS)
    useless = np.where(end > start, worse, np.where(end < start, USELESS, start))
    return {
        "useless": useless,
        "useless_start": useless,
        "useful": odds(-useless),
        "counts": share * state.counts,
        "scale": scale,
        "scale_info": np.zeros_like(state.scale_info),
        "ahead": ahead,
        "ahead_info": np.zeros_like(state.ahead_info),
        **in_force(state.soft, scale, ahead)[1],
    }


def typical(state: SurvivalState, unsaid: BoolArray) -> tuple[FloatArray, FloatArray]:
    """`(rows,)` probability of keeping the first token of a round, and any further one.

    `unsaid` `(rows,)` is whether the draft says nothing about its tokens.
    """
    ahead, useful = state.next, state.useful
    later = odds(ahead[:, 1] + TYPICAL * (ahead[:, 2] + ahead[:, 3]))
    first, later = useful * odds(ahead[:, 0]), useful * later
    if unsaid.any():
        known = state.counts + BLIND
        share = known[:, :, 0] / known[:, :, 1]
        first, later = np.where(unsaid, share[:, 0], first), np.where(unsaid, share[:, 1], later)
    return first, later


def blind(state: SurvivalState) -> BoolArray:
    """`(rows,)` whether a draft has said nothing about its tokens."""
    unsaid: BoolArray = state.counts[:, 0, 1] > 0
    return unsaid


def next_kept(state: SurvivalState, drafted: IntArray, signals: Signals) -> FloatArray:
    """`(rows,)` probability that the drafted tokens are all kept, and the next one, too."""
    assert signals.logit_margin is not None
    assert signals.chosen is not None
    # 1/σ(x) = 1 + exp(−x): asked after every drafted token, so with as few steps as can be.
    inside = np.arange(signals.chosen.shape[1]) < drafted[:, None]
    margin = np.minimum(signals.logit_margin, CAP)
    kept, ahead = state.kept, state.next
    against = np.exp(-(kept[:, :1] + kept[:, 1:2] * margin + kept[:, 2:] * signals.chosen))
    mean = np.add.reduce(margin, axis=1) / np.maximum(drafted, 1)
    lost = np.exp(-(ahead[:, 1] + ahead[:, 2] * margin[:, -1] + ahead[:, 3] * mean))
    chance: FloatArray = state.useful / (
        np.multiply.reduce(1 + inside * against, axis=1) * (1 + lost)
    )
    return chance


def judged(state: SurvivalState, outcome: RoundOutcome, learn: BoolArray) -> dict[str, Any]:
    """What the judged tokens of a round change: the accepted ones and the first rejected one."""
    count = np.where(learn, np.minimum(outcome.accepted + 1, outcome.drafted), 0)
    hit = outcome.accept_prob
    place = np.arange(hit.shape[1])
    seen = place < count[:, None]
    if outcome.signals.logit_margin is None or outcome.signals.chosen is None:
        new = np.array([seen * hit, seen]).T  # (K, rows, 2)
        new = np.array([new[:1].sum(axis=0), new[1:].sum(axis=0)]).transpose(1, 0, 2)
        return {"counts": np.where(learn[:, None, None], FADE * state.counts + new, state.counts)}
    told = np.where(hit >= 1, ONE, np.where(hit > 0, FRACTION, NEVER))
    soft = within(state.soft + (told * seen).sum(axis=1), -MOST_SOFT, MOST_SOFT)
    prior, now = in_force(soft, state.scale, state.ahead)
    fade = np.where(learn, FADE, 1)
    coming, guess = now["next"], np.empty(hit.shape)
    margin = np.minimum(outcome.signals.logit_margin[:, : len(place)], CAP)
    chosen = outcome.signals.chosen[:, : len(place)]
    z = prior[:, :1] + prior[:, 1:2] * margin + prior[:, 2:3] * chosen
    scale, scale_info = _scaled(state, z, hit, seen, fade)
    mean = margin.cumsum(axis=1)[:, :-1] / place[1:]
    guess[:, :1] = coming[:, :1]
    guess[:, 1:] = coming[:, 1:2] + coming[:, 2:3] * margin[:, :-1] + coming[:, 3:] * mean
    chance = odds(guess)
    info = fade * state.ahead_info + (seen * chance * (1 - chance)).sum(axis=1)
    turn = (seen * (hit - chance)).sum(axis=1) / (info + AHEAD_INFO)
    ahead = within(state.ahead + turn, -MOST, MOST)
    told = hit * np.log(LEFT / chance) + (1 - hit) * np.log((1 - LEFT) / (1 - chance))
    useless = within(state.useless + (seen * told).sum(axis=1), USELESS, -USELESS)
    return {
        "soft": soft,
        "scale": scale,
        "scale_info": scale_info,
        "ahead": ahead,
        "ahead_info": info,
        "useless": useless,
        "useful": odds(-useless),
        **in_force(soft, scale, ahead)[1],
    }


def _scaled(
    state: SurvivalState, z: FloatArray, hit: FloatArray, seen: BoolArray, fade: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """`scale` and `scale_info` after one Newton step of ridge logistic regression on z."""
    chance = odds(state.scale[:, :1] + state.scale[:, 1:] * z)
    weight, miss = seen * chance * (1 - chance), seen * (hit - chance)
    slanted = weight * z
    sums = np.array([weight.sum(axis=1), slanted.sum(axis=1), (slanted * z).sum(axis=1)]).T
    info = fade[:, None] * state.scale_info + sums
    a, b, c = info[:, 0] + SCALE_INFO[0], info[:, 1], info[:, 2] + SCALE_INFO[1]
    first, second = miss.sum(axis=1), (miss * z).sum(axis=1)
    turn = np.array([c * first - b * second, a * second - b * first]) / (a * c - b * b)
    return np.minimum(np.maximum(state.scale + turn.T, LEAST_SCALE), MOST), info


def within(x: FloatArray, low: float, high: float) -> FloatArray:
    """Clipped; much faster than `np.clip` for a few rows."""
    clipped: FloatArray = np.minimum(np.maximum(x, low), high)
    return clipped
