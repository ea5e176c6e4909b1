"""OpenVINO on the CPU: paged attention under the engine's rows, passes two to three times as fast.

Needs the extra ``forerun[openvino]``; importing this module does not. See ``docs/runtimes.md``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from forerun.errors import MissingExtraError

# Importing openvino and converting a model each send an event over the network, from a fork of this
# process. Without this package it uses a stub of its own.
if "openvino" not in sys.modules:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

if TYPE_CHECKING:
    from forerun.runtime.openvino.executor import OpenVINOExecutor

__all__ = ["OpenVINOExecutor"]


def __getattr__(name: str) -> Any:
    if name != "OpenVINOExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from forerun.runtime.openvino.executor import OpenVINOExecutor
    except ImportError as error:
        if error.name is None or not error.name.startswith("openvino"):
            raise
        raise MissingExtraError.of("openvino", "openvino") from error
    return OpenVINOExecutor
