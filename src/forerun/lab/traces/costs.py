"""Costs of a round: measured on this machine, or synthetic."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forerun import costs
from forerun.cache import write_json
from forerun.checks import whole
from forerun.errors import SettingError, UnknownNameError, require
from forerun.registry import parse
from forerun.types import FloatArray

SCHEMA = 1
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)  # tokens per row of the passes that are timed
REPEATS = 25  # timings of each pass
SYNTHETIC = ("c", "slope", "fixed", "tree")  # as in `c=10,slope=0.02,fixed=0,tree=0`


Cell = costs.Costs  # one entry of a table: the costs at one batch size and context


def passes(cell: Cell, most: int) -> FloatArray:
    """`(most + 1,)` seconds of a round but for its draft steps, by tokens drafted."""
    return np.array([cell.verify_seconds(width) for width in range(1, most + 2)]) + cell.fixed


def least_squares(columns: ArrayLike, values: ArrayLike) -> FloatArray:
    """`(k,)` weights ≥ 0 of `(n, k)` columns that best give `(n,)` values: columns that would cost
    less than nothing are left out."""
    every, wanted = np.asarray(columns, dtype=float), np.asarray(values, dtype=float)
    used, costs = np.ones(every.shape[1], dtype=bool), np.zeros(every.shape[1])
    while used.any():
        costs[:] = 0
        costs[used] = np.linalg.lstsq(every[:, used], wanted, rcond=None)[0]
        if (costs >= 0).all():
            break
        used &= costs > 0
    return np.maximum(costs, 0)


Spread = dict[str, Any]
"""Spread of a cell's timings; pairs are the 10th and 90th percentile, in seconds: `draft`, of a
draft forward that is not the round's first; `verify`, of the target's pass, by width as in the
cell; `work`, the engine's own work per drafted token, which is part of `Cell.draft`; `other`,
`[drafted, median, 10th, 90th]` of the time of live rounds outside both models, of which
`Cell.fixed` is the start and `work` the slope of the line through the others. Lists, as in JSON."""


@dataclass(frozen=True)
class CostTable:
    """A table of cells."""

    cells: tuple[Cell, ...]
    about: dict[str, Any] = field(default_factory=dict)  # provenance
    spread: tuple[Spread, ...] = ()  # per cell; empty if they were not measured

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
        spreads: Sequence[Any] = self.spread or [None] * len(self.cells)
        cells = [
            {**cell.to_json(), "ratio": cell.ratio, "spread": spread}
            for cell, spread in zip(self.cells, spreads, strict=True)
        ]
        return {"schema": SCHEMA, "cells": cells, "about": self.about}

    def write(self, path: str | Path) -> None:
        write_json(Path(path), self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> CostTable:
        """Load what `write` saved; `SettingError` if it is of another schema, or damaged."""
        text = Path(path).read_bytes()
        try:
            document = json.loads(text)
            schema = document["schema"]
            entries = document["cells"]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f"{path} is not a table of costs; make one with forerun costs"
            ) from error
        if schema != SCHEMA:
            raise SettingError(
                f"{path} has costs schema {schema!r} and this forerun reads {SCHEMA}; measure again"
            )
        try:
            own = [{k: v for k, v in e.items() if k not in ("ratio", "spread")} for e in entries]
            cells = tuple(Cell(**{k: _tuples(v) for k, v in values.items()}) for values in own)
            spread = tuple(dict(e["spread"]) for e in entries if e["spread"] is not None)
            return cls(cells, dict(document["about"]), spread)
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(f"{path} is a damaged table of costs: {error!r}") from error

    @classmethod
    def find(cls, text: str) -> CostTable:
        """The table a user means: a file, or a made-up cell like ``c=10,slope=0.02``.

        >>> CostTable.find("c=10,slope=0.02").at().ratio
        10.0
        """
        if Path(text).exists():
            return cls.read(text)
        if "=" not in text:
            raise SettingError(
                f"no table of costs at {text!r}; forerun costs -o FILE measures one, or give "
                "made-up ones like c=10"
            )
        values = dict(parse(f"costs({text})").kwargs)
        for key, value in values.items():
            if key not in SYNTHETIC:
                raise UnknownNameError.among("setting of made-up costs", key, SYNTHETIC)
            require(type(value) in (int, float), key, str(value), "a number")
        require("c" in values, "costs", text, "a file, or c=RATIO with slope and fixed if wanted")
        return cls((Cell.synthetic(**values),), {"synthetic": values})


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
