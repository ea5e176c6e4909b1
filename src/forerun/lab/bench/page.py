"""The bench's report: one HTML page that holds the results, and draws them where it is read."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from forerun.lab.bench import report
from forerun.lab.bench.bench import Results
from forerun.lab.bench.methods import PLAIN
from forerun.lab.bench.report import Cell, Document

PAGE = "report.html"
"""File of the report, beside the results."""


def write(results: Results) -> list[Cell]:
    """Write results and report of what there is; the figures."""
    cells = report.cells(results.document)
    results.document["summary"] = [c.to_json() for c in cells]
    results.write()
    if cells:
        (results.folder / PAGE).write_text(render(results.document, cells), encoding="utf-8")
    return cells


def render(document: Document, cells: list[Cell]) -> str:
    """The whole page."""
    text = json.dumps(shown(document, cells), ensure_ascii=False).replace("<", "\\u003c")
    page = files("forerun.lab.bench").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("RESULTS", text, 1)


def shown(document: Document, cells: list[Cell]) -> dict[str, Any]:
    """What the page shows of the results; everything but `samples`, and figures of these."""
    first = min(report.batches(document))
    lengths: dict[str, dict[str, int]] = {}
    for sample in document["samples"]:
        if sample["batch"] == first and sample["lengths"] and sample["method"] != PLAIN:
            counts = lengths.setdefault(sample["method"], {})
            for accepted, rounds in sample["lengths"].items():
                counts[accepted] = counts.get(accepted, 0) + rounds
    rivals = report.against(document, first).items()
    kept = {k: v for k, v in document.items() if k not in ("samples", "summary")}
    return kept | {
        "prompts": len({p for s in document["samples"] for p in s["prompts"]}),
        "cells": [vars(c) for c in cells],
        "against": [{"method": a, "peer": b, **spread} for (a, b), spread in rivals],
        "best_settings": report.best_settings(document, first),
        "lengths": lengths,
    }
