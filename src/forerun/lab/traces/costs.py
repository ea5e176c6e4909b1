"""What a round costs: of this machine, measured, or of another one, made up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from forerun.checks import whole
from forerun.errors import SettingError, UnknownNameError, require
from forerun.types import FloatArray, IntArray

if TYPE_CHECKING:
    from forerun.model import Model

SCHEMA = 1
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
REPEATS = 25
SYNTHETIC = ("c", "slope", "fixed")
"""What a made-up cell is written with: `c=10,slope=0.02,fixed=0`."""


@dataclass(frozen=True)
class Cell:
    """Costs in seconds at one batch size and context.

    With a batch they are those of the whole batch: one step that drafts a token in every row, one
    pass that verifies every row.
    """

    draft: float
    """One more drafted token: the drafter's forward, and the engine's work for a drafted token."""
    verify: tuple[tuple[int, float], ...]
    """`(width, seconds)` of a target pass fed so many tokens, widths rising from 1; linear in
    between, beyond them by the last slope."""
    fixed: float = 0.0
    """Per round, outside both models."""
    batch: int = 1
    context: int = 128
    first: float = 0.0
    """What a round's first draft step takes more than others: the target's weights are in the
    caches then, after a round that kept everything there are two tokens to read, and the engine
    has more to do than in a round without a draft."""

    def __post_init__(self) -> None:
        widths = [width for width, _ in self.verify]
        rising = bool(widths) and widths[0] == 1 and sorted(set(widths)) == widths
        require(rising, "widths of verify", widths, "rising from 1")
        for name, value in [("draft", self.draft), *[(f"verify({w})", s) for w, s in self.verify]]:
            require(0 < value < math.inf, name, value, "a number of seconds above 0")
        for name, value in [("fixed", self.fixed), ("first", self.first)]:
            require(0 <= value < math.inf, name, value, "a number of seconds ≥ 0")
        whole("batch", self.batch, 1)
        whole("context", self.context, 1)

    def verify_seconds(self, width: ArrayLike) -> FloatArray:
        """Seconds of a target pass fed `width` tokens (drafted + 1), an array like `width`.

        >>> Cell(0.1, ((1, 1.0), (3, 1.2))).verify_seconds([1, 2, 5])
        array([1. , 1.1, 1.4])
        """
        widths, seconds = (
            np.array(column, dtype=float) for column in zip(*self.verify, strict=True)
        )
        wanted = np.asarray(width, dtype=float)
        found: FloatArray = np.interp(wanted, widths, seconds)
        if len(widths) > 1:
            slope = (seconds[-1] - seconds[-2]) / (widths[-1] - widths[-2])
            # A slope below 0 is noise of the measurement; it must not make wide passes free.
            found = found + max(slope, 0.0) * np.maximum(wanted - widths[-1], 0)
        return found

    def draft_seconds(self, steps: IntArray) -> FloatArray:
        """Seconds of so many draft steps in a round, an array like `steps`.

        >>> Cell(0.1, ((1, 1.0),), first=0.05).draft_seconds(np.array([0, 1, 2]))
        array([0.  , 0.15, 0.25])
        """
        found: FloatArray = steps * self.draft + (steps > 0) * self.first
        return found

    @property
    def plain(self) -> float:
        """Seconds of a plain token (of one per row, with a batch)."""
        return self.verify[0][1] + self.fixed

    @property
    def ratio(self) -> float:
        """The cost ratio c: one target pass over one draft step."""
        return self.verify[0][1] / self.draft

    @classmethod
    def synthetic(
        cls, c: float, slope: float = 0.0, fixed: float = 0.0, seconds: float = 1.0
    ) -> Cell:
        """A made-up machine, in units of one plain target pass.

        Args:
            c: cost ratio, > 0: a draft step takes 1/c.
            slope: what each further token to verify adds to a target pass, ≥ 0.
            fixed: per round, outside both models, ≥ 0.
            seconds: the unit.

        >>> cell = Cell.synthetic(10, slope=0.02)
        >>> cell.draft, cell.plain, float(cell.verify_seconds(6))
        (0.1, 1.0, 1.1)
        """
        require(0 < c < math.inf, "c", c, "above 0")
        require(0 <= slope < math.inf, "slope", slope, "at least 0")
        require(0 <= fixed < math.inf, "fixed", fixed, "at least 0")
        require(0 < seconds < math.inf, "seconds of a target pass", seconds, "above 0")
        verify = ((1, seconds), (2, seconds * (1 + slope)))
        return cls(seconds / c, verify, seconds * fixed)


@dataclass(frozen=True)
class Spread:
    """How sure a measured cell is: pairs are the 10th and 90th percentile, in seconds."""

    draft: tuple[float, float]
    """Of a draft forward that is not the round's first."""
    verify: tuple[tuple[float, float], ...]
    """Of the target's pass, by width as in the cell."""
    work: float
    """The engine's own work per drafted token, which is part of `Cell.draft`."""
    other: tuple[tuple[int, float, float, float], ...]
    """`(drafted, median, 10th, 90th)` of the time of live rounds outside both models; `Cell.fixed`
    is its start, `work` the slope of the line through the others."""


@dataclass(frozen=True)
class Costs:
    """A table of cells."""

    cells: tuple[Cell, ...]
    about: dict[str, Any] = field(default_factory=dict)
    """Provenance."""
    spread: tuple[Spread, ...] = ()
    """Per cell; empty if they were not measured."""

    def __post_init__(self) -> None:
        require(bool(self.cells), "cells", self.cells, "at least one")
        fits = len(self.spread) in (0, len(self.cells))
        require(fits, "spread", len(self.spread), f"none or {len(self.cells)}")

    def at(self, batch: int = 1, context: int = 128) -> Cell:
        """The cell of the nearest batch size and, of those, the nearest context (in ratio)."""
        whole("batch", batch, 1)
        whole("context", context, 1)

        def distance(cell: Cell) -> tuple[float, float]:
            return abs(math.log(cell.batch / batch)), abs(math.log(cell.context / context))

        return min(self.cells, key=distance)

    def to_json(self) -> dict[str, Any]:
        """The documented shape; times in seconds."""
        spread: list[Any] = [asdict(s) for s in self.spread] or [None] * len(self.cells)
        cells = [
            {**asdict(cell), "ratio": cell.ratio, "spread": one}
            for cell, one in zip(self.cells, spread, strict=True)
        ]
        return {"schema": SCHEMA, "cells": cells, "about": self.about}

    def write(self, path: str | Path) -> None:
        """Save as JSON."""
        text = json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Costs:
        """Load what `write` saved.

        Raises:
            SettingError: not a table of costs, of another schema, or damaged.
            OSError: the file cannot be read.
        """
        text = Path(path).read_bytes()
        try:
            found = json.loads(text)
            schema = found["schema"]
            cells = found["cells"]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f"{path} is not a table of costs; make one with forerun costs"
            ) from error
        if schema != SCHEMA:
            raise SettingError(
                f"{path} has costs schema {schema!r} and this forerun reads {SCHEMA}; measure again"
            )
        try:
            made = tuple(_cell(cell) for cell in cells)
            spread = tuple(_spread(cell["spread"]) for cell in cells if cell["spread"] is not None)
            return cls(made, dict(found["about"]), spread)
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(f"{path} is a damaged table of costs: {error!r}") from error

    @classmethod
    def find(cls, text: str) -> Costs:
        """The table a user means: a file, or a made-up cell like ``c=10,slope=0.02``.

        >>> Costs.find("c=10,slope=0.02").at().ratio
        10.0

        Raises:
            UnknownNameError, SettingError, OSError: as the text is read.
        """
        if Path(text).exists():
            return cls.read(text)
        if "=" not in text:
            raise SettingError(
                f"no table of costs at {text!r}; forerun costs -o FILE measures one, or give "
                "made-up ones like c=10"
            )
        given: dict[str, float] = {}
        for part in text.split(","):
            key, _, value = (side.strip() for side in part.partition("="))
            if key not in SYNTHETIC:
                raise UnknownNameError.among("setting of made-up costs", key, SYNTHETIC)
            require(key not in given, key, text, "given once")
            try:
                given[key] = float(value)
            except ValueError:
                raise SettingError(f"{key} must be a number, got {value!r}") from None
        require("c" in given, "costs", text, "a file, or c=RATIO with slope and fixed if wanted")
        return cls((Cell.synthetic(**given),), {"synthetic": given})

    @classmethod
    def measure(
        cls,
        model: Model,
        batches: Sequence[int] = (1,),
        contexts: Sequence[int] = (128,),
        widths: Sequence[int] = WIDTHS,
        repeats: int = REPEATS,
        progress: Callable[[int], None] | None = None,
    ) -> Costs:
        """Time the models on this machine; arguments and errors as for `measuring.cells`."""
        from forerun.lab.traces import measuring

        found = list(measuring.cells(model, batches, contexts, widths, repeats, progress))
        return measuring.gathered(model, found, repeats)


def _cell(found: dict[str, Any]) -> Cell:
    verify = tuple((int(width), float(seconds)) for width, seconds in found["verify"])
    numbers = float(found["draft"]), verify, float(found["fixed"])
    sizes = int(found["batch"]), int(found["context"])
    return Cell(*numbers, *sizes, float(found.get("first", 0.0)))


def _spread(found: dict[str, Any]) -> Spread:
    low, high = found["draft"]
    verify = tuple((float(a), float(b)) for a, b in found["verify"])
    other = tuple((int(n), float(m), float(a), float(b)) for n, m, a, b in found["other"])
    return Spread((float(low), float(high)), verify, float(found["work"]), other)
