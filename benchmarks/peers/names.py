"""How the peers of `names.json` are started, as `forerun bench --peers NAME` asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import SettingError, UnknownNameError
from forerun.registry import Spec, parse

HERE = Path(__file__).parent


def commands(text: str, pythons: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The words of each command that a name with settings stands for; without settings it may be
    measured with several. `pythons` are interpreters by name, with or without ``-draft``."""
    known = json.loads((HERE / "names.json").read_text(encoding="utf-8"))
    spec = parse(text)
    for name in (spec.name, *pythons):
        if name not in known:
            raise UnknownNameError.among("peer", name, known)
    given = _settings(spec, list(known[spec.name]["settings"]))
    python = next(
        (pythons[n] for n in sorted(pythons, key=len, reverse=True) if spec.name.startswith(n)),
        sys.executable,
    )
    variants = [given] if given else known[spec.name].get("measured", [{}])
    return [
        (python, str(HERE / "run.py"), spec.name, *(f"{k}={json.dumps(v)}" for k, v in how.items()))
        for how in variants
    ]


def _settings(spec: Spec, known: list[str]) -> dict[str, Any]:
    for key in spec.kwargs:
        if key not in known:
            raise UnknownNameError.among(f"setting of peer {spec.name!r}", key, known)
    if len(spec.args) > len(known):
        raise SettingError(f"{spec.name!r} takes at most {len(known)} settings, got {spec}")
    settings = dict(zip(known, spec.args, strict=False)) | dict(spec.kwargs)
    return {k: str(v) if isinstance(v, Spec) else v for k, v in settings.items()}
