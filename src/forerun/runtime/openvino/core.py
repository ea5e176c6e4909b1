"""What all that runs on OpenVINO needs: the one `Core` of a process, constants, its errors."""

from functools import cache

import numpy as np
import openvino as ov
import openvino.opset15 as op


@cache
def core() -> ov.Core:
    """Make it when first asked for; it is never let go.

    Its CPU plug-in gives the thread that loads it a stack for signal handlers and takes that away
    with itself. Of two that are dropped in the order they were made, the second puts back the
    first one's: unmapped by then, and the next signal to the thread ends the process.
    """
    return ov.Core()


def integers(values: int | list[int]) -> ov.Node:
    """A constant."""
    return op.constant(np.array(values, dtype=np.int64))


def reason(error: Exception) -> str:
    """The telling line of an error of OpenVINO's, which has many."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    telling = [line for line in lines if "No conversion rule" in line or "rror:" in line]
    return (telling or lines[-1:] or [type(error).__name__])[0][:200]
