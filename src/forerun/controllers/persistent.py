"""The building block of policies that may go on where the request before ended."""

from __future__ import annotations

from typing import Any

from forerun.controllers.base import LengthController


class Persistent(LengthController):
    """With its setting `persistent` a request starts from the state of the one that ended last."""

    persistent: bool

    @property
    def carries(self) -> bool:
        """If so set."""
        return self.persistent

    def carry(self, state: Any) -> Any:
        """All of it."""
        return state if self.persistent else self.start()
