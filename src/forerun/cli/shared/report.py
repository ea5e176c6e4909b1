"""JSON documents, printed and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def finite(value: Any) -> Any:
    """JSON has no infinities: a banned token's bias becomes the text ``"-inf"``."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value
