"""Turning whatever goes wrong into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from forerun.cli.console import clean
from forerun.errors import ForerunError, SettingError

DEBUG = "FORERUN_DEBUG"


def guarded(command: Callable[[], Any]) -> int:
    """Run a command; the exit code. Errors become one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a poor locale must not end a run
    try:
        code = command()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _abandon_stdout()
    except (SystemExit, typer.Exit) as error:
        code = getattr(error, "exit_code", getattr(error, "code", 1))
        return code if isinstance(code, int) else 1
    except typer.Abort:
        return 130
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return _report(error)


def _report(error: Exception) -> int:
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # the parser's own: unknown option, missing argument, ...
        return say(str(format_message()), 2)
    if isinstance(error, SettingError):
        return say(str(error), 2)
    if isinstance(error, ForerunError):
        return say(str(error), 1)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return say(f"{error.strerror or error}{where}", 1)
    if type(error).__name__ == "OutOfMemoryError":
        return say("out of GPU memory; use a smaller --batch-size, --dtype or --max-new-tokens", 1)
    hint = "" if os.environ.get(DEBUG) else f" (set {DEBUG}=1 to see where)"
    return say(f"unexpected {type(error).__name__}: {error}{hint}", 1)


def say(message: str, code: int) -> int:
    """Print `error: message` as one line on stderr; returns `code`."""
    line = " ".join(clean(message).split())
    print(f"error: {line}", file=sys.stderr)
    return code


def _abandon_stdout() -> int:
    """The reader went away: nothing to say, and nothing may be flushed at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    return 141
