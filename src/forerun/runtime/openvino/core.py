"""The one `openvino.Core` of a process."""

from functools import cache

import openvino as ov


@cache
def core() -> ov.Core:
    """Make it when first asked for; it is never let go.

    Its CPU plug-in gives the thread that loads it a stack for signal handlers and takes that away
    with itself. Of two that are dropped in the order they were made, the second puts back the
    first one's: unmapped by then, and the next signal to the thread ends the process.
    """
    return ov.Core()
