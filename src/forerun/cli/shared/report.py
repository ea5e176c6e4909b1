"""JSON documents: what `generate` prints, and how every command prints and saves its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import SettingError

if TYPE_CHECKING:
    from forerun.cli.shared.compare import Comparison
    from forerun.cli.shared.inputs import Row
    from forerun.cli.shared.run import Job
    from forerun.engine import Completion

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


def document(
    job: Job, rows: Sequence[Row], done: Mapping[int, Completion], compared: Comparison | None
) -> dict[str, Any]:
    """What `generate --json` prints; `docs/json.md` describes it.

    Args:
        job: models and policies.
        rows: the requests.
        done: what is complete, by the index of its request.
        compared: against plain decoding.
    """
    from forerun.lab.provenance import versions

    settings = dict(job.about)
    settings["sampling"] = [asdict(row.sampling) for row in rows]
    return finite(
        {
            "schema": SCHEMA,
            "complete": len(done) == len(rows),
            "completions": [{**rows[i].to_json(), **c.to_json()} for i, c in done.items()],
            "compare": None if compared is None else compared.to_json(),
            "settings": settings,
            "versions": versions(),
        }
    )


def finite(value: Any) -> Any:
    """JSON has no infinities: a banned token's bias becomes the text ``"-inf"``."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value
