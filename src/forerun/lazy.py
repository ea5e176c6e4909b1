"""torch, imported when something of it is first used.

It takes 0.2 GB and 1.5 s of processor time, and OpenVINO decodes greedily without it. So modules
that can do without, on numpy's arrays, take it from here.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        @cached_property
        def _module(self) -> Any:
            import torch

            return torch

        def __getattr__(self, name: str) -> Any:
            return getattr(self._module, name)

    torch = _Torch()

CORES = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def loaded() -> Any:
    """torch if anything has imported it, else None."""
    return sys.modules.get("torch")


def threads() -> int:
    """On how many torch computes, or would: one for each core that this process may use, or fewer
    if `OMP_NUM_THREADS` says so."""
    if (there := loaded()) is not None:
        return int(there.get_num_threads())
    try:
        cores = len({Path(CORES.format(n)).read_text() for n in os.sched_getaffinity(0)})
    except (AttributeError, OSError):  # other systems
        cores = os.cpu_count() or 1
    named = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(named), cores) if named.isdigit() and int(named) else cores
