"""`forerun bench`: measure methods and peers side by side, and compare two measurements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.cli import options
from forerun.cli.bench_inputs import (
    check_parts,
    draft_identity,
    find_all,
    make_tasks,
    model_name,
    our_methods,
    read_pythons,
    read_recorded,
    read_sizes,
    split_names,
    their_methods,
)
from forerun.cli.console import note, status, stderr, stdout, table
from forerun.cli.options import OUTPUT, PROMPTS, SAMPLING, flag, option
from forerun.cli.progress import progress
from forerun.cli.report import print_json
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.lab.bench import Results
    from forerun.lab.report import Cell, Change, Document

SCHEMA = 1
PAGE = "report.html"
FIXED = "fixed(5)"
DRIFT = 0.05
"""Plain decoding changed by more than this says that the machine did."""
METHODS = "What is compared"
ORACLE = "Share of the oracle"

app = typer.Typer(
    help="Measure methods and other implementations side by side; writes a report.",
    no_args_is_help=False,
)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    output: Annotated[
        str | None,
        options.output(
            "DIR",
            "Folder for results.json, report.html and the plots. With the results of an "
            "interrupted run of the same settings in it, that run goes on.",
        ),
    ] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    controllers: Annotated[
        str | None,
        option(
            "SPEC;SPEC...",
            f"Length controllers. Default: that of generate, and {FIXED}.",
            panel=METHODS,
        ),
    ] = None,
    rules: Annotated[
        str,
        option("SPEC;SPEC...", "Acceptance rules, each with every controller.", panel=METHODS),
    ] = "standard",
    peers: Annotated[
        str,
        option(
            "NAME,NAME...",
            "transformers, transformers-assisted, transformers-early-exit(layer=4), vllm, "
            "vllm-draft(tokens=5), with settings if you like. Greedy; one that is missing is "
            "skipped and the report says why.",
            panel=METHODS,
        ),
    ] = "",
    peer_python: Annotated[
        list[str] | None,
        option(
            "vllm=PATH",
            "The Python of a peer that has an environment of its own.",
            panel=METHODS,
        ),
    ] = None,
    batch: Annotated[
        str,
        option(
            "B,B...",
            "Texts decoded together; several sizes are measured one after another.",
            panel=METHODS,
        ),
    ] = "1",
    families: Annotated[
        str,
        option("NAME,NAME...", "Families of the prompts, or all.", panel=PROMPTS),
    ] = "all",
    prompt_file: Annotated[
        str | None,
        option(
            "FILE",
            "Your own prompts instead of the shipped ones, as for generate; - reads stdin. Of a "
            "line's settings max_new_tokens and repetition_penalty count.",
            panel=PROMPTS,
        ),
    ] = None,
    prompts: Annotated[int, options.limit()] = 20,
    split: options.Split = "test",
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: Annotated[
        float,
        option(
            "T",
            "0 is greedy. Above, texts go on after their end, so that all are of one length.",
            panel=SAMPLING,
        ),
    ] = 0.0,
    seed: Annotated[int, option("S", "Of sampled texts.", panel=SAMPLING)] = 0,
    trace: Annotated[
        str | None,
        option(
            "TRACE",
            "A trace of forerun record: adds the controllers' share of what is possible.",
            panel=ORACLE,
        ),
    ] = None,
    costs: Annotated[
        str | None, option("COSTS", "Costs of forerun costs, for --trace.", panel=ORACLE)
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print the summary as one JSON document.", OUTPUT)
    ] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure methods and other implementations side by side, prompt by prompt.

    Every prompt is written by all methods in turn, plain decoding among them, in an order that
    rotates. Interrupted, it keeps what is complete, and the same command goes on.
    """
    if context.invoked_subcommand is not None:
        return
    if output is None:
        raise SettingError("no folder for the results; give -o DIR")
    folder = Path(output)
    require(not folder.exists() or folder.is_dir(), "-o", output, "a folder")
    require((trace is None) == (costs is None), "--trace", trace, "given together with --costs")
    require(prompts >= 1, "prompts", prompts, "≥ 1")
    sizes = read_sizes(batch)
    found = find_all(families, prompt_file, split, prompts, max_new_tokens)
    pythons = read_pythons(peer_python or [])

    from forerun.lab import bench as lab
    from forerun.lab.methods import groups
    from forerun.lab.peer_names import check
    from forerun.lab.plots import require_matplotlib
    from forerun.model import DEFAULT_CONTROLLER

    require_matplotlib()
    recorded = read_recorded(trace, costs)
    specs = [check(name, pythons) for name in split_names(peers, ",")]
    lengths = split_names(controllers or f"{DEFAULT_CONTROLLER};{FIXED}", ";")
    keeps = split_names(rules, ";")
    check_parts(lengths, keeps, temperature)

    from forerun.cli.prompts import tokenise
    from forerun.cli.run import Plan
    from forerun.lab.provenance import identity, machine

    plan = Plan(
        target,
        draft,
        lengths[0],
        keeps[0],
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    job, chosen = plan.open(lambda reader: tokenise(reader, found))
    tasks = make_tasks(chosen, seed)
    work = groups(tasks, sizes)
    settings = {
        "target": model_name(job.about["target"]),
        "draft": model_name(job.about["draft"]),
        "controllers": lengths,
        "rules": keeps,
        "peers": [str(s) for s in specs],
        "families": list(dict.fromkeys(t.family for t in tasks)),
        "prompts_per_family": prompts,
        "split": None if prompt_file else split,
        "batch": sizes,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "device": job.about["device"],
        "dtype": job.about["dtype"],
    }
    made = machine(job.model.target) | {
        "target": identity(job.model.target),
        "draft": draft_identity(job),
    }
    ours = our_methods(job, lengths, keeps, temperature)
    with ExitStack() as stack:
        theirs, skipped = their_methods(stack, job, specs, pythons, target, draft, temperature)
        methods = [*ours, *theirs]
        results = lab.Results.open(folder, settings, made, methods, skipped)
        for skip in results.document["skipped"]:
            note(stderr(), f"skipped {skip['name']}: {skip['reason']}")
        try:
            with progress("measuring", unit="runs") as tell:
                told = partial(tell, "measuring")
                lab.measure(results, work, methods, greedy=temperature == 0, tell=told)
        except KeyboardInterrupt:
            _finish(results)
            note(stderr(), "interrupted; the same command goes on from here")
            raise
    if recorded is not None:
        _add_shares(results, recorded, lengths)
    cells = _finish(results)
    if as_json:
        print_json(_summary(results.document, cells))
    else:
        _show(results.document, cells)
        note(stderr(), f"report: {folder / PAGE}")


@app.command("compare")
def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="Results: a folder or its file.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Those to compare with.")],
    as_json: options.Json = False,
) -> None:
    """Say what changed from A to B, and which changes are beyond noise.

    Pairs the prompts and methods both have. Judged is the speed-up over plain decoding of the same
    run, so that a machine that was busier in one of them does not count.
    """
    from forerun.lab.bench import load
    from forerun.lab.report import compare as changes

    found = changes(load(before), load(after))
    if not found:
        raise SettingError("the two results share no prompts measured by the same method")
    if as_json:
        print_json({"schema": SCHEMA, "cells": [c.to_json() for c in found]})
        return
    _show_changes(found)


def _add_shares(results: Results, recorded: tuple[Any, Any], lengths: Sequence[str]) -> None:
    """Put the controllers' shares of what is possible into the results."""
    from forerun.lab.shares import shares

    with status("replaying") as tell:
        results.document["shares"] = shares(*recorded, lengths, tell)


def _finish(results: Results) -> list[Cell]:
    """Write the report and the plots of what there is."""
    from forerun.lab import page, plots, report

    document = results.document
    cells = report.cells(document)
    document["summary"] = [c.to_json() for c in cells]
    results.write()
    if not cells:
        return cells
    with status("drawing"):
        drawn = plots.draw(document, cells)
        for plot in drawn:
            plot.png(results.folder)
        text = page.render(document, cells, drawn)
    (results.folder / PAGE).write_text(text, encoding="utf-8")
    return cells


def _summary(document: Document, cells: Sequence[Cell]) -> dict[str, Any]:
    return {k: v for k, v in document.items() if k != "samples"} | {
        "summary": [c.to_json() for c in cells]
    }


def _show(document: Document, cells: Sequence[Cell]) -> None:
    """The result over all families, for people."""
    from forerun.lab.report import ALL, show

    console = stdout()
    shown = table("method", right=("batch", "speed-up over plain", "tokens/s", "identical"))
    for c in cells:
        if c.family == ALL:
            speed = "1" if c.method == "plain" else show(c.speedup)
            same = "–" if c.identical is None else f"{c.identical * 100:.0f} %"
            shown.add_row(c.method, str(c.batch), speed, f"{c.tokens_per_second:,.0f}", same)
    console.print(shown)


def _show_changes(found: Sequence[Change]) -> None:
    from forerun.lab.report import ALL, LEVEL, show

    console = stdout()
    several = len({c.batch for c in found}) > 1
    right = ("time, A/B", "speed-up, B/A", "B is")
    shown = table("method", "family", *(["batch"] if several else []), right=right, no_wrap=True)
    styles = {"faster": "green", "slower": "red", "within noise": "dim"}
    for c in found:
        size = [str(c.batch)] if several else []
        relative = "–" if c.speedup is None else show(c.speedup)
        verdict = Text(c.verdict, styles[c.verdict])
        shown.add_row(c.method, c.family, *size, show(c.seconds), relative, verdict)
    console.print(shown)
    beyond = sum(c.verdict != "within noise" for c in found)
    note(
        console,
        f"\n{beyond} of {len(found)} cells beyond noise; by chance alone up to about "
        f"{len(found) * LEVEL:.1f} would be",
    )
    for c in found:
        if c.speedup is None and c.family == ALL and abs(c.seconds["mean"] - 1) > DRIFT:
            at = f" at batch {c.batch}" if several else ""
            note(
                console,
                f"plain decoding itself took {1 / c.seconds['mean']:.2f} times as long in B{at}: "
                "the machine was in another state, measure again before you trust small changes",
            )
    for c in found:
        if c.family == ALL and c.same_text < 1:
            share = f"{(1 - c.same_text) * 100:.0f} %"
            note(console, f"{c.method} wrote other texts in B for {share} of the prompts")
