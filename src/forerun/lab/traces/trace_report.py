"""Figures of a trace."""

from __future__ import annotations

from typing import Any

from forerun.lab.traces.trace import Trace


def families(trace: Trace) -> dict[str, dict[str, Any]]:
    """Family by family: `prompts`, `tokens`, and how much of the draft is accepted."""
    out = {}
    for family in dict.fromkeys(trace.families):
        part = trace.take([i for i, name in enumerate(trace.families) if name == family])
        matches = part.matches[part.valid]
        out[family] = {
            "prompts": part.prompts,
            "tokens": len(matches),
            "first_kept": round(float((matches > 0).mean()), 4),
            "run_kept": round(float(matches.mean()), 3),
        }
    return out
