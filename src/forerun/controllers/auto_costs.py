"""What `auto` knows of the clock: seconds of a draft step and of a target pass, by width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.controllers.base import State
from forerun.types import BoolArray, FloatArray, RoundOutcome

RATIO = 5.0
"""c until a round was timed."""
WARM = 0.7
"""A later draft step over a round's first, until one was timed."""
SLOPE = 0.02
"""v until widths were compared."""
SLOPE_INFO = 20.0
"""Weight of that start, in squared tokens of difference in width."""
JUMP = 0.3
"""Most by which two target passes are taken to differ for their widths: more is an outlier."""
RECENT = 7
"""Timings kept, whose median counts: outliers of a shared machine do not."""


@dataclass(frozen=True)
class CostState(State):
    """Timings, and the costs they amount to."""

    recent: FloatArray
    """`(rows, 4, RECENT)` the newest timings, newest first, NaN where there are none: seconds of a
    draft step, of a target pass with a draft (as if of one token), of one without, and of a
    round's first draft step."""
    newest: FloatArray
    """`(rows, 2)` drafted tokens and seconds of the newest pass that judged a draft."""
    slopes: FloatArray
    """`(rows, 2)` sums `Σ Δw·Δv` and `Σ Δw²` over pairs of passes, for the slope."""
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


def unknown(rows: int, cost: float | None, slope: float | None) -> dict[str, Any]:
    """The fields of `CostState` before anything was timed, in plain target passes."""
    more = SLOPE if slope is None else slope
    return {
        "recent": np.full((rows, 4, RECENT), np.nan),
        "newest": np.zeros((rows, 2)),
        "slopes": np.tile([SLOPE_INFO * more, SLOPE_INFO], (rows, 1)),
        "step": np.full(rows, 1 / (RATIO if cost is None else cost)),
        "lead": np.zeros(rows),
        "base": np.full(rows, 1.0 if cost is None else 1 + more),
        "slope": np.full(rows, float(more)),
        "plain": np.full(rows, np.nan if cost is None else 1.0),
    }


def timed(
    state: CostState, outcome: RoundOutcome, rows: BoolArray, learn_slope: bool
) -> dict[str, Any]:
    """What a round's seconds change in some rows; nothing if there are none (no clock).

    Without seconds of the pass, for it read a prompt, only the draft's steps count.
    """
    zero = np.zeros(len(state))
    verify, draft = zero + outcome.verify_seconds, zero + outcome.draft_seconds
    if not (verify.any() or draft.any()):
        return {}
    width = outcome.drafted.astype(float)
    told = rows & (verify > 0)
    drafted = told & (width > 0)
    slope, slopes = state.slope, state.slopes
    if learn_slope:
        before = state.newest[:, 1]
        both = drafted & (before > 0)
        wider = np.where(both, width - state.newest[:, 0], 0)
        longer = verify / np.where(both, before, 1) - 1
        longer = np.minimum(np.maximum(longer, -JUMP), JUMP)
        slopes = slopes + np.array([wider * longer, wider * wider]).T
        slope = np.minimum(np.maximum(slopes[:, 0] / slopes[:, 1], 0), 1)
    newest = np.where(drafted[:, None], np.array([width, verify]).T, state.newest)
    first = zero + outcome.first_step_seconds
    steps = np.where(zero + outcome.draft_steps > 0, outcome.draft_steps, width) - (first > 0)
    stepped = rows & (width > 0) & (draft > 0)
    base = verify / (1 + slope * (np.maximum(width, 1) - 1))
    now = np.array([(draft - first) / np.maximum(steps, 1), base, verify, first]).T
    new = np.array([stepped & (steps > 0), drafted, told & ~drafted, stepped & (first > 0)]).T
    recent = np.where(
        new[:, :, None], np.concatenate([now[:, :, None], state.recent[:, :, :-1]], 2), state.recent
    )
    step, base, plain, first = _median(recent).T
    step = np.where(np.isnan(step), WARM * first, step)
    guess = np.where(np.isnan(step), state.base, RATIO * step)
    base = np.where(np.isnan(base), np.where(np.isnan(plain), guess, plain), base)
    step = np.where(np.isnan(step), base / RATIO, step)
    return {
        "recent": recent,
        "newest": newest,
        "slopes": slopes,
        "step": step,
        "lead": np.where(np.isnan(first), 0, np.maximum(first - step, 0)),
        "base": base,
        "slope": slope,
        "plain": np.minimum(plain, base),  # more tokens never take less time: the rest is noise
    }


def seconds(state: CostState, outcome: RoundOutcome, clock: bool) -> tuple[FloatArray, BoolArray]:
    """`(rows,)` what a round with a draft took, and whether it was timed or is only expected."""
    zero = np.zeros(len(state))
    verify, draft = zero + outcome.verify_seconds, zero + outcome.draft_seconds
    timed = (verify > 0) & clock
    expected = state.base * (1 + state.slope * (outcome.drafted - 1))
    expected = expected + state.lead + outcome.drafted * state.step
    return np.where(timed, draft + verify, expected), timed


def _median(recent: FloatArray) -> FloatArray:
    """`(rows, kinds)` the lower median of what is known; NaN if nothing is.

    >>> _median(np.array([[[3.0, 90.0, np.nan], [np.nan, np.nan, np.nan]]]))
    array([[ 3., nan]])
    """
    rising = np.sort(recent, axis=2)  # NaN last
    known = (rising == rising).sum(axis=2)
    middle: FloatArray = np.take_along_axis(rising, (np.maximum(known - 1, 0) // 2)[:, :, None], 2)
    return middle[:, :, 0]
