"""Torch beside passes that run on threads of their own."""

from __future__ import annotations

from typing import Any

import torch


class OneThread:
    """Inside, torch computes on one thread, afterwards on as many as before; see
    `Executor.own_threads`. A fifth of a microsecond; not to be entered twice at once."""

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: Any) -> None:
        torch.set_num_threads(self._before)
