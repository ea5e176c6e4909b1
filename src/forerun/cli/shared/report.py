"""JSON documents, printed and saved."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun.cli.shared.console import remark
from forerun.cli.shared.guard import HELD
from forerun.errors import SettingError

SCHEMA = 1


def print_json(value: Any) -> None:
    """Print a document on stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2))


def report(
    document: Any, show: Callable[[], None], as_json: bool, output: str | None = None
) -> None:
    """Print a document, or show it to people and say where it was saved."""
    if as_json:
        return print_json(document)
    show()
    if output is not None:
        remark(f"saved to {output}")


def claim(path: str | None, option: str = "-o", folder: bool = False) -> None:
    """Be the only process that makes a file, or a folder, until the command ends; `SettingError`
    says now what writing it would say after the work."""
    if path is None:
        return
    place = Path(path)
    parent = place.absolute().parent
    if place.exists() and place.is_dir() != folder:
        wrong = "is a file; name a folder" if folder else "is a folder; name a file"
        raise SettingError(f"{option} {path} {wrong}")
    if not (folder or parent.is_dir()):
        raise SettingError(f"{option} {path}: there is no folder {place.parent}")
    if place.exists() and not (place.is_file() or place.is_dir()):  # a device
        return
    if parent.is_dir():  # else it is made with the folder
        if not os.access(place if place.exists() else parent, os.W_OK):
            raise SettingError(f"{option} {path} cannot be written; name another place")
        _lock(Path(f"{os.path.normpath(path)}.lock"), path)


def _lock(lock: Path, path: str) -> None:
    try:
        import fcntl

        file = lock.open("a+", encoding="utf-8")
    except (ImportError, OSError):  # on Windows, or beside a file in a folder that takes no other
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = f"process {number}" if (number := file.read()) else "another process"
        file.close()
        raise SettingError(f"{who} writes {path} just now; name another file") from None
    HELD.callback(file.close)
    HELD.callback(lock.unlink, missing_ok=True)
    file.truncate(0)
    try:
        os.write(file.fileno(), str(os.getpid()).encode())
    except OSError as error:  # a full disk names no file
        error.filename = path
        raise


def finite(value: Any) -> Any:
    """JSON has no infinities: a banned token's bias becomes the text ``"-inf"``."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value
