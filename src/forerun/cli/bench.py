"""`forerun bench`: measure methods and peers side by side, and compare two measurements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.bench_compare import compare
from forerun.cli.shared import options
from forerun.cli.shared.bench_inputs import (
    Compared,
    bench_prompts,
    draft_identity,
    make_tasks,
    model_name,
    our_methods,
    read_peers,
    read_pythons,
    read_recorded,
    read_sizes,
    their_methods,
)
from forerun.cli.shared.console import note, status, stderr, stdout, table
from forerun.cli.shared.models import Chat, Models
from forerun.cli.shared.options import OUTPUT, PROMPTS, SAMPLING, Fields, flag, option
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import hold_output, print_json
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.cli.shared.models import Job
    from forerun.lab.bench.bench import Results
    from forerun.lab.bench.methods import Group
    from forerun.lab.bench.report import Cell, Document
    from forerun.prompts import Prompt

FIXED = "fixed(5)"  # measured beside the default controller
METHODS = "What is compared"  # panel of the help text, as the next
ORACLE = "Share of the oracle"

app = typer.Typer(
    help="Measure methods and other implementations side by side; writes a report.",
    no_args_is_help=False,
)


@app.callback(invoke_without_command=True)
@options.command
def bench(
    context: typer.Context,
    models: Annotated[Models, Fields(Models)],
    chat: Annotated[Chat, Fields(Chat)],
    output: Annotated[
        str | None,
        options.output(
            "DIR",
            "Folder for results.json and report.html, with plots. With the results of an "
            "interrupted run of the same settings in it, that run goes on.",
        ),
    ] = None,
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
    ] = "gumbel",
    peers: Annotated[
        str,
        option(
            "NAME,NAME...",
            "Peers that forerun's repository has runners for (benchmarks/peers): transformers, "
            "transformers-assisted, transformers-early-exit(layer=4), vllm, openvino-genai, "
            "llama-cpp, of these three with -draft (tokens=5), openvino-genai-lookup, "
            "llama-cpp-ngram; (gguf=FILE): as their users run them. Greedy; one that is missing "
            "is skipped and the report says why.",
            panel=METHODS,
        ),
    ] = "",
    peer: Annotated[
        list[str] | None,
        option(
            "COMMAND",
            "Any other implementation: a program that speaks JSON lines (docs/lab.md); may be "
            "given several times.",
            panel=METHODS,
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        option(
            "vllm=PATH",
            "The Python of one of --peers that has an environment of its own.",
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
            "Your own prompts instead of the shipped ones, as for generate, or conversations "
            "(turns), also in Spec-Bench's format; - reads stdin. Of a line's settings "
            "max_new_tokens and repetition_penalty count.",
            panel=PROMPTS,
        ),
    ] = None,
    skip_long: Annotated[
        bool,
        flag("--skip-long", "Leave out prompts that do not fit the context.", PROMPTS),
    ] = False,
    prompts: Annotated[int, options.limit()] = 20,
    split: options.Split = "test",
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: Annotated[
        float,
        option(
            "T",
            "0 is greedy. Above, where a rule tosses coins, texts go on after their end, so that "
            "all are of one length.",
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
) -> None:
    """Measure methods and other implementations side by side, prompt by prompt.

    Every prompt is written by all methods in turn, plain decoding among them, in an order
    drawn anew. Interrupted, it keeps what is complete, and the same command goes on.
    """
    if context.invoked_subcommand is not None:
        return
    if output is None:
        raise SettingError("no folder for the results; give -o DIR")
    folder = Path(output)
    require(not folder.exists() or folder.is_dir(), "-o", output, "a folder")
    hold_output(output)
    require((trace is None) == (costs is None), "--trace", trace, "given together with --costs")
    require(prompts >= 1, "prompts", prompts, "≥ 1")
    sizes = read_sizes(batch)
    requested = bench_prompts(families, prompt_file, split, prompts, max_new_tokens, models.target)
    pythons = read_pythons(peer_python or [])

    from forerun.lab.bench.methods import groups
    from forerun.lab.bench.page import PAGE
    from forerun.model import DEFAULT_CONTROLLER

    recorded = read_recorded(trace, costs)
    compared = Compared.read(
        controllers or f"{DEFAULT_CONTROLLER};{FIXED}",
        rules,
        read_peers(peers, pythons, peer or []),
        temperature,
    )

    job, chosen = _open(models, requested, chat, skip_long)
    settings = {
        "target": model_name(job.about["target"]),
        "draft": model_name(job.about["draft"]),
        **compared.to_json(),
        "families": list(dict.fromkeys(prompt.family for prompt in chosen)),
        "prompts_per_family": prompts,
        "split": None if prompt_file else split,
        "chat": job.about["chat"],
        "batch": sizes,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        **{name: job.about[name] for name in ("device", "dtype", "runtime")},
    }
    work = groups(make_tasks(chosen, seed, compared), sizes)
    results = _measure(models, job, compared, work, folder, settings)
    if recorded is not None:
        _add_shares(results, recorded, compared.controllers)
    cells = _finish(results)
    if as_json:
        return print_json(results.summary(cells))
    _show(results.document, cells)
    note(stderr(), f"report: {folder / PAGE}")


app.command("compare")(compare)


def _open(
    models: Models, requested: Sequence[Prompt], chat: Chat, skip_long: bool
) -> tuple[Job, list[Prompt]]:
    """The models, and the prompts of all turns."""
    from forerun.prompts import unroll

    job, chosen = models.open(requested, chat=chat, turns=True, skip_long=skip_long)
    if left := len(requested) - len(chosen):
        note(stderr(), f"left out {left} of {len(requested)} prompts: longer than the context")
    if any(prompt.later for prompt in chosen):
        with status("answering the first turns"):
            chosen = unroll(job.model, job.reader, chosen)
    return job, chosen


def _measure(
    models: Models,
    job: Job,
    compared: Compared,
    work: Sequence[Group],
    folder: Path,
    settings: dict[str, Any],
) -> Results:
    """Measure what is not measured yet; interrupted, the report of what there is is written."""
    from forerun.lab.bench import bench as lab
    from forerun.lab.provenance import identity, machine

    target = job.model.target
    provenance = machine(target) | {"target": identity(target), "draft": draft_identity(job)}
    with ExitStack() as stack:
        theirs, skipped = their_methods(stack, job, compared, models.target, models.draft)
        methods = [*our_methods(job, compared), *theirs]
        results = lab.Results.open(folder, settings, provenance, methods, skipped)
        for skip in results.document["skipped"]:
            note(stderr(), f"skipped {skip['name']}: {skip['reason']}")
        try:
            with progress("measuring", unit="runs") as tell:
                advance = partial(tell, "measuring")
                lab.measure(results, work, methods, tell=advance)
        except KeyboardInterrupt:
            _finish(results)
            note(stderr(), "interrupted; the same command goes on from here")
            raise
    return results


def _add_shares(results: Results, recorded: tuple[Any, Any], lengths: Sequence[str]) -> None:
    """Put the controllers' shares of what is possible into the results."""
    from forerun.lab.bounds.shares import shares

    with status("replaying") as tell:
        results.document["shares"] = shares(*recorded, lengths, tell)


def _finish(results: Results) -> list[Cell]:
    """Write the report of what there is."""
    from forerun.lab.bench import page

    with status("drawing"):
        return page.write(results)


def _show(document: Document, cells: Sequence[Cell]) -> None:
    """The result over all families, for people."""
    from forerun.lab.bench.report import ALL, show

    console = stdout()
    whose = {m["name"]: m.get("arithmetic") for m in document["methods"] if m["kind"] == "peer"}
    names = {"same": "same", "own": "as its users run it", None: ""}
    shown = table(
        "method",
        *(["arithmetic"] if whose else []),
        right=("batch", "speed-up over plain", "tokens/s", "identical"),
    )
    for c in cells:
        if c.family == ALL:
            speed = "1" if c.method == "plain" else show(c.speedup)
            identical = "–" if c.identical is None else f"{c.identical * 100:.0f} %"
            arithmetic = [names[whose.get(c.method)]] if whose else []
            pace = f"{c.tokens_per_second:,.0f}"
            shown.add_row(c.method, *arithmetic, str(c.batch), speed, pace, identical)
    console.print(shown)
