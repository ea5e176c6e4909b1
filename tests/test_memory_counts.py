"""Tokens a round by counting, on stored answers of SmolLM2 that no table was made from."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.base import Drafter
from forerun.drafters.lookup import LookupDrafter
from forerun.drafters.memory import TABLES
from forerun.drafters.ngrams import NGrams
from forerun.drafters.suffix import Suffix, SuffixDrafter
from test_drafters import Greedy

TEXTS = Path(__file__).parents[2] / "shared/spikes/distil/held.jsonl.gz"
if not TEXTS.exists():
    pytest.skip(f"the answers are not here ({TEXTS})", allow_module_level=True)


def texts() -> list[dict[str, Any]]:
    with gzip.open(TEXTS, "rt") as file:
        return [json.loads(line) for line in file]


def counted(drafter: Drafter, most: int, texts: list[dict[str, Any]]) -> dict[str, list[int]]:
    """By kind of prompt: tokens, rounds, drafted."""
    out: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for text in texts:
        ids, at = text["ids"], text["n"] + 1
        drafter.keep([])
        drafter.join([ids[:at]], 0)
        while at < len(ids):
            draft = drafter.propose([ids[:at]], [most], Greedy()).tokens[0]
            kept = 0
            while kept < min(len(draft), len(ids) - at) and draft[kept] == ids[at + kept]:
                kept += 1
            step = min(kept + 1, len(ids) - at)
            at += step
            for kind in (text["kind"], "all"):
                out[kind] = [a + b for a, b in zip(out[kind], (step, 1, len(draft)), strict=True)]
    return out


def test_suffix_keeps_more_than_lookup_for_little_more_drafted() -> None:
    copies = [x for x in texts() if x["kind"] in ("summary", "extract") or (
        x["kind"] == "code" and "def " in x["prompt"] and "Complete this" not in x["prompt"]
    )]  # fmt: skip
    lookup = counted(LookupDrafter(3, 2), 8, copies)["all"]
    suffix = counted(Suffix().build(None, None), 8, copies)["all"]
    assert suffix[0] / suffix[1] >= 1.08 * lookup[0] / lookup[1]
    assert suffix[2] / suffix[1] <= 1.3 * lookup[2] / lookup[1]


def test_the_table_that_ships_makes_a_round_of_four_worth_two_tokens_and_more() -> None:
    path = next(TABLES.glob("*.smollm2-135m-instruct.safetensors"))
    assert path.stat().st_size <= 500_000
    counts = counted(SuffixDrafter(16, 0.05, [NGrams.load(path)]), 4, texts())
    rates = {kind: tokens / rounds for kind, (tokens, rounds, _) in counts.items()}
    alone = counted(Suffix().build(None, None), 4, texts())
    assert rates["all"] >= 2.2
    assert all(rate > alone[kind][0] / alone[kind][1] for kind, rate in rates.items())
