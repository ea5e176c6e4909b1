"""`forerun tune`: the parameters of controllers, searched on a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.checks import whole
from forerun.cli import options
from forerun.cli.console import note, status, stderr, stdout, table
from forerun.cli.options import OUTPUT, option
from forerun.cli.progress import progress
from forerun.cli.report import check_writable, print_json
from forerun.errors import SettingError, UnknownNameError

if TYPE_CHECKING:
    from forerun.lab.costs import Cell
    from forerun.lab.trace import Trace
    from forerun.lab.tune import Judged, Tuned
    from forerun.settings import Settings

SCHEMA = 1


def tune(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Prompts to search on, from forerun record.")
    ],
    costs: options.CostTable,
    controller: Annotated[
        list[str] | None,
        option(
            "SPEC",
            "Search its parameters other than those the spec sets; repeatable. "
            "Default: all controllers.",
        ),
    ] = None,
    budget: Annotated[int, option("N", "Most settings to try per controller.")] = 100,
    test: Annotated[
        str | None,
        option(
            "TRACE",
            "Judge on these prompts. Default: on the test prompts of TRACE if its ids name them, "
            "else on every other prompt of each family.",
        ),
    ] = None,
    batch: options.NearBatch = 1,
    context: options.NearContext = 128,
    seed: Annotated[int, option("S", "Of search and bootstrap; the same gives the same.")] = 0,
    output: Annotated[
        str | None,
        options.output(
            "FILE", "Save the recommended controller for generate --settings and forerun.load."
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        option(
            "ENGINE:FILE",
            "Save the best that another engine can do, for vllm, transformers or llama.cpp; "
            "repeatable.",
            panel=OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Search the parameters of controllers on a trace, and judge them on other prompts.

    Nothing is decoded: every setting is replayed. What was found is recommended where the other
    prompts show it to be better than the defaults. Interrupted, the best so far is kept.
    """
    for name, number in {"budget": budget, "batch": batch, "context": context}.items():
        whole(name, number, 1)
    exports = _exports(export or [])
    check_writable(output)
    for engine, file in exports:
        check_writable(file, f"--export {engine}")

    from forerun.lab.costs import Costs
    from forerun.lab.trace import Trace
    from forerun.lab.tune import choose, disjoint, halves, judge
    from forerun.lab.tune import tune as search

    every = Costs.find(costs)
    cell = every.at(batch, context)
    cells = [every.at(n, context) for n in sorted({cell.batch for cell in every.cells})]
    found = Trace.read(trace)
    if test is None:
        searched, judged_on, how = halves(found)
    else:
        searched, judged_on, how = found, Trace.read(test), "another trace"
        disjoint(searched, judged_on)

    with progress("reading", unit="settings", alone=True) as told:
        tuned = search(searched, cell, controller or None, budget=budget, seed=seed, told=told)
    about = {
        "trace": Path(trace).name,
        "prompts": searched.prompts,
        "recorded": dict(found.about),
        "costs": asdict(cell),
        "budget": budget,
        "seed": seed,
        "found": tuned.best.best,
        "speedup": round(tuned.best.after, 4),
        "complete": tuned.complete,
    }
    if output is not None:  # judging takes a while, too
        _settings(tuned.best.best, searched, about).write(output)
    if not tuned.complete:
        note(stderr(), "interrupted; this is the best so far")

    judged, fixed = judge(tuned, judged_on, cell, seed)
    choice = choose(tuned, judged, judged_on, cell, free=not controller, seed=seed)
    settings = _settings(choice.spec, searched, about)
    if output is not None:
        settings.write(output)
    split = {"how": how, "searched": searched.prompts, "judged": judged_on.prompts}
    with status("searching what other engines can do") if exports else nullcontext():
        written = _write_exports(exports, searched, cell, cells, budget, seed)
    if as_json:
        value = {
            "schema": SCHEMA,
            "complete": tuned.complete,
            "split": split,
            "costs": asdict(cell),
            "controllers": [_json(one) for one in judged],
            "best_fixed": fixed,
            "recommended": asdict(choice),
            "settings": json.loads(settings.to_json()),
            "exports": written,
        }
        print_json(value)
    else:
        _show(tuned, judged, fixed, split, cell)
        if choice.reason:
            note(stdout(), Text(f"\n{choice.reason}; recommended is", "yellow"))
        note(stdout(), Text.assemble("\n", (f'--controller "{choice.spec}"', "cyan")))
        for engine, said in written.items():
            note(stderr(), f"{engine}: saved to {said['file']}; cannot express: {said['cannot']}")
        if output is not None:
            note(stderr(), f"settings: saved to {output}")
    if tuned.fixed.best == f"fixed(length={searched.depth})":
        note(stderr(), f"the best fixed length is the trace's depth, {searched.depth}: record more")
    if not tuned.complete:
        raise typer.Exit(130)


def _settings(controller: str, trace: Trace, about: Mapping[str, Any]) -> Settings:
    """What to save: a controller, and the draft it was tuned with if others can find it."""
    from forerun.settings import Settings

    draft = trace.about.get("draft")
    name = str(draft.get("name")) if isinstance(draft, Mapping) else ""
    return Settings(controller=controller, draft=name if "/" in name else None, about=about)


def _exports(texts: Sequence[str]) -> list[tuple[str, str]]:
    """`ENGINE:FILE` options."""
    from forerun.lab.exports import EXPORTS

    pairs = []
    for text in texts:
        engine, colon, file = text.partition(":")
        if not colon or not file:
            raise SettingError(f"--export wants ENGINE:FILE like vllm:vllm.json, got {text!r}")
        if engine not in EXPORTS:
            raise UnknownNameError.among("engine to export to", engine, EXPORTS)
        pairs.append((engine, file))
    return pairs


def _write_exports(
    exports: Sequence[tuple[str, str]],
    trace: Trace,
    cell: Cell,
    cells: Sequence[Cell],
    budget: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    from forerun.lab import exports as lab

    job = lab.Job(trace, cell, cells, budget, seed)
    written = {}
    for engine, file in exports:
        made = lab.export(engine, job)
        Path(file).write_text(made.text, encoding="utf-8")
        written[engine] = {"file": file, "like": list(made.specs), "cannot": made.cannot}
    return written


def _json(one: Judged) -> dict[str, Any]:
    return {**asdict(one.found), "test": one.overall, "families": one.families}


def _show(
    tuned: Tuned,
    judged: Sequence[Judged],
    fixed: Mapping[str, Any],
    split: Mapping[str, Any],
    cell: Cell,
) -> None:
    """The report, for people."""
    console = stdout()
    note(
        console,
        f"searched on {split['searched']} prompts, judged on {split['judged']} others "
        f"({split['how']}); cost ratio {cell.ratio:.3g}, batch {cell.batch}\n",
    )
    order = sorted(judged, key=lambda one: -one.found.after)
    console.print(_table("controller", [(one.found.name, one.overall) for one in order]))
    best = next(one for one in judged if one.found is tuned.best)
    note(console, f"\n{best.found.name}, the best on the prompts searched, by family\n")
    console.print(_table("family", list(best.families.items())))
    said = fixed["overall"]
    note(console, f"\nbest fixed length: {fixed['spec']}, speed-up {_interval(said)}")


def _table(what: str, rows: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    """Speed-ups of some rows, with 95 % intervals."""
    names = {
        "default": "default",
        "tuned": "tuned",
        "gain": "tuned/default",
        "over_fixed": "tuned/fixed",
    }
    made = table(what, right=list(names.values()))
    for name, found in rows:
        made.add_row(name, *[_interval(found[key]) for key in names])
    return made


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['mean']:.2f} {found['low']:.2f}–{found['high']:.2f}"
