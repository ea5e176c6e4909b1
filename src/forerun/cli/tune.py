"""`forerun tune`: the parameters of controllers, searched on a trace."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, remark, status, stdout, table
from forerun.cli.shared.options import OUTPUT, option
from forerun.cli.shared.report import claim, print_json
from forerun.errors import SettingError, UnknownNameError
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.exports import EXPORTS, ExportJob
from forerun.lab.traces.exports import export as make_export
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import disjoint, halves, interval, settings_with, verdict
from forerun.lab.traces.tune import tune as search


@options.command
def tune(
    trace: Annotated[str, typer.Argument(metavar="TRACE")],
    costs: options.CostTable,
    controller: Annotated[list[str] | None, option("SPEC")] = None,
    budget: Annotated[int, option("N", "Most settings to try per controller.")] = 100,
    test: Annotated[str | None, option("TRACE")] = None,
    batch: options.NearBatch = 1,
    context: options.NearContext = 128,
    seed: Annotated[int, option("S", "Of search and bootstrap; the same gives the same.")] = 0,
    output: Annotated[str | None, options.output("FILE")] = None,
    export: Annotated[list[str] | None, option("ENGINE:FILE", panel=OUTPUT)] = None,
    as_json: options.Json = False,
) -> None:
    """Search the parameters of controllers on a trace, and judge them on other prompts.

    Nothing is decoded: every setting is replayed. What was found is recommended where the other
    prompts show it to be better than the defaults. Interrupted, the best so far is kept.

    Args:
        trace: prompts to search on, from forerun record.
        controller: search its parameters other than those the spec sets; repeatable. Default: all
            controllers.
        test: judge on these prompts. Default: on the test prompts of TRACE if its ids name them,
            else on every other prompt of each family.
        output: save the recommended controller for generate --settings and forerun.load.
        export: save the best that another engine can do: vllm, transformers, llama.cpp,
            tensorrt-llm, openvino-genai, sglang or exllamav3; repeatable.
    """
    exports = _exports(export or [])
    claim(output)
    for engine, file in exports:
        claim(file, f"--export {engine}")

    every = CostTable.find(costs)
    cell = every.at(batch, context)
    cells = [every.at(n, context) for n in sorted({cell.batch for cell in every.cells})]
    recorded = Trace.read(trace)
    pair = None if test is None else (recorded, Trace.read(test), "another trace")
    searched, judged_on, split_by = pair or halves(recorded)
    if pair:
        disjoint(searched, judged_on)
    with progress("reading", unit="settings", alone=True) as tell:
        tuned = search(searched, cell, controller or None, budget=budget, seed=seed, progress=tell)
    about = {
        "trace": Path(trace).name,
        "prompts": searched.prompts,
        "recorded": dict(recorded.about),
        "costs": cell.to_json(),
        "budget": budget,
        "seed": seed,
        "found": tuned.best.best,
        "speedup": round(tuned.best.after, 4),
        "complete": tuned.complete,
    }
    if output is not None:  # judging takes a while, too
        settings_with(tuned.best.best, searched, about).write(output)
    if not tuned.complete:
        remark("interrupted; this is the best so far")

    split = {"how": split_by, "searched": searched.prompts}
    document = verdict(tuned, judged_on, cell, split, not controller, seed)
    settings = settings_with(document["recommended"]["spec"], searched, about)
    if output is not None:
        settings.write(output)
    written: dict[str, dict[str, Any]] = {}
    with status("searching what other engines can do") if exports else nullcontext():
        for engine, file in exports:
            made = make_export(engine, ExportJob(searched, cell, cells, budget, seed))
            Path(file).write_text(made.text, encoding="utf-8")
            written[engine] = {"file": file, "like": list(made.specs), "cannot": made.cannot}
    if as_json:
        both = {"settings": json.loads(settings.to_json()), "exports": written}
        print_json({**document, **both})
    else:
        _show(document, cell)
        for engine, entry in written.items():
            remark(f"{engine}: saved to {entry['file']}; cannot express: {entry['cannot']}")
        if output is not None:
            remark(f"settings: saved to {output}")
    if tuned.fixed.best == f"fixed(length={searched.depth})":
        remark(f"the best fixed length is the trace's depth, {searched.depth}: record more")
    if not tuned.complete:
        raise typer.Exit(130)


def _exports(texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        engine, colon, file = text.partition(":")
        if not colon or not file:
            raise SettingError(f"--export wants ENGINE:FILE like vllm:vllm.json, got {text!r}")
        if engine not in EXPORTS:
            raise UnknownNameError.among("engine to export to", engine, EXPORTS)
        pairs.append((engine, file))
    return pairs


def _show(document: Mapping[str, Any], cell: Cell) -> None:
    split, choice = document["split"], document["recommended"]
    note(
        f"searched on {split['searched']} prompts, judged on {split['judged']} others "
        f"({split['how']}); cost ratio {cell.ratio:.3g}, batch {cell.batch}\n"
    )
    order = sorted(document["controllers"], key=lambda one: -one["after"])
    stdout().print(_table("controller", [(one["name"], one["test"]) for one in order]))
    note(f"\n{order[0]['name']}, the best on the prompts searched, by family\n")
    stdout().print(_table("family", list(order[0]["families"].items())))
    fixed = document["best_fixed"]
    note(f"\nbest fixed length: {fixed['spec']}, speed-up {interval(fixed['overall'])}")
    if choice["reason"]:
        note(Text(f"\n{choice['reason']}; recommended is", "yellow"))
    note(Text.assemble("\n", (f'--controller "{choice["spec"]}"', "cyan")))


def _table(label: str, rows: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    """Speed-ups of some rows, with 95 % intervals."""
    shown = table(label, right=("default", "tuned", "tuned/default", "tuned/fixed"))
    for name, figures in rows:
        columns = ("default", "tuned", "gain", "over_fixed")
        shown.add_row(name, *(interval(figures[column]) for column in columns))
    return shown
