"""Results of an audit: counts, a line, and the document with every difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forerun.lab.audit import Comparison
from forerun.lab.provenance import versions
from forerun.model import Model
from forerun.prompts import Prompt

SCHEMA = 1
AROUND = 16
"""Tokens of common text shown before a difference."""
ONWARD = 4
"""Tokens shown of each continuation."""


def summary(comparisons: Iterable[Comparison]) -> str:
    """`n of m identical, k near-ties, b bugs`, and the peers' differences if there are any.

    >>> summary([])
    '0 of 0 identical, 0 near-ties, 0 bugs'
    """
    n = counts(list(comparisons))
    line = f"{n['identical']:,} of {n['compared']:,} identical"
    line += f", {_count(n['near_ties'], 'near-tie')}, {_count(n['bugs'], 'bug')}"
    return line + (f", {n['differ']:,} of a peer differ" if n["differ"] else "")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def around(model: Model, row: Prompt, comparison: Comparison) -> tuple[str, tuple[str, str]]:
    """The common text before a difference, and the two continuations."""
    assert comparison.difference is not None
    at = comparison.difference.position
    before = [*row.ids, *comparison.outputs[0][:at]][-AROUND:]
    common = _decode(model, before)
    onward = [_decode(model, output[at : at + ONWARD]) for output in comparison.outputs]
    return common, (onward[0], onward[1])


def _decode(model: Model, ids: list[int]) -> str:
    if model.tokenizer is None:
        return " ".join(map(str, ids))
    return str(model.tokenizer.decode(ids))


def document(
    model: Model,
    rows: Sequence[Prompt],
    done: Sequence[Comparison],
    complete: bool,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON document; `outputs` stand with differences only.

    Args:
        model: its tokenizer decodes the tokens.
        rows: the prompts, in their order.
        done: the comparisons made.
        complete: whether these are all.
        settings: how they were made.
    """
    return {
        "schema": SCHEMA,
        "complete": complete,
        "summary": summary(done),
        **counts(done),
        "checks": _by_check(done),
        "differences": [_described(model, rows, c) for c in done if c.difference is not None],
        "settings": dict(settings),
        "versions": versions(),
    }


def counts(done: Sequence[Comparison]) -> dict[str, int]:
    """How many comparisons there are of each kind."""
    kinds = Counter(str(c.kind) for c in done)
    return {
        "compared": kinds.total(),
        "identical": kinds["identical"],
        "near_ties": kinds["near-tie"],
        "bugs": kinds["bug"],
        "differ": kinds["differs"],
    }


def _by_check(done: Sequence[Comparison]) -> list[dict[str, Any]]:
    pairs = dict.fromkeys((c.check, c.against) for c in done)
    return [
        {
            "check": check,
            "against": against,
            **counts([c for c in done if (c.check, c.against) == (check, against)]),
        }
        for check, against in pairs
    ]


def _described(model: Model, rows: Sequence[Prompt], comparison: Comparison) -> dict[str, Any]:
    assert comparison.difference is not None
    row = rows[comparison.prompt]
    common, onward = around(model, row, comparison)
    return {
        "family": row.family,
        "id": row.id,
        "check": comparison.check,
        "against": comparison.against,
        "kind": comparison.kind.value,
        **comparison.difference.to_json(),
        "reason": comparison.difference.reason,
        "text": {"before": common, "onward": list(onward)},
        "outputs": [list(output) for output in comparison.outputs],
    }
