"""What a replay counts of each prompt, and in sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forerun.controllers.base import Controller, LengthPolicy
from forerun.costs import Costs
from forerun.errors import require
from forerun.governors import Governor
from forerun.lab.traces.trace import Trace
from forerun.types import BoolArray, FloatArray, IntArray

RESAMPLES = 2000  # bootstrap samples of an interval
COUNTED = ("rounds", "drafted", "accepted", "steps", "capped", "leaves", "leaves_kept")
"""Fields of a `Replay` that are counted round by round."""


@dataclass(frozen=True)
class Replay:
    """Counts and seconds of each prompt; all arrays `(prompts,)`."""

    rounds: IntArray
    drafted: IntArray  # tokens put before the target
    accepted: IntArray
    committed: IntArray  # tokens of the text
    steps: IntArray  # tokens the drafter was stepped for: those drafted, those trimmed
    capped: IntArray
    """Rounds whose draft went on to the trace's depth and would have gone beyond. Where there are
    none, the replay is that of the live engine; elsewhere it is that of an engine whose drafter
    has nothing more to propose."""
    leaves: IntArray  # second choices put before the target
    leaves_kept: IntArray
    seconds: FloatArray
    plain_seconds: FloatArray  # of plain decoding
    drift: FloatArray  # summed over the text's tokens; 0 under the rule that it was recorded by

    @property
    def speedup(self) -> FloatArray:
        return self.plain_seconds / self.seconds

    @property
    def wasted(self) -> IntArray:
        return self.drafted - self.accepted

    def take(self, index: Any) -> Replay:
        """A selection of the prompts: numbers, a mask or a slice."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class Rounds:
    """One round of every prompt that is still running; all arrays `(rows,)`."""

    prompt: IntArray  # its number in the trace
    at: IntArray  # tokens of its text before the round
    drafted: IntArray
    accepted: IntArray
    steps: IntArray
    stopped_by: IntArray  # values of `Stop`
    seconds: FloatArray
    leaves_kept: IntArray | int = 0


Watch = Callable[[Rounds], None]


@dataclass(frozen=True)
class Kept:
    """What is kept of one round of some rows."""

    accepted: IntArray  # `(rows,)`
    chance: Callable[[int], FloatArray]  # `(rows,)` at a depth, as `Verdict.accept_prob`
    drift: FloatArray | float = 0.0
    """`(rows,)` summed over the positions judged: in the mean over drafts where these were sampled;
    then a rule that replaces by draws from the target has at least that."""


class AsRecorded:
    """Keeps what was kept when the texts were recorded."""

    has_bonus = True

    def __init__(self, trace: Trace) -> None:
        self._matches, self._depth = trace.matches.reshape(-1), trace.depth
        self._prob = trace.accept_prob.reshape(-1)

    def judge(self, here: IntArray, lengths: IntArray, spent: FloatArray) -> Kept:
        """As `RecordedRule.judge`."""
        kept = np.minimum(lengths, self._matches[here])
        return Kept(kept, lambda depth: self._prob.take(here * self._depth + depth))


def costs_for(controller: Controller, cell: Costs) -> Costs:
    """What rounds cost under a controller: one that is shown drafted tokens pays for it;
    `SettingError` if it wants trees."""
    why = "0 in a replay: a trace does not hold what a draft says beside its own tokens"
    require(not controller.tree, "tree", controller.tree, why)
    asks = not isinstance(controller, LengthPolicy) or controller.stops_early
    return cell.asked if asks else cell


def takes_leaves(controller: Controller) -> bool:
    """Whether it may have second choices judged."""
    return isinstance(controller, Governor) and "second" in controller.signals


def mean_speed(ratios: ArrayLike) -> float:
    """The geometric mean."""
    return float(np.exp(np.log(np.asarray(ratios, dtype=float)).mean()))


def geometric(ratios: ArrayLike, seed: int = 0) -> dict[str, float]:
    """Geometric mean of `(n,)` paired ratios, n ≥ 1, with a 95 % bootstrap interval over prompts:
    `mean`, `low`, `high` and `n`."""
    logs = np.log(np.asarray(ratios, dtype=float))
    low, high = np.quantile(logs[draws(len(logs), seed)].mean(1), [0.025, 0.975])
    mean, low, high = (float(np.exp(value)) for value in (logs.mean(), low, high))
    return {"mean": mean, "low": low, "high": high, "n": len(logs)}


def rate(tokens: ArrayLike, seconds: ArrayLike, seed: int = 0) -> dict[str, float]:
    """All tokens over all seconds, both `(n,)`, with an interval as of `geometric`."""
    top, bottom = np.asarray(tokens, dtype=float), np.asarray(seconds, dtype=float)
    index = draws(len(top), seed)
    low, high = np.quantile(top[index].sum(1) / bottom[index].sum(1), [0.025, 0.975])
    mean = float(top.sum() / bottom.sum())
    return {"mean": mean, "low": float(low), "high": float(high), "n": len(top)}


def by_family(trace: Trace) -> dict[str, BoolArray]:
    """Which prompts are in ``"all"`` and in each family, `(prompts,)` each."""
    families, every = np.array(trace.families), np.ones(trace.prompts, dtype=bool)
    return {"all": every, **{name: families == name for name in dict.fromkeys(trace.families)}}


def summarise(trace: Trace, result: Replay, batch: int = 1) -> dict[str, dict[str, Any]]:
    """Totals and figures with intervals of a `replay`: of ``"all"`` prompts and of each family.

    `batch` rows share the seconds; tokens per second are those of all.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, chosen in by_family(trace).items():
        group = result.take(chosen)
        out[name] = {
            "prompts": len(group.rounds),
            "tokens": int(group.committed.sum()),
            "speedup": geometric(group.speedup),
            "tokens_per_second": rate(group.committed * batch, group.seconds),
            "tokens_per_round": rate(group.committed, group.rounds),
            "drift": float(group.drift.sum() / group.committed.sum()),
            **{key: int(getattr(group, key).sum()) for key in (*COUNTED, "wasted")},
            "seconds": float(group.seconds.sum()),
            "plain_seconds": float(group.plain_seconds.sum()),
        }
    return out


def draws(size: int, seed: int) -> IntArray:
    """`(RESAMPLES, size)` bootstrap samples of numbers below `size`."""
    require(size >= 1, "prompts", size, "at least one")
    return np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))
