"""Where files are kept that can be made again; files that are written whole or not at all."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_text(json.dumps(value))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes a file's place at the end of the block; after an error or a kill
    the file is as it was. What is no file, a device like /dev/null, is written itself."""
    if path.exists() and not path.is_file():
        yield path
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:  # as of a full disk, which names none
        if error.errno and error.filename in (None, str(beside)):
            error.filename = str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file of one object, whole or not at all."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path) as beside:
        beside.write_text(text + "\n", encoding="utf-8")
