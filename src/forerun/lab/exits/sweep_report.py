"""Results of a sweep, as a document and as a settings file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.lab.exits.exit_replay import Setting
from forerun.lab.exits.sweep import Confirmed, Search
from forerun.lab.provenance import versions

SCHEMA = 1
SHOWN = 8
"""Settings listed."""


def save(path: str, setting: Setting, exits: str | None, about: Mapping[str, Any]) -> None:
    """Write the settings file: for `generate`, on any machine."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "controller": setting.controller,
        "rule": None,
        "draft": setting.spec(None if exits else exits),
    }
    if exits:
        document["exits"] = os.path.relpath(exits, Path(path).parent)
    text = json.dumps(document | {"about": about}, ensure_ascii=False, allow_nan=False, indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def document(
    search: Search,
    best: Setting,
    live: list[Confirmed],
    untuned: Setting | None,
    exits: str | None,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of `sweep specbound`: the fastest settings, and the effect of changes."""
    parts = search.costs.parts(search.counts(live[0].setting))
    total = sum(parts.values())
    return {
        "schema": SCHEMA,
        "draft": live[0].setting.spec(exits),
        "controller": live[0].setting.controller,
        "top": [
            {"draft": setting.spec(exits), "predicted": round(search.score(setting), 4)}
            for setting in search.top(SHOWN)
        ],
        "confirmed": [c.to_json(exits) for c in live],
        "untuned": None if untuned is None else untuned.spec(exits),
        "time": {name: round(seconds / total, 4) for name, seconds in parts.items()},
        "sensitivity": {
            name: [[value, round(score, 4)] for value, score in values]
            for name, values in search.sensitivity(live[0].setting).items()
        },
        "costs_ms": search.costs.to_json(),
        "tried": len(search.scores),
        "prefixes": search.exits.prefixes,
        "about": {
            **about,
            "settings": live[0].setting.settings(),
            "speedup": live[0].to_json(exits)["speedup"],
            "predicted": round(live[0].predicted, 4),
            "best_predicted": best.spec(exits),
            "versions": versions(),
        },
    }
