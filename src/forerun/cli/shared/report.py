"""JSON documents, printed and saved."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

from forerun.cli.shared.guard import HELD
from forerun.errors import SettingError

SCHEMA = 1


def to_text(value: Any) -> str:
    """A document as text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)


def print_json(value: Any) -> None:
    """Print a document on stdout."""
    print(to_text(value))


def save_json(path: str | Path, value: Any) -> None:
    """Write a document to a file."""
    Path(path).write_text(to_text(value) + "\n", encoding="utf-8")


def check_writable(path: str | None, option: str = "-o") -> None:
    """Raise now what writing would raise after the work."""
    if path is None:
        return
    if Path(path).is_dir():
        raise SettingError(f"{option} {path} is a folder; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise SettingError(f"{option} {path}: there is no folder {Path(path).parent}")


def only_writer(file: IO[str], name: str) -> None:
    """Keep a file that is written to oneself, until it is closed; `SettingError` if another process
    writes to it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        inode, who = str(os.fstat(file.fileno()).st_ino), "another process"
        with contextlib.suppress(OSError, IndexError):
            for held_lock in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
                kind, _, _, process, place = held_lock.split()[1:6]
                if kind == "FLOCK" and place.rpartition(":")[2] == inode:
                    who = f"process {process}"
        file.close()
        raise SettingError(f"{who} writes {name} just now; name another file") from None


def hold_output(path: str | None) -> None:
    """Be the only process that makes a file, or a folder, until the command ends, or raise
    `SettingError`."""
    if path is None:
        return
    lock = Path(f"{os.path.normpath(path)}.lock")
    if not lock.parent.is_dir():  # the command makes it, or says that it is missing
        return
    file = lock.open("a", encoding="utf-8")
    only_writer(file, path)
    HELD.callback(file.close)
    HELD.callback(lock.unlink, missing_ok=True)


def finite(value: Any) -> Any:
    """JSON has no infinities: a banned token's bias becomes the text ``"-inf"``."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value
