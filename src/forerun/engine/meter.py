"""Placeholder until the control branch lands."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lap:
    rows: int
    width: int
    steps: int
    draft_seconds: float
    first_step_seconds: float
    verify_seconds: float
    catch_up_seconds: float


class Meter:
    lap: Any = None
    def tell(self, lap: Lap) -> None:
        self.lap = lap
