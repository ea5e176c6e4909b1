"""`forerun audit`: is speculative text the text of plain decoding?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.console import note, one_line, stderr, stdout
from forerun.errors import ModelError, SettingError, UnknownNameError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun import Model
    from forerun.cli.prompts import LabPrompt
    from forerun.cli.run import Job
    from forerun.lab.audit import Comparison
    from forerun.lab.peers import Peer

SCHEMA = 1
PEERS = ("transformers",)
FEW = 60
"""Shipped prompts compared when nobody said which."""
AROUND = 16
"""Tokens of common text shown before a difference."""
ONWARD = 4
"""Tokens shown of how each goes on."""
COLOURS = {"near-tie": "yellow", "bug": "bold red", "differs": "red"}


def audit(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A folder or a Hugging Face id. Default: the shipped one.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH|SPEC",
            help="Who runs ahead: a smaller model, or a drafter like lookup(n=3). Default: the "
            "shipped draft for the shipped target, lookup for others.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|builtin:FAMILY|builtin:all",
            help="A file as for generate --prompt-file (- reads stdin), or shipped prompts. "
            f"Default for the shipped target: {FEW} of builtin:all.",
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="test|val", help="Which of the shipped prompts.")
    ] = "test",
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only the first N prompts, all families in turn."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Most tokens per prompt. Default: as the prompt says, or 128."
        ),
    ] = None,
    controller: Annotated[
        str,
        typer.Option(metavar="SPEC", help="How far to run ahead, like gammatune(eta=0.3)."),
    ] = "gammatune+",
    rule: Annotated[
        str, typer.Option(metavar="SPEC", help="What to keep; a lossless rule.")
    ] = "standard",
    batch_size: Annotated[
        int,
        typer.Option(
            metavar="B",
            help="Also compare ragged batches of B prompts with each prompt alone; 1 does not.",
        ),
    ] = 8,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="transformers",
            help="Also compare generate of transformers, plain and assisted by the draft.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print one JSON document and nothing else."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="D", help="cpu, cuda, cuda:1, ... Default: a GPU if any."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="auto, float32, bfloat16 or float16. Default: as the model was saved.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", metavar="", help="Run code that comes with a checkpoint."
        ),
    ] = False,
) -> None:
    """Compare speculative with plain greedy decoding, token by token.

    At each first difference the logits are recomputed in several shapes: it is a floating-point
    near-tie, or a bug. The exit code is 1 if there is a bug.
    """
    if prompts is None:
        if target is not None:
            raise SettingError(
                "no prompts; give --prompts FILE with prompts of your task, or "
                "--prompts builtin:all"
            )
        prompts, limit = "builtin:all", limit or FEW
    if peer is not None and peer not in PEERS:
        raise UnknownNameError.among("peer", peer, PEERS)
    require(batch_size >= 1, "batch size", batch_size, "≥ 1")

    from forerun.cli.prompts import find_prompts, tokenise
    from forerun.cli.run import load_job

    found = find_prompts(prompts, split, limit, max_new_tokens)

    from forerun.lab import audit as lab

    lab.check_lossless(rule)
    job = load_job(
        target,
        draft,
        controller,
        rule,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    rows = tokenise(job.model, found)
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
        with _progress(len(rows) * len(planned)) as advance:
            for comparison in run:
                done.append(comparison)
                advance()
    except KeyboardInterrupt:
        interrupted = True
        note(stderr(), "interrupted; this is what was compared")
    if as_json:
        settings = {"prompts": prompts, "split": split, "limit": limit, "peer": peer}
        settings["max_new_tokens"] = max_new_tokens
        print(_document(job, rows, done, interrupted, settings))
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
    line += f", {_count(n['near_ties'], 'near-tie')}, {_count(n['bugs'], 'bug')}"
    return line + (f", {n['differ']:,} of a peer differ" if n["differ"] else "")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("check", "against"):
        table.add_column(name, header_style="dim", overflow="fold")
    for name in ("compared", "identical", "near-ties", "bugs"):
        table.add_column(name, header_style="dim", justify="right")
    shown = ["compared", "identical", "near_ties", "bugs"]
    if any(c.kind == "differs" for c in done):
        table.add_column("differ", header_style="dim", justify="right")
        shown.append("differ")
    for check, against in planned:
        n = _counts([c for c in done if (c.check, c.against) == (check, against)])
        table.add_row(check, against, *(f"{n[name]:,}" for name in shown))
    console.print(table)
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
) -> str:
    """The JSON document; `outputs` stand with differences only."""
    from forerun.cli.report import versions

    document = {
        "schema": SCHEMA,
        "complete": not interrupted,
        "summary": summary(done),
        **_counts(done),
        "checks": _by_check(done),
        "differences": [_told(job.model, rows, c) for c in done if c.difference is not None],
        "settings": {**job.about, **settings},
        "versions": versions(),
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)


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


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on terminals only."""
    from rich import progress as bars

    console = stderr()
    bar = bars.Progress(
        bars.TextColumn("comparing {task.completed}/{task.total}"),
        bars.BarColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    task = bar.add_task("comparing", total=total)
    with bar:
        yield lambda: bar.advance(task)
