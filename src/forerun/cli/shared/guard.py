"""Turning whatever goes wrong into one line and an exit code."""

import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import typer

from forerun.errors import ForerunError, SettingError

DEBUG = "FORERUN_DEBUG"  # environment variable: print tracebacks
HELD = ExitStack()  # what the command that runs holds until it ends


class DeferredSignals:
    """A first SIGINT or SIGTERM that waits; a second one does not."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.before: dict[int, Any] = {}  # the handlers that wait

    @property
    def requested(self) -> bool:
        return self.number is not None

    def catch(self, number: int, frame: object = None) -> None:
        if self.requested:
            self.before[number](number, frame)
        self.number = number


@contextmanager
def held() -> Iterator[DeferredSignals]:
    """Let SIGINT and SIGTERM wait until the end of the block; there they are raised, and at once if
    a second one comes."""
    caught = DeferredSignals()
    with _handling({signal.SIGINT: caught.catch, signal.SIGTERM: caught.catch}) as before:
        caught.before = before
        yield caught
    if caught.number is not None:
        before[caught.number](caught.number, None)


@contextmanager
def _handling(handlers: dict[int, Callable[..., None]]) -> Iterator[dict[int, Any]]:
    """Other handlers for signals that are not ignored; only the main thread may set them."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, old in before.items():
            signal.signal(number, old)


Flags = Callable[[], Mapping[str, str]]  # the flags of arguments, by the arguments' names


def guarded(command: Callable[[], Any], flags: Flags = dict) -> int:
    """Run a command; the exit code. Errors become one line on stderr, where one of `flags` stands
    for what the library calls `name`.

    SIGTERM ends it like SIGINT, so that what is complete is kept; only the exit code differs.
    """
    terminated = False

    def terminate(number: int, frame: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    with _handling({signal.SIGTERM: terminate}), HELD:
        code = _guarded(command, flags)
    return 143 if terminated and code == 130 else code


def _guarded(command: Callable[[], Any], flags: Flags) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a poor locale must not end a run
    try:
        code = command()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader is gone: no message, and no flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (SystemExit, typer.Exit) as error:
        code = getattr(error, "exit_code", getattr(error, "code", 1))
        return code if isinstance(code, int) else 1
    except typer.Abort:
        return 130
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return _report(error, flags)


def _report(error: Exception, flags: Flags) -> int:
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # the parser's own: unknown option, missing argument, ...
        return fail(str(format_message()), 2)
    if isinstance(error, ForerunError):
        return fail(_with_flags(str(error), flags), 2 if isinstance(error, SettingError) else 1)
    if isinstance(error, OSError):
        file = f" ({error.filename})" if error.filename else ""
        return fail(f"{error.strerror or error}{file}", 1)
    if type(error).__name__ == "OutOfMemoryError":
        return fail("out of GPU memory; use a smaller --batch-size, --dtype or --max-new-tokens", 1)
    hint = "" if os.environ.get(DEBUG) else f" (set {DEBUG}=1 to see where)"
    return fail(f"unexpected {type(error).__name__}: {error}{hint}", 1)


def _with_flags(message: str, flags: Flags) -> str:
    if "`" not in message:
        return message
    by_name = flags()
    return re.sub(r"`(\w+)`", lambda match: by_name.get(match[1], match[0]), message)


def fail(message: str, code: int) -> int:
    """Print `error: message` as one line on stderr; returns `code`."""
    from forerun.cli.shared.console import clean

    line = " ".join(clean(message).split())
    print(f"error: {line}", file=sys.stderr)
    return code
