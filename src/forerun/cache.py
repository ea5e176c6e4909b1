"""Where files are kept that can be made again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder(kind: str) -> Path:
    """The folder for one kind of them: in `FORERUN_CACHE`, else in the user's cache folder."""
    if given := os.environ.get("FORERUN_CACHE"):
        return Path(given) / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forerun" / kind


def kept_json(kind: str, key: str) -> Any:
    """What `keep_json` left; None if there is nothing that can be read."""
    try:
        return json.loads((cache_folder(kind) / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None


def keep_json(kind: str, key: str, value: Any) -> None:
    """Keep a value for later starts; a disk that does not take it is no error."""
    path = cache_folder(kind) / f"{key}.json"
    new = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(value))
        new.replace(path)
