"""`forerun audit`: is speculative text the text of plain decoding?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.cli import options
from forerun.cli.console import count, note, one_line, stderr, stdout, table
from forerun.cli.options import SPECULATION, option
from forerun.cli.progress import progress
from forerun.cli.report import print_json
from forerun.errors import ModelError, UnknownNameError, require

if TYPE_CHECKING:
    from forerun import Model
    from forerun.cli.prompts import LabPrompt
    from forerun.cli.run import Job
    from forerun.lab.audit import Comparison
    from forerun.lab.peers import Peer

SCHEMA = 1
PEERS = ("transformers",)
FEW = 10
"""Shipped prompts of each family compared when nobody said which."""
AROUND = 16
"""Tokens of common text shown before a difference."""
ONWARD = 4
"""Tokens shown of how each goes on."""
COLOURS = {"near-tie": "yellow", "bug": "bold red", "differs": "red"}


def audit(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: Annotated[
        str | None, options.prompts("Default for the shipped target: builtin.")
    ] = None,
    split: options.Split = "test",
    limit: Annotated[
        int | None, options.limit(f"Default: all, or without --prompts {FEW}.")
    ] = None,
    max_new_tokens: options.OwnMaxNewTokens = None,
    controller: options.Controller = None,
    rule: Annotated[
        str, option("SPEC", "What to keep; a lossless rule.", panel=SPECULATION)
    ] = "standard",
    batch_size: Annotated[
        int,
        option(
            "B",
            "Also compare ragged batches of B prompts with each prompt alone; 1 does not.",
        ),
    ] = 8,
    peer: Annotated[
        str | None,
        option(
            "transformers",
            "Also compare generate of transformers, plain and assisted by the draft.",
        ),
    ] = None,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Compare speculative with plain greedy decoding, token by token.

    At each first difference the logits are recomputed in several shapes: it is a floating-point
    near-tie, or a bug. The exit code is 1 if there is a bug.
    """
    if peer is not None and peer not in PEERS:
        raise UnknownNameError.among("peer", peer, PEERS)
    require(batch_size >= 1, "batch size", batch_size, "≥ 1")

    from forerun.cli.prompts import find_prompts, given_or_shipped, tokenise
    from forerun.cli.run import Plan

    where = given_or_shipped(prompts, target)
    limit = FEW if prompts is None and limit is None else limit
    found = find_prompts(where, split, limit, max_new_tokens)

    from forerun.lab import audit as lab

    lab.check_lossless(rule)
    plan = Plan(
        target,
        draft,
        controller,
        rule,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    job, rows = plan.open(lambda reader: tokenise(reader, found))
    peers = _peers(job.model) if peer else []
    run = lab.audit(
        job.model,
        [row.ids for row in rows],
        [row.sampling for row in rows],
        controller=job.controller,
        rule=job.rule,
        batch_size=batch_size,
        peers=peers,
    )
    planned = lab.checks(batch_size, peers)
    done: list[Comparison] = []
    interrupted = False
    try:
        with progress("comparing", len(rows) * len(planned), "texts") as tell:
            for comparison in run:
                done.append(comparison)
                tell("comparing", len(done))
    except KeyboardInterrupt:
        interrupted = True
        note(stderr(), "interrupted; this is what was compared")
    if as_json:
        settings = {"prompts": where, "split": split, "limit": limit, "peer": peer}
        settings["max_new_tokens"] = max_new_tokens
        print_json(_document(job, rows, done, interrupted, settings))
    else:
        _show(job.model, rows, done, planned)
    if interrupted:
        raise KeyboardInterrupt
    if any(c.kind == "bug" for c in done):
        raise typer.Exit(1)


def _peers(model: Model) -> list[Peer]:
    """Those of transformers that can run; the others are named on stderr."""
    from forerun.lab.peers import transformers_peers

    able = []
    for peer in transformers_peers(model):
        reason = peer.available()
        if reason is None:
            able.append(peer)
        else:
            note(stderr(), f"{peer.name} is left out: {reason}")
    if not able:
        raise ModelError("no peer can run with this target; leave --peer out")
    return able


def summary(comparisons: Iterable[Comparison]) -> str:
    """`n of m identical, k near-ties, b bugs`, and what peers differ in if they do.

    >>> summary([])
    '0 of 0 identical, 0 near-ties, 0 bugs'
    """
    n = _counts(list(comparisons))
    line = f"{n['identical']:,} of {n['compared']:,} identical"
    line += f", {count(n['near_ties'], 'near-tie')}, {count(n['bugs'], 'bug')}"
    return line + (f", {n['differ']:,} of a peer differ" if n["differ"] else "")


def _show(
    model: Model,
    rows: Sequence[LabPrompt],
    done: list[Comparison],
    planned: Sequence[tuple[str, str]],
) -> None:
    console = stdout()
    for comparison in done:
        if comparison.difference is not None:
            for line in _difference(model, rows, comparison):
                console.print(line, soft_wrap=True)
            console.print()
    counted = ["compared", "identical", "near-ties", "bugs"]
    if any(c.kind == "differs" for c in done):
        counted.append("differ")
    shown = table("check", "against", right=counted)
    for check, against in planned:
        n = _counts([c for c in done if (c.check, c.against) == (check, against)])
        shown.add_row(check, against, *(f"{n[name.replace('-', '_')]:,}" for name in counted))
    console.print(shown)
    bugs = any(c.kind == "bug" for c in done)
    console.print()
    note(console, Text(summary(done), "bold red" if bugs else "bold"))


def _difference(model: Model, rows: Sequence[LabPrompt], comparison: Comparison) -> Iterator[Text]:
    """Four lines: what, the common text, and how each goes on."""
    row, told = rows[comparison.prompt], comparison.difference
    assert told is not None
    kind = comparison.kind.value
    yield Text.assemble(
        (kind, COLOURS[kind]),
        f"  {row.id}: {comparison.check} leaves {comparison.against} at output token "
        f"{told.position} ({told.reason})",
    )
    common, ways = _around(model, row, comparison)
    yield Text.assemble(("  … ", "dim"), (one_line(common), "dim"))
    width = max(len(comparison.check), len(comparison.against))
    for name, way in zip((comparison.against, comparison.check), ways[::-1], strict=True):
        yield Text.assemble((f"    {name:<{width}}  ", "dim"), one_line(way) or "(end)")


def _around(model: Model, row: LabPrompt, comparison: Comparison) -> tuple[str, tuple[str, str]]:
    """The common text before a difference, and how each of the two goes on."""
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


def _document(
    job: Job,
    rows: Sequence[LabPrompt],
    done: list[Comparison],
    interrupted: bool,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The JSON document; `outputs` stand with differences only."""
    from forerun.cli.report import versions

    return {
        "schema": SCHEMA,
        "complete": not interrupted,
        "summary": summary(done),
        **_counts(done),
        "checks": _by_check(done),
        "differences": [_told(job.model, rows, c) for c in done if c.difference is not None],
        "settings": {**job.about, **settings},
        "versions": versions(),
    }


def _counts(done: Sequence[Comparison]) -> dict[str, int]:
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
            **_counts([c for c in done if (c.check, c.against) == (check, against)]),
        }
        for check, against in pairs
    ]


def _told(model: Model, rows: Sequence[LabPrompt], comparison: Comparison) -> dict[str, Any]:
    assert comparison.difference is not None
    row = rows[comparison.prompt]
    common, ways = _around(model, row, comparison)
    return {
        "family": row.family,
        "id": row.id,
        "check": comparison.check,
        "against": comparison.against,
        "kind": comparison.kind.value,
        **comparison.difference.to_json(),
        "reason": comparison.difference.reason,
        "text": {"before": common, "onward": list(ways)},
        "outputs": [list(output) for output in comparison.outputs],
    }
