"""What `auto` knows of the clock: seconds of a draft step and of a target pass, by width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.controllers.base import State
from forerun.types import BoolArray, FloatArray, IntArray, RoundOutcome

RATIO = 5.0
"""c until a round was timed."""
WARM = 0.7
"""A later draft step over a round's first, until one was timed."""
SLOPE = 0.02
"""v until widths were compared."""
STEEPEST = 0.99
"""Largest slope: at 1, a pass of one token would cost nothing, and dividing by that fails."""
SLOPE_INFO = 20.0
"""Weight of that start, in squared tokens of difference in width."""
JUMP = 0.3
"""Most by which the difference of two target passes is taken to be off what their widths make
expected, as a share of the shorter: more is an outlier."""
RECENT = 7
"""Timings kept, whose median counts: outliers of a shared machine do not. Until there are so many,
all rounds with a draft are timed."""
PLAIN_KNOWN = 3
"""Until so many rounds without were, all of them are: one alone may be an outlier."""


@dataclass(frozen=True)
class CostState(State):
    """Timings, and the costs they amount to."""

    recent: FloatArray
    """`(rows, sizes, 5, RECENT)` the newest timings in batches of each size, newest first, NaN
    where there are none: seconds of a draft step, of a target pass with a draft, of one without,
    of a round's first draft step, and the drafted tokens of the passes."""
    newest: FloatArray
    """`(rows, sizes, 2)` drafted tokens and seconds of the newest pass that judged a draft;
    in a batch, also of one that did not, which differs by its width alone."""
    slopes: FloatArray
    """`(rows, sizes, 2)` sums `Σ Δw·Δv` and `Σ Δw²` over pairs of passes, for the slope."""
    step: FloatArray
    """`(rows,)` seconds of a draft step after a round's first."""
    lead: FloatArray
    """`(rows,)` what the first takes more."""
    base: FloatArray
    """`(rows,)` seconds of a target pass that judges one token."""
    slope: FloatArray
    """`(rows,)` what each further token adds, as a share of `base`."""
    plain: FloatArray
    """`(rows,)` seconds of a target pass without a draft; NaN: there was none."""
    known: BoolArray
    """`(rows, 2)` whether rounds with a draft, and those without, were timed often enough."""


def unknown(rows: int, cost: float | None, slope: float | None, sizes: int = 1) -> dict[str, Any]:
    """The fields of `CostState` before anything was timed, in plain target passes."""
    more = SLOPE if slope is None else slope
    return {
        "recent": np.full((rows, sizes, 5, RECENT), np.nan),
        "newest": np.zeros((rows, sizes, 2)),
        "slopes": np.tile([SLOPE_INFO * more, SLOPE_INFO], (rows, sizes, 1)),
        "step": np.full(rows, 1 / (RATIO if cost is None else cost)),
        "lead": np.zeros(rows),
        "base": np.full(rows, 1.0 if cost is None else 1 + more),
        "slope": np.full(rows, float(more)),
        "plain": np.full(rows, np.nan if cost is None else 1.0),
        "known": np.full((rows, 2), cost is not None),
    }


def timed(
    state: CostState,
    outcome: RoundOutcome,
    width: IntArray,
    rows: BoolArray,
    size: int,
    learn_slope: bool,
) -> dict[str, Any]:
    """What a round's seconds change in some rows; nothing if there are none (no clock).

    Without seconds of the pass, for it read a prompt, only the draft's steps count.

    Args:
        state: before the round.
        outcome: of the round.
        width: `(rows,)` tokens judged in each row's pass.
        rows: `(rows,)` whose timings count.
        size: which of the batch sizes it was.
        learn_slope: whether passes of different widths are compared.
    """
    zero = np.zeros(len(state))
    verify, draft = zero + outcome.verify_seconds, zero + outcome.draft_seconds
    if not (verify.any() or draft.any()):
        return {}
    told = rows & (verify > 0)
    drafted = told & (width > 0)
    slopes, newest, recent = state.slopes[:, size], state.newest[:, size], state.recent[:, size]
    compared = told if size else drafted
    slope = state.slope
    now = verify / (1 + slope * (width - 1))
    if learn_slope:
        before = newest[:, 1]
        both = compared & (before > 0)
        wider = np.where(both, width - newest[:, 0], 0)
        unit = np.where(wider > 0, before / (1 + slope * (newest[:, 0] - 1)), now)
        expected = slope * wider
        longer = (verify - before) / np.where(both, unit, 1) - expected
        # A row's start is about right, a batch's a guess, which the first two passes settle.
        most = np.where(slopes[:, 1] > SLOPE_INFO, JUMP, np.inf) if size else JUMP
        longer = expected + np.minimum(np.maximum(longer, -most), most)
        slopes = slopes + np.array([wider * longer, wider * wider]).T
        slope = np.minimum(np.maximum(slopes[:, 0] / slopes[:, 1], 0), STEEPEST)
    newest = np.where(compared[:, None], np.array([width, verify]).T, newest)
    first = zero + outcome.first_step_seconds
    steps = np.where(zero + outcome.draft_steps > 0, outcome.draft_steps, width) - (first > 0)
    stepped = rows & (width > 0) & (draft > 0)
    now = np.array([(draft - first) / np.maximum(steps, 1), verify, verify, first, width]).T
    later, started = stepped & (steps > 0), stepped & (first > 0)
    new = np.array([later, drafted, told & ~drafted, started, drafted]).T
    recent = np.where(
        new[:, :, None], np.concatenate([now[:, :, None], recent[:, :, :-1]], 2), recent
    )
    changed = {
        "recent": _put(state.recent, size, recent),
        "newest": _put(state.newest, size, newest),
        "slopes": _put(state.slopes, size, slopes),
    }
    return changed | _in_force(state, recent, slope)


def _in_force(state: CostState, recent: FloatArray, slope: FloatArray) -> dict[str, Any]:
    """The costs that timings `(rows, 5, RECENT)` and a slope amount to."""
    ratio = 1 + slope[:, None] * (recent[:, 4] - 1)
    step, base, plain, first = _median(
        np.concatenate([recent[:, :1], (recent[:, 1] / ratio)[:, None], recent[:, 2:4]], axis=1)
    ).T
    step = np.where(np.isnan(step), WARM * first, step)
    guess = np.where(np.isnan(step), state.base, RATIO * step)
    base = np.where(np.isnan(base), np.where(np.isnan(plain), guess, plain), base)
    step = np.where(np.isnan(step), base / RATIO, step)
    return {
        "step": step,
        "lead": np.where(np.isnan(first), 0, np.maximum(first - step, 0)),
        "base": base,
        "slope": slope,
        "plain": np.minimum(plain, base),  # more tokens never take less time: the rest is noise
        "known": ~np.isnan(
            np.array([recent[:, 0, -1] + recent[:, 1, -1], recent[:, 2, PLAIN_KNOWN - 1]]).T
        ),
    }


def resized(state: CostState, size: int, doublings: IntArray) -> dict[str, Any]:
    """The fields that change for batches of another size, so many `doublings` `(rows,)` larger.

    What nobody has timed stays, but for the plain pass, and the slope: that is taken to be between
    that of a pass that reads weights, where it doubles with the batch, and that of one that
    computes, where it stays.
    """
    new = state.newest[:, size, 1] == 0
    start = state.slope * 2 ** (doublings / 2)
    start = np.array([SLOPE_INFO * start, np.full(len(state), SLOPE_INFO)]).T
    slopes = np.where(new[:, None], start, state.slopes[:, size])
    slope = np.minimum(slopes[:, 0] / slopes[:, 1], STEEPEST)
    return {
        "slopes": _put(state.slopes, size, slopes),
        **_in_force(state, state.recent[:, size], slope),
    }


def seconds(
    state: CostState, outcome: RoundOutcome, width: IntArray, clock: bool
) -> tuple[FloatArray, BoolArray]:
    """`(rows,)` what a round with a draft took, and whether it was timed or is only expected."""
    took = np.zeros(len(state)) + (outcome.draft_seconds + outcome.verify_seconds)
    timed = (took > 0) & (np.asarray(outcome.verify_seconds) > 0) & clock
    if timed.all():
        return took, timed
    expected = state.base * (1 + state.slope * (width - 1)) + state.lead + width * state.step
    return np.where(timed, took, expected), timed


def _put(all_sizes: FloatArray, size: int, value: FloatArray) -> FloatArray:
    """With another value for one of the sizes."""
    new = all_sizes.copy()
    new[:, size] = value
    return new


def _median(recent: FloatArray) -> FloatArray:
    """`(rows, kinds)` the lower median of what is known; NaN if nothing is.

    >>> _median(np.array([[[3.0, 90.0, np.nan], [np.nan, np.nan, np.nan]]]))
    array([[ 3., nan]])
    """
    rising = np.sort(recent, axis=2)  # NaN last
    known = (rising == rising).sum(axis=2)
    middle: FloatArray = np.take_along_axis(rising, (np.maximum(known - 1, 0) // 2)[:, :, None], 2)
    return middle[:, :, 0]
