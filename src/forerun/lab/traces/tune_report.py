"""What tuning found, judged: as a document, and as the settings to use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.lab.traces import exports as lab
from forerun.lab.traces.costs import Cell
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import Choice, Judged, Tuned, choose, judge
from forerun.settings import Settings

SCHEMA = 1


@dataclass(frozen=True)
class Verdict:
    """What was found, and what other prompts say of it."""

    tuned: Tuned
    judged: list[Judged]
    fixed: Mapping[str, Any]
    """The best fixed length, see `judge`."""
    choice: Choice
    split: Mapping[str, Any]
    """How many prompts were `searched` and `judged`, and `how` they were told apart."""

    @classmethod
    def of(
        cls, tuned: Tuned, trace: Trace, cell: Cell, split: Mapping[str, Any], free: bool, seed: int
    ) -> Verdict:
        """Judge on the prompts of a trace; `free` and `seed` as for `choose`."""
        judged, fixed = judge(tuned, trace, cell, seed)
        choice = choose(tuned, judged, trace, cell, free=free, seed=seed)
        return cls(tuned, judged, fixed, choice, {**split, "judged": trace.prompts})


def document(
    verdict: Verdict, cell: Cell, settings: Settings, exports: Mapping[str, Any]
) -> dict[str, Any]:
    """What `tune --json` prints."""
    return {
        "schema": SCHEMA,
        "complete": verdict.tuned.complete,
        "split": dict(verdict.split),
        "costs": cell.to_json(),
        "controllers": [
            {**asdict(one.found), "test": one.overall, "families": one.families}
            for one in verdict.judged
        ],
        "best_fixed": verdict.fixed,
        "recommended": asdict(verdict.choice),
        "settings": json.loads(settings.to_json()),
        "exports": dict(exports),
    }


def settings(controller: str, trace: Trace, about: Mapping[str, Any]) -> Settings:
    """What to save: a controller, and the draft it was tuned with if others can find it."""
    draft = trace.about.get("draft")
    name = str(draft.get("name")) if isinstance(draft, Mapping) else ""
    return Settings(controller=controller, draft=name if "/" in name else None, about=about)


def write_exports(files: Sequence[tuple[str, str]], job: lab.Job) -> dict[str, dict[str, Any]]:
    """Write what other engines can do, as `(engine, file)`; what each says and cannot say."""
    written = {}
    for engine, file in files:
        made = lab.export(engine, job)
        Path(file).write_text(made.text, encoding="utf-8")
        written[engine] = {"file": file, "like": list(made.specs), "cannot": made.cannot}
    return written
