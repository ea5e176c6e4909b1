"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of them: in `FORERUN_CACHE`, else in the user's cache folder."""
    if given := os.environ.get("FORERUN_CACHE"):
        return Path(given) / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forerun" / kind
