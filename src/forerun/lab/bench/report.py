"""Figures of a bench's samples: speed-ups with their spread, and how two benches differ.

The speed-up of a group is plain decoding's seconds per token over the method's. Per token, so that
a lossy rule that writes more gains nothing by it; for outputs that are identical it is the ratio of
the seconds. Figures of many groups are geometric means, their intervals 95 % by bootstrap over the
groups (at batch 1: the prompts).
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import chain, product
from typing import Any

import numpy as np

from forerun.lab.traces.results import geometric

SCHEMA = 1
PLAIN = "plain"  # the name of decoding with the target alone
ALL = "all"  # the name of all families together
LEVEL = 0.05  # a change less likely by chance than this is beyond noise

Document = dict[str, Any]
Sample = dict[str, Any]
Spread = dict[str, float]  # `mean`, `low`, `high` and `n`, of ratios


Cell = dict[str, Any]
"""One method on one family (or `ALL`) at one batch size: an entry of `summary` (docs/json.md), with
`ratios`, the speed-up of each group."""
Change = dict[str, Any]
"""One method on one family between two benches: an entry of `cells` of `bench compare --json`."""


def show(spread: Spread) -> str:
    """`1.85 [1.71, 2.00]`."""
    return f"{spread['mean']:.2f} [{spread['low']:.2f}, {spread['high']:.2f}]"


def methods(document: Document) -> list[dict[str, Any]]:
    """Methods that have samples, in the order asked for."""
    measured = {s["method"] for s in document["samples"]}
    return [m for m in document["methods"] if m["name"] in measured]


def cells(document: Document) -> list[Cell]:
    """Every method on every family, and on all, at every batch size."""
    groups = _groups(document)
    out = []
    for batch, family, keys in _by_cell(groups):
        for name in (method["name"] for method in methods(document)):
            if pairs := [(groups[k][PLAIN], groups[k][name]) for k in keys if name in groups[k]]:
                out.append(_cell(batch, family, name, pairs))
    return out


def against(document: Document, batch: int) -> dict[tuple[str, str], Spread]:
    """Speed of each method over that of each peer, all families together: (method, peer)."""
    groups = [g for key, g in _groups(document).items() if key[0] == batch]
    kinds = {m["name"]: m["kind"] for m in methods(document)}
    out = {}
    for mine, peer in product(kinds, repeat=2):
        both = [g for g in groups if peer in g and mine in g]
        if both and kinds[mine] != "peer" == kinds[peer]:
            out[mine, peer] = geometric([_pace(g[peer]) / _pace(g[mine]) for g in both])
    return out


def compare(a: Document, b: Document) -> list[Change]:
    """Changes from A to B, paired over the groups both have, for methods both have."""
    left, right = _groups(a), _groups(b)
    names = [m["name"] for m in methods(a) if m["name"] in {m["name"] for m in methods(b)}]
    out = []
    for batch, family, keys in _by_cell([key for key in left if key in right]):
        for name in names:
            both = [k for k in keys if name in left[k] and name in right[k]]
            if pairs := [(left[k], right[k]) for k in both]:
                out.append(_change(batch, family, name, pairs))
    return out


def by_chance(ratios: Sequence[float]) -> float:
    """Chance that paired ratios are as far from 1 as these if either side may be the faster one.

    A sign-flip test of the mean logarithm: exact up to 12 pairs. The bootstrap's interval is too
    narrow where there are few; this needs at least six pairs to call anything a change.

    >>> by_chance([1.1, 1.2, 1.1])
    0.25
    """
    logs = np.log(np.asarray(ratios, dtype=float))
    if len(logs) <= 12:
        signs = np.array(list(product((1, -1), repeat=len(logs))))
    else:
        coins = np.random.default_rng(0).integers(0, 2, (4096, len(logs)))
        signs = np.vstack([np.ones(len(logs), int), 2 * coins - 1])
    means = abs((signs * logs).mean(1))
    return float((means >= means[0] - 1e-12).mean())


def _change(
    batch: int, family: str, name: str, pairs: Sequence[tuple[dict[str, Sample], dict[str, Sample]]]
) -> Change:
    seconds = [_pace(a[name]) / _pace(b[name]) for a, b in pairs]
    plain = [_pace(a[PLAIN]) / _pace(b[PLAIN]) for a, b in pairs]
    # By what plain decoding did in the same run the machine cancels out.
    relative = seconds if name == PLAIN else [s / p for s, p in zip(seconds, plain, strict=True)]
    texts = [zip(a[name]["digest"], b[name]["digest"], strict=True) for a, b in pairs]
    same = [x == y for x, y in chain.from_iterable(texts)]
    judged, chance = geometric(relative), by_chance(relative)
    noise = chance >= LEVEL or judged["low"] <= 1 <= judged["high"]
    return {
        "batch": batch,
        "family": family,
        "method": name,
        "seconds": geometric(seconds),
        "speedup": None if name == PLAIN else judged,
        "same_text": statistics.fmean(same),
        "chance": chance,
        "verdict": "within noise" if noise else "faster" if judged["low"] > 1 else "slower",
    }


def _by_cell(keys: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, str, list[tuple[Any, ...]]]]:
    """Batch sizes and families, and `ALL`, with the keys of their groups."""
    every = list(keys)
    for batch in sorted({key[0] for key in every}):
        own = [key for key in every if key[0] == batch]
        for family in (*dict.fromkeys(key[1] for key in own), ALL):
            yield batch, family, [key for key in own if family in (key[1], ALL)]


def _groups(document: Document) -> dict[tuple[Any, ...], dict[str, Sample]]:
    """Samples of each group by method; only groups that have plain decoding."""
    out: dict[tuple[Any, ...], dict[str, Sample]] = {}
    for s in document["samples"]:
        out.setdefault((s["batch"], s["family"], *s["prompts"]), {})[s["method"]] = s
    return {key: group for key, group in out.items() if PLAIN in group}


def _pace(sample: Sample) -> float:
    return sample["seconds"] / max(sum(sample["tokens"]), 1)


def _cell(batch: int, family: str, method: str, pairs: Sequence[tuple[Sample, Sample]]) -> Cell:
    ratios = [_pace(plain) / _pace(mine) for plain, mine in pairs]
    own = [mine for _, mine in pairs]

    def total(name: str) -> int | None:
        counts = [s[name] for s in own if s[name] is not None]
        return sum(map(sum, counts)) if counts else None

    tokens, seconds = total("tokens") or 0, sum(s["seconds"] for s in own)
    rounds, drafted, accepted = total("rounds"), total("drafted"), total("accepted")
    first = [t for s in own for t in s["ttft"] or ()]
    same = [i for s in own for i in s["identical"] or ()]
    return {
        "batch": batch,
        "family": family,
        "method": method,
        "speedup": geometric(ratios),
        "ratios": ratios,
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1e3 * seconds * batch / max(tokens, 1),
        "ttft_ms": 1e3 * statistics.median(first) if first else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "acceptance": accepted / drafted if accepted is not None and drafted else None,
        "identical": statistics.fmean(same) if same else None,
    }


def render(document: Document, cells: list[Cell]) -> str:
    """The whole page."""
    text = json.dumps(shown(document, cells), ensure_ascii=False).replace("<", "\\u003c")
    page = files("forerun.lab.bench").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("RESULTS", text, 1)


def shown(document: Document, cells: list[Cell]) -> dict[str, Any]:
    """What the page shows of the results; everything but `samples`, and figures of these."""
    first = min(sample["batch"] for sample in document["samples"])
    lengths: dict[str, dict[str, int]] = {}
    for sample in document["samples"]:
        if sample["batch"] == first and sample["lengths"] and sample["method"] != PLAIN:
            counts = lengths.setdefault(sample["method"], {})
            for accepted, rounds in sample["lengths"].items():
                counts[accepted] = counts.get(accepted, 0) + rounds
    rivals = against(document, first).items()
    kept = {k: v for k, v in document.items() if k not in ("samples", "summary")}
    return kept | {
        "prompts": len({p for s in document["samples"] for p in s["prompts"]}),
        "cells": cells,
        "against": [{"method": a, "peer": b, **spread} for (a, b), spread in rivals],
        "lengths": lengths,
    }
