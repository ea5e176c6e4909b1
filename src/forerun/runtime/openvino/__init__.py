"""OpenVINO on the CPU: paged attention under the engine's rows, passes two to three times as fast.

Needs the extra ``forerun[openvino]``; importing this module does not. See ``docs/runtimes.md``.
"""

import sys

# Importing openvino and converting a model each send an event over the network, from a fork of this
# process. Without this package it uses a stub of its own.
if "openvino" not in sys.modules:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
