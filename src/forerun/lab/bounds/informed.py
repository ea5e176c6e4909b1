"""The informed bound: the best policy in hindsight on the inputs of a real controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from forerun.lab.bounds.acceptance import Acceptance, RunOdds, TracePositions
from forerun.lab.bounds.bounds import Bound, Path, paths, tuned
from forerun.lab.bounds.stopping import COLUMNS, Stopper, improved, steps
from forerun.lab.traces.costs import Cell
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

PRICES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.1)
"""Prices of a token in plain tokens' time, for the one-step look-ahead."""
ROUNDS = 5  # of policy improvement
ADJUSTED = ((2, 1.0), (1, 1.0), (3, 2.0), (5, 1.0), (11, 0.5), (13, 2.0), (24, 0.5))
"""Columns of the form that are then moved one by one, and how far in the mean cost of a token."""


@dataclass(frozen=True)
class Informed:
    """The informed bound in one cell, and how it was found."""

    best: Bound
    """The fastest policy tried."""
    stopper: Stopper | None
    """The fastest fitted policy; None if the trace has no accepted token."""
    tried: dict[str, float]
    """Geometric mean of the speed-up of each policy tried, the best first. `look-ahead`, `improved`
    and `adjusted` are fitted; the others are specs."""


class Study:
    """A trace with the fits that all cells share.

    Args:
        trace: the texts.
        drafted: paths of controllers on it (`paths`); by default all of `GRID`.
        acceptance: fitted elsewhere; by default here, in hindsight.
    """

    def __init__(
        self,
        trace: Trace,
        drafted: dict[str, Path] | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        self.trace, texts = trace, TracePositions(trace)
        self.paths = paths(trace, GRID) if drafted is None else drafted
        if acceptance is None and trace.matches.any():
            acceptance = Acceptance.fit(texts)
        self.acceptance = acceptance
        self.prepared: RunOdds | None = None if acceptance is None else acceptance.prepare(texts)

    def informed(self, cell: Cell) -> Informed:
        """The best policy for all prompts, by geometric mean of the speed-up."""
        cell = cell.asked
        fitted = self._fitted(cell)
        bounds = [bound for bound, _ in fitted] + tuned(self.trace, cell, self.paths)
        bounds.sort(key=lambda bound: -bound.mean)
        stopper = max(fitted, key=lambda pair: pair[0].mean)[1] if fitted else None
        tried: dict[str, float] = {}
        for bound in bounds:
            tried.setdefault(bound.name, bound.mean)
        return Informed(bounds[0], stopper, tried)

    def _fitted(self, cell: Cell) -> list[tuple[Bound, Stopper]]:
        """Look-ahead at its best price, improved policies, and the best of these adjusted."""
        acceptance, prepared = self.acceptance, self.prepared
        if acceptance is None or prepared is None:
            return []
        step = steps(cell, self.trace.depth)

        def scored(name: str, weights: FloatArray) -> tuple[Bound, Stopper]:
            stopper = Stopper(acceptance, weights, step)
            return Bound.of(name, stopper.path(prepared), self.trace, cell), stopper

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


def informed(
    trace: Trace, cell: Cell, by_family: bool = False, specs: Sequence[str] = GRID
) -> Bound:
    """The fastest policy in hindsight with the inputs of a real controller.

    It knows the draft's signals and the request's own past rounds, neither the family nor later
    tokens; but its settings are fitted to the very trace it is scored on.

    Args:
        trace: the texts.
        cell: what a round costs.
        by_family: fit one policy per family.
        specs: settings of known controllers to try besides the fitted policies.

    For several cells make one `Study`, which fits once.
    """
    by_spec = paths(trace, specs)
    if not by_family:
        return Study(trace, by_spec).informed(cell).best
    families, parts = np.array(trace.families), {}
    for name in sorted(set(trace.families)):
        index = np.flatnonzero(families == name)
        study = Study(trace.take(index), _part(by_spec, index))
        parts[name] = (index, study.informed(cell).best)
    rounds = max(bound.path.drafted.shape[1] for _, bound in parts.values())
    drafted, stepped = np.full((2, trace.prompts, rounds), -1)
    for index, bound in parts.values():
        width = bound.path.drafted.shape[1]
        drafted[index, :width], stepped[index, :width] = bound.path.drafted, bound.path.steps
    title = ", ".join(f"{name}: {bound.name}" for name, (_, bound) in parts.items())
    return Bound.of(title, Path(drafted, np.maximum(stepped, 0)), trace, cell)


def _look_ahead(price: float) -> FloatArray:
    """Draft on while the next token's chance is worth its cost."""
    weights = np.zeros(COLUMNS)
    weights[:2] = -1, price
    return weights


def _part(drafted: dict[str, Path], index: IntArray) -> dict[str, Path]:
    """Paths of a selection of the prompts."""
    return {name: Path(path.drafted[index], path.steps[index]) for name, path in drafted.items()}
