"""Judged search results: as a document, and as the settings to use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.lab.traces import exports as lab
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import Judged, Recommendation, Tuned, choose, judge
from forerun.settings import Settings

SCHEMA = 1


@dataclass(frozen=True)
class TuneVerdict:
    """The search results, and how they do on other prompts."""

    tuned: Tuned
    judged: list[Judged]
    fixed: Mapping[str, Any]
    """The best fixed length, see `judge`."""
    choice: Recommendation
    split: Mapping[str, Any]
    """How many prompts were `searched` and `judged`, and `how` they were split."""

    @classmethod
    def of(
        cls, tuned: Tuned, trace: Trace, cell: Cell, split: Mapping[str, Any], free: bool, seed: int
    ) -> TuneVerdict:
        """Judge on the prompts of a trace; `free` and `seed` as for `choose`."""
        judged, fixed = judge(tuned, trace, cell, seed)
        choice = choose(tuned, judged, trace, cell, free=free, seed=seed)
        return cls(tuned, judged, fixed, choice, {**split, "judged": trace.prompts})


def document(
    verdict: TuneVerdict, cell: Cell, settings: Settings, exports: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of `tune --json`."""
    return {
        "schema": SCHEMA,
        "complete": verdict.tuned.complete,
        "split": dict(verdict.split),
        "costs": cell.to_json(),
        "controllers": [
            {**asdict(entry.result), "test": entry.overall, "families": entry.families}
            for entry in verdict.judged
        ],
        "best_fixed": verdict.fixed,
        "recommended": asdict(verdict.choice),
        "settings": json.loads(settings.to_json()),
        "exports": dict(exports),
    }


def settings(controller: str, trace: Trace, about: Mapping[str, Any]) -> Settings:
    """A controller, and the draft it was tuned with if it has a Hugging Face id."""
    draft = trace.about.get("draft")
    name = str(draft.get("name")) if isinstance(draft, Mapping) else ""
    return Settings(controller=controller, draft=name if "/" in name else None, about=about)


def write_exports(
    files: Sequence[tuple[str, str]], job: lab.ExportJob
) -> dict[str, dict[str, Any]]:
    """Write the exports, given as `(engine, file)`; per engine, what it does and cannot do."""
    written = {}
    for engine, file in files:
        export = lab.export(engine, job)
        Path(file).write_text(export.text, encoding="utf-8")
        written[engine] = {"file": file, "like": list(export.specs), "cannot": export.cannot}
    return written
