"""`forerun bench`: measure methods and peers side by side, and compare two measurements."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from forerun import zoo
from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, remark, status, stdout, table
from forerun.cli.shared.models import Chat, Job, Models
from forerun.cli.shared.options import OUTPUT, PROMPTS, SAMPLING, Fields, flag, numbers, option
from forerun.cli.shared.report import claim, print_json
from forerun.controllers import CONTROLLERS
from forerun.errors import SettingError, UnknownNameError, require
from forerun.lab.bench import bench as lab
from forerun.lab.bench import report
from forerun.lab.bench.bench import Group, Method, Ours, groups
from forerun.lab.bench.peers import Peer, named, opening
from forerun.lab.bench.report import PLAIN, Cell, Change, Document
from forerun.lab.traces.costs import CostTable
from forerun.lab.traces.replay_report import shares
from forerun.lab.traces.trace import Trace
from forerun.prompts import Prompt, find_prompts, unroll
from forerun.requests import Sampling

NAMED = ("target", "draft")  # without their paths on this machine
FIXED = "fixed(5)"  # measured beside the default controller
METHODS = "What is compared"  # panel of the help text, as the next
ORACLE = "Share of the oracle"
DRIFT = 0.05  # a change of plain decoding above which the machine was in another state

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
    output: Annotated[str | None, options.output("DIR")] = None,
    controllers: Annotated[
        str | None,
        option(
            "SPEC;SPEC...",
            f"Length controllers. Default: that of generate, and {FIXED}.",
            panel=METHODS,
        ),
    ] = None,
    rules: Annotated[str, option("SPEC;SPEC...", panel=METHODS)] = "gumbel",
    peers: Annotated[str, option("NAME,NAME...", panel=METHODS)] = "",
    peer: Annotated[list[str] | None, option("COMMAND", panel=METHODS)] = None,
    peer_python: Annotated[list[str] | None, option("vllm=PATH", panel=METHODS)] = None,
    batch: Annotated[str, option("B,B...", panel=METHODS)] = "1",
    families: Annotated[str, option("NAME,NAME...", panel=PROMPTS)] = "all",
    prompt_file: Annotated[str | None, option("FILE", panel=PROMPTS)] = None,
    skip_long: Annotated[bool, flag("--skip-long", panel=PROMPTS)] = False,
    prompts: Annotated[int, options.limit()] = 20,
    split: options.Split = "test",
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: Annotated[float, option("T", panel=SAMPLING)] = 0.0,
    seed: Annotated[int, option("S", "Of sampled texts.", panel=SAMPLING)] = 0,
    trace: Annotated[str | None, option("TRACE", panel=ORACLE)] = None,
    costs: Annotated[str | None, option("COSTS", panel=ORACLE)] = None,
    as_json: Annotated[bool, flag("--json", panel=OUTPUT)] = False,
) -> None:
    """Measure methods and other implementations side by side, prompt by prompt.

    Every prompt is written by all methods in turn, plain decoding among them, in an order
    drawn anew. Interrupted, it keeps what is complete, and the same command goes on.

    Args:
        output: folder for results.json and report.html, with plots. With the results of an
            interrupted run of the same settings in it, that run goes on.
        rules: acceptance rules, each with every controller.
        peers: peers that forerun's repository has runners for (benchmarks/peers): transformers,
            transformers-assisted, transformers-early-exit(layer=4), vllm, openvino-genai,
            llama-cpp, of these three with -draft (tokens=5), openvino-genai-lookup,
            llama-cpp-ngram; (gguf=FILE): as their users run them. Greedy; one that is missing is
            skipped and the report says why.
        peer: any other implementation: a program that speaks JSON lines (docs/lab.md); may be given
            several times.
        peer_python: the Python of one of --peers that has an environment of its own.
        batch: texts decoded together; several sizes are measured one after another.
        families: families of the prompts, or all.
        prompt_file: your own prompts instead of the shipped ones, as for generate, or conversations
            (turns), also in Spec-Bench's format; - reads stdin. Of a line's settings max_new_tokens
            and repetition_penalty count.
        skip_long: leave out prompts that do not fit the context.
        temperature: 0 is greedy. Above, where a rule tosses coins, texts go on after their end, so
            that all are of one length.
        trace: a trace of forerun record: adds the controllers' share of what is possible.
        costs: costs of forerun costs, for --trace.
        as_json: print the summary as one JSON document.
    """
    if context.invoked_subcommand is not None:
        return
    if output is None:
        raise SettingError("no folder for the results; give -o DIR")
    folder = Path(output)
    claim(output, folder=True)
    require((trace is None) == (costs is None), "--trace", trace, "given together with --costs")
    require(prompts >= 1, "prompts", prompts, "≥ 1")
    sizes = sorted(numbers("--batch", batch))
    requested = _prompts(families, prompt_file, split, prompts, max_new_tokens, models.target)

    from forerun.model import DEFAULT_CONTROLLER

    recorded = (Trace.read(trace), CostTable.read(costs)) if trace and costs else None
    lengths = split_names(controllers or f"{DEFAULT_CONTROLLER};{FIXED}", ";")
    keeps = split_names(rules, ";")
    _check(lengths, keeps, temperature)
    others = _peers(peers, peer_python or [], peer or [])

    job, chosen = _open(models, requested, chat, skip_long)
    settings = {
        **{n: Path(m).name if Path(m).is_dir() else m for n in NAMED if (m := job.about[n])},
        "controllers": lengths,
        "rules": keeps,
        "peers": list(dict.fromkeys(one.name for one in others)),
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
    work = groups(_seeded(chosen, seed, keeps, temperature), sizes)
    results = _measure(models, job, others, work, folder, settings)
    if recorded is not None:
        with status("replaying") as tell:
            results.document["shares"] = shares(*recorded, lengths, tell)
    cells = results.report()
    if as_json:
        return print_json(results.summary())
    _show(results.document, cells)
    remark(f"report: {folder / lab.PAGE}")


def _check(controllers: Sequence[str], rules: Sequence[str], temperature: float) -> None:
    """Refuse a wrong spec or temperature before a model is loaded."""
    from forerun.rules import RULES

    for name, specs, registry in (
        ("controllers", controllers, CONTROLLERS), ("rules", rules, RULES),
    ):  # fmt: skip
        require(len(specs) > 0, name, "", "at least one")
        for spec in specs:
            registry.make(spec)
    Sampling(temperature=temperature)


def split_names(text: str, mark: str) -> list[str]:
    """Parts between marks that stand outside brackets."""
    parts = re.split(rf"{mark}(?![^()]*\))", text)
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _peers(names: str, pythons: Sequence[str], commands: Sequence[str]) -> list[Peer]:
    """Those with a name of the repository's, and commands."""
    for pair in pythons:
        if not all(pair.partition("=")):
            raise SettingError(f"--peer-python wants PEER=PATH like vllm=/path, got {pair!r}")
    paths = dict(pair.split("=", 1) for pair in pythons)
    short = [peer for name in split_names(names, ",") for peer in named(name, paths)]
    return short + [Peer.read(text) for text in commands]


def _prompts(
    families: str, prompt_file: str | None, split: str, limit: int, cap: int, target: str | None
) -> list[Prompt]:
    """The prompts, checked before a model is loaded."""
    own = None if prompt_file is None else find_prompts(prompt_file, split, limit, cap)
    builtin = [zoo.SOURCES[target]] if target in zoo.SOURCES else list(zoo.families())
    present = builtin if own is None else list(dict.fromkeys(str(p.family) for p in own))
    names = present if families.strip() == "all" else split_names(families, ",")
    require(len(names) > 0, "families", families, "names with commas between, or all")
    for name in names:
        if name not in present:
            kind = "family of shipped prompts" if own is None else f"family in {prompt_file}"
            raise UnknownNameError.among(kind, name, ("all", *present))
    if own is not None:
        return [p for p in own if p.family in names]
    return [p for name in names for p in find_prompts(f"builtin:{name}", split, limit, cap)]


def _seeded(
    prompts: Sequence[Prompt], seed: int, rules: Sequence[str], heat: float
) -> list[Prompt]:
    """The prompts as all methods take them; sampled texts get seeds of their own.

    Of a prompt's settings only two count. Where a rule tosses coins, texts go on after their end,
    so that all are of one length.
    """
    from forerun.rules import RULES

    longer = heat > 0 and not all(RULES.make(rule).gumbel_max for rule in rules)

    def sampling(i: int, own: Sampling) -> Sampling:
        return Sampling(
            max_new_tokens=own.max_new_tokens, repetition_penalty=own.repetition_penalty,
            temperature=heat, ignore_eos=longer, seed=seed + i,
        )  # fmt: skip

    return [replace(p, sampling=sampling(i, p.sampling)) for i, p in enumerate(prompts)]


def start_peers(
    stack: ExitStack, job: Job, models: Models, peers: Sequence[Peer]
) -> tuple[list[Peer], list[dict[str, str]]]:
    """The peers that can run here, closed with the stack, and the others with the reason."""
    from forerun.drafters.model import ModelDrafter

    small = models.draft or (str(zoo.DRAFT) if models.target is None else None)
    small = small if isinstance(job.model.drafter, ModelDrafter) else None
    able, skipped = [], []
    first = opening(job.model, str(zoo.locate(models.target)), small)
    for peer in peers:
        stack.callback(peer.close)
        with status(f"starting {peer.name}"):
            reason = peer.start(first)
        if reason is None:
            able.append(peer)
        else:
            skipped.append({"name": peer.name, "reason": reason})
    return able, skipped


def _open(
    models: Models, requested: Sequence[Prompt], chat: Chat, skip_long: bool
) -> tuple[Job, list[Prompt]]:
    job, chosen = models.open(requested, chat=chat, turns=True, skip_long=skip_long)
    if left := len(requested) - len(chosen):
        remark(f"left out {left} of {len(requested)} prompts: longer than the context")
    if any(prompt.later for prompt in chosen):
        with status("answering the first turns"):
            chosen = unroll(job.model, job.reader, chosen)
    return job, chosen


def _measure(
    models: Models,
    job: Job,
    peers: list[Peer],
    work: list[Group],
    folder: Path,
    about: Document,
) -> lab.Results:
    """Measure what is not measured yet, `about` being the settings; interrupted, the report of what
    there is is written."""
    from forerun.lab import provenance

    job.model.target.executor.finish()
    made = provenance.of(job.model, job.about["draft"])
    methods: list[Method] = [Ours(PLAIN, job.model)]
    for rule, spec in product(about["rules"], about["controllers"]):
        name = spec if rule == "gumbel" else f"{spec} + {rule}"
        methods.append(Ours(name, job.model, spec, rule, about["temperature"] > 0))
    with ExitStack() as stack:
        if about["temperature"] > 0:
            why = "peers are measured greedily, and --temperature is above 0"
            skipped = [{"name": peer.name, "reason": why} for peer in peers]
        else:
            theirs, skipped = start_peers(stack, job, models, peers)
            methods += theirs
        results = lab.Results.open(folder, about, made, methods, skipped)
        for skip in results.document["skipped"]:
            remark(f"skipped {skip['name']}: {skip['reason']}")
        try:
            with progress("measuring", unit="runs") as tell:
                lab.measure(results, work, methods, tell=partial(tell, "measuring"))
        except KeyboardInterrupt:
            results.report()
            remark("interrupted; the same command goes on from here")
            raise
    return results


def _show(document: Document, cells: Sequence[Cell]) -> None:
    whose = {m["name"]: m.get("arithmetic") for m in document["methods"] if m["kind"] == "peer"}
    names = {"same": "same", "own": "as its users run it", None: ""}
    shown = table(
        "method",
        *(["arithmetic"] if whose else []),
        right=("batch", "speed-up over plain", "tokens/s", "identical"),
    )
    for c in cells:
        if c["family"] == report.ALL:
            name, same = c["method"], c["identical"]
            speed = "1" if name == "plain" else report.show(c["speedup"])
            identical = "–" if same is None else f"{same * 100:.0f} %"
            arithmetic = [names[whose.get(name)]] if whose else []
            pace = f"{c['tokens_per_second']:,.0f}"
            shown.add_row(name, *arithmetic, str(c["batch"]), speed, pace, identical)
    stdout().print(shown)


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
    changes = report.compare(lab.load(before), lab.load(after))
    if not changes:
        raise SettingError("the two results share no prompts measured by the same method")
    if as_json:
        print_json({"schema": report.SCHEMA, "cells": changes})
        return
    _show_changes(changes)


def _show_changes(changes: Sequence[Change]) -> None:
    several = len({c["batch"] for c in changes}) > 1
    right = ("time, A/B", "speed-up, B/A", "B is")
    shown = table("method", "family", *(["batch"] if several else []), right=right, no_wrap=True)
    styles = {"faster": "green", "slower": "red", "within noise": "dim"}
    for c in changes:
        size = [str(c["batch"])] if several else []
        relative = "–" if c["speedup"] is None else report.show(c["speedup"])
        verdict = Text(c["verdict"], styles[c["verdict"]])
        shown.add_row(c["method"], c["family"], *size, report.show(c["seconds"]), relative, verdict)
    stdout().print(shown)
    beyond = sum(c["verdict"] != "within noise" for c in changes)
    note(
        f"\n{beyond} of {len(changes)} cells beyond noise; by chance alone up to about "
        f"{len(changes) * report.LEVEL:.1f} would be"
    )
    overall = [c for c in changes if c["family"] == report.ALL]
    for c in overall:
        if c["speedup"] is None and abs(c["seconds"]["mean"] - 1) > DRIFT:
            at = f" at batch {c['batch']}" if several else ""
            note(
                f"plain decoding itself took {1 / c['seconds']['mean']:.2f} times as long in B{at}"
                ": the machine was in another state, measure again before you trust small changes"
            )
    for c in overall:
        if c["same_text"] < 1:
            share = f"{(1 - c['same_text']) * 100:.0f} %"
            note(f"{c['method']} wrote other texts in B for {share} of the prompts")
