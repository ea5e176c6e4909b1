"""The `--json` document."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.cli.compare import Comparison
    from forerun.cli.inputs import Row
    from forerun.cli.run import Job
    from forerun.engine import Completion, Sampling

SCHEMA = 1


def document(
    job: Job, rows: Sequence[Row], completions: Sequence[Completion], compared: Comparison | None
) -> str:
    """One JSON document; `docs/json.md` describes it."""
    settings = dict(job.about)
    settings["sampling"] = [_sampling(row.sampling) for row in rows]
    value = {
        "schema": SCHEMA,
        "completions": [c.to_json() for c in completions],
        "compare": None if compared is None else compared.to_json(),
        "settings": settings,
        "versions": versions(),
    }
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=2)


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return asdict(sampling)


def _finite(value: Any) -> Any:
    """JSON has no infinities: a banned token's bias becomes the text ``"-inf"``."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value


def versions() -> dict[str, str]:
    """Of everything that may matter to a result."""
    from forerun import __version__

    out = {"forerun": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "unknown"
    return out | {"platform": platform.platform()}
