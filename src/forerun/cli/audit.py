"""`forerun audit`: is speculative text the text of plain decoding?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import note, one_line, stderr, stdout, table
from forerun.cli.shared.models import Chat, Models
from forerun.cli.shared.options import SAMPLING, SPECULATION, Fields, option
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import print_json
from forerun.errors import ModelError, SettingError, UnknownNameError, require

if TYPE_CHECKING:
    from forerun import Model
    from forerun.cli.shared.models import Job
    from forerun.lab.audit import Comparison
    from forerun.lab.bench.peers import Peer
    from forerun.prompts import Prompt

PEERS = ("transformers",)  # choices of --peer
TRANSFORMERS = (
    "transformers",
    "transformers-assisted(constant,5)",
    "transformers-assisted(heuristic,5)",
)
"""What is compared: plain, and assisted with a fixed and a varying length."""
SHIPPED_LIMIT = 10
"""Shipped prompts of each family compared by default."""
SERVERS = "A server instead of a model"
COLOURS = {"near-tie": "yellow", "bug": "bold red", "differs": "red"}


@options.command
def audit(
    models: Annotated[Models, Fields(Models)],
    chat: Annotated[Chat, Fields(Chat)],
    prompts: Annotated[
        str | None, options.prompts("Default for the shipped target: builtin.")
    ] = None,
    split: options.Split = "test",
    limit: Annotated[
        int | None, options.limit(f"Default: all, or without --prompts {SHIPPED_LIMIT}.")
    ] = None,
    max_new_tokens: options.OwnMaxNewTokens = None,
    controller: options.Controller = None,
    rule: Annotated[
        str, option("SPEC", "What to keep; a lossless rule.", panel=SPECULATION)
    ] = "gumbel",
    temperature: Annotated[
        float,
        option(
            "T",
            "Above 0 prompt i draws by the noise of seed i, drafted or not; rule gumbel only.",
            panel=SAMPLING,
        ),
    ] = 0.0,
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
    precision: Annotated[
        str | None,
        option(
            "bf16|int8",
            "Instead, compare plain texts in this precision with those in float32: how often they "
            "differ, and how close the two best tokens were there. int8 needs --runtime openvino.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        option(
            "URL",
            "Instead, audit an OpenAI-compatible server by its log-probabilities (key: "
            "OPENAI_API_KEY): greedy texts with speculation against those without.",
            panel=SERVERS,
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(
            "URL",
            "The server of the same model without speculation. Default: the same one, if it is "
            "forerun's.",
            panel=SERVERS,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare speculative with plain decoding, token by token.

    At each first difference the logits are recomputed in several shapes: it is a floating-point
    near-tie, or a bug. The exit code is 1 if there is a bug.
    """
    if peer is not None and peer not in PEERS:
        raise UnknownNameError.among("peer", peer, PEERS)
    require(batch_size >= 1, "batch size", batch_size, "≥ 1")

    from forerun.prompts import default_source, find_prompts, seeded
    from forerun.settings import Settings

    if server is not None or against is not None:
        _audit_server(server, against, prompts, split, limit, max_new_tokens, as_json)
        return
    _check_temperature(temperature, rule, peer or precision)
    where = default_source(prompts, models.target)
    common: dict[str, Any] = {"temperature": temperature}
    limit = SHIPPED_LIMIT if prompts is None and limit is None else limit
    chosen = seeded(find_prompts(where, split, limit, max_new_tokens), 0)

    if precision is not None:
        from forerun.cli.audit_precision import precision_audit

        settings = {"prompts": where, "split": split, "limit": limit}
        settings["max_new_tokens"] = max_new_tokens
        precision_audit(models, precision, chosen, chat, settings, as_json)
        return

    from forerun.lab import audit as lab
    from forerun.lab.audit_report import document

    lab.check_lossless(rule)
    how = Settings(controller, rule)
    job, rows = models.open(chosen, common, how, batch_size, chat=chat)
    for row in rows if peer else ():
        lab.check_common(replace(row.sampling, temperature=0.0))  # as it is audited then
    with ExitStack() as stack:
        peers = _peers(stack, job, models) if peer else []
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
        done, interrupted = _collected(run, len(rows) * len(planned))
    if as_json:
        settings = {"prompts": where, "split": split, "limit": limit, "peer": peer}
        settings = {**job.about, **settings, "max_new_tokens": max_new_tokens, **common}
        print_json(document(job.model, rows, done, not interrupted, settings))
    else:
        _show(job.model, rows, done, planned)
    if interrupted:
        raise KeyboardInterrupt
    if any(c.kind == "bug" for c in done):
        raise typer.Exit(1)


def _audit_server(
    server: str | None,
    against: str | None,
    source: str | None,
    split: str,
    limit: int | None,
    cap: int | None,
    as_json: bool,
) -> None:
    """Audit a server on prompts that need no model here."""
    from forerun.cli.audit_server import server_audit
    from forerun.prompts import default_source, find_prompts

    if server is None:
        raise SettingError("--against needs --server URL")
    where = default_source(source, None)
    limit = SHIPPED_LIMIT if source is None and limit is None else limit
    chosen = find_prompts(where, split, limit, cap, penalised=False)
    settings = {"prompts": where, "split": split, "limit": limit, "max_new_tokens": cap}
    server_audit(server, against, chosen, settings, as_json)


def _check_temperature(temperature: float, rule: str, greedy: str | None) -> None:
    """Refuse to sample where `greedy` texts are compared, or texts that coins decide."""
    from forerun.rules import RULES

    options.sampling({"temperature": temperature})
    if temperature and greedy:
        raise SettingError(f"{greedy} is audited greedily; leave it or --temperature out")
    if temperature and not RULES.make(rule).gumbel_max:
        raise SettingError(f"rule {rule!r} tosses coins, so that texts differ; audit it greedily")


def _collected(run: Iterator[Comparison], total: int) -> tuple[list[Comparison], bool]:
    """What was compared, and whether that was interrupted."""
    done: list[Comparison] = []
    try:
        with progress("comparing", total, "texts") as tell:
            for comparison in run:
                done.append(comparison)
                tell("comparing", len(done))
    except KeyboardInterrupt:
        note(stderr(), "interrupted; this is what was compared")
        return done, True
    return done, False


def _peers(stack: ExitStack, job: Job, models: Models) -> list[Peer]:
    """Those of transformers that can run; the others are named on stderr."""
    from forerun.cli.shared.bench_inputs import model_paths
    from forerun.lab.bench.peers import PipedPeer, named, opening

    able: list[Peer] = []
    first = opening(job.model, *model_paths(job, models.target, models.draft))
    for command in [one for name in TRANSFORMERS for one in named(name, {})]:
        peer = PipedPeer(command, first)
        stack.callback(peer.close)
        reason = peer.start()
        if reason is None:
            able.append(peer)
        else:
            note(stderr(), f"{command.label} is left out: {reason}")
    if not able:
        raise ModelError("no peer can run with this target; leave --peer out")
    return able


def _show(
    model: Model,
    rows: Sequence[Prompt],
    done: list[Comparison],
    planned: Sequence[tuple[str, str]],
) -> None:
    from forerun.lab.audit_report import counts, summary

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
        n = counts([c for c in done if (c.check, c.against) == (check, against)])
        shown.add_row(check, against, *(f"{n[name.replace('-', '_')]:,}" for name in counted))
    console.print(shown)
    bugs = any(c.kind == "bug" for c in done)
    console.print()
    note(console, Text(summary(done), "bold red" if bugs else "bold"))


def _difference(model: Model, rows: Sequence[Prompt], comparison: Comparison) -> Iterator[Text]:
    """Four lines: the kind, the common text, and the two continuations."""
    from forerun.lab.audit_report import around

    row, difference = rows[comparison.prompt], comparison.difference
    assert difference is not None
    kind = comparison.kind.value
    yield Text.assemble(
        (kind, COLOURS[kind]),
        f"  {row.id}: {comparison.check} leaves {comparison.against} at output token "
        f"{difference.position} ({difference.reason})",
    )
    common, continuations = around(model, row, comparison)
    yield Text.assemble(("  … ", "dim"), (one_line(common), "dim"))
    width = max(len(comparison.check), len(comparison.against))
    for name, text in zip((comparison.against, comparison.check), continuations[::-1], strict=True):
        yield Text.assemble((f"    {name:<{width}}  ", "dim"), one_line(text) or "(end)")
