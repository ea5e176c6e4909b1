"""`forerun tune`: the parameters of controllers, searched on a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.checks import whole
from forerun.cli.console import note, stderr, stdout
from forerun.errors import SettingError, UnknownNameError

if TYPE_CHECKING:
    from forerun.lab.costs import Cell
    from forerun.lab.trace import Trace
    from forerun.lab.tune import Judged, Told, Tuned
    from forerun.settings import Settings

SCHEMA = 1


def tune(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Prompts to search on, from forerun record.")
    ],
    costs: Annotated[
        str,
        typer.Option(
            metavar="FILE|c=C,slope=S",
            help="What a round costs: a file from forerun costs, or a made-up machine where a "
            "target pass takes C draft steps and each further token to verify adds S of a pass.",
        ),
    ],
    controller: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Search its parameters other than those the spec sets; repeatable. "
            "Default: all controllers.",
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(metavar="N", help="Most settings to try per controller.")
    ] = 100,
    test: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="Judge on these prompts. Default: on the test prompts of TRACE if its ids name "
            "them, else on every other prompt of each family.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(metavar="B", help="Batch size to tune for, of a file of costs.")
    ] = 1,
    context: Annotated[
        int, typer.Option(metavar="N", help="Context to tune for, of a file of costs.")
    ] = 128,
    seed: Annotated[
        int, typer.Option(metavar="S", help="Of search and bootstrap; the same gives the same.")
    ] = 0,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Save the best controller for generate --settings and forerun.load.",
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE:FILE",
            help="Save the best that another engine can do, for vllm, transformers or llama.cpp; "
            "repeatable.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar="", help="Print one JSON document and nothing else."),
    ] = False,
) -> None:
    """Search the parameters of controllers on a trace, and judge them on other prompts.

    Nothing is decoded: every setting is replayed. Interrupted, the best so far is kept.
    """
    for name, number in {"budget": budget, "batch": batch, "context": context}.items():
        whole(name, number, 1)
    exports = _exports(export or [])
    for option, path in [("-o", output), *[(f"--export {e}", file) for e, file in exports]]:
        _check_writable(option, path)

    from forerun.lab.costs import Costs
    from forerun.lab.trace import Trace
    from forerun.lab.tune import disjoint, halves, judge
    from forerun.lab.tune import tune as search

    table = Costs.find(costs)
    cell = table.at(batch, context)
    cells = [table.at(n, context) for n in sorted({cell.batch for cell in table.cells})]
    found = Trace.read(trace)
    if test is None:
        searched, judged_on, how = halves(found)
    else:
        searched, judged_on, how = found, Trace.read(test), "another trace"
        disjoint(searched, judged_on)

    with _progress() as told:
        tuned = search(searched, cell, controller or None, budget=budget, seed=seed, told=told)
    about = {
        "trace": Path(trace).name,
        "prompts": searched.prompts,
        "recorded": dict(found.about),
        "costs": asdict(cell),
        "budget": budget,
        "seed": seed,
        "speedup": round(tuned.best.after, 4),
        "complete": tuned.complete,
    }
    settings = _settings(tuned, searched, about)
    if output is not None:
        settings.write(output)
    if not tuned.complete:
        note(stderr(), "interrupted; this is the best so far")

    judged, fixed = judge(tuned, judged_on, cell, seed)
    split = {"how": how, "searched": searched.prompts, "judged": judged_on.prompts}
    written = _write_exports(exports, searched, cell, cells, budget, seed)
    if as_json:
        value = {
            "schema": SCHEMA,
            "complete": tuned.complete,
            "split": split,
            "costs": asdict(cell),
            "controllers": [_json(one) for one in judged],
            "best_fixed": fixed,
            "settings": json.loads(settings.to_json()),
            "exports": written,
        }
        print(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2))
    else:
        _show(tuned, judged, fixed, split, cell)
        for engine, said in written.items():
            note(stderr(), f"{engine}: saved to {said['file']}; cannot express: {said['cannot']}")
        if output is not None:
            note(stderr(), f"settings: saved to {output}")
    if tuned.fixed.best == f"fixed(length={searched.depth})":
        note(stderr(), f"the best fixed length is the trace's depth, {searched.depth}: record more")
    if not tuned.complete:
        raise typer.Exit(130)


def _settings(tuned: Tuned, trace: Trace, about: Mapping[str, Any]) -> Settings:
    """What to save: the best controller, and the draft it was tuned with if others can find it."""
    from forerun.settings import Settings

    draft = trace.about.get("draft")
    name = str(draft.get("name")) if isinstance(draft, Mapping) else ""
    return Settings(controller=tuned.best.best, draft=name if "/" in name else None, about=about)


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


def _check_writable(option: str, path: str | None) -> None:
    """Tell now what would otherwise be told after the work."""
    if path is None:
        return
    if Path(path).is_dir():
        raise SettingError(f"{option} {path} is a folder; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise SettingError(f"{option} {path}: there is no folder {Path(path).parent}")


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
    note(console, Text.assemble("\n", (f'--controller "{best.found.best}"', "cyan")))


def _table(what: str, rows: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    """Speed-ups of some rows, with 95 % intervals."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column(what, header_style="dim")
    names = {
        "default": "default",
        "tuned": "tuned",
        "gain": "tuned/default",
        "over_fixed": "tuned/fixed",
    }
    for title in names.values():
        table.add_column(title, header_style="dim", justify="right")
    for name, found in rows:
        table.add_row(name, *[_interval(found[key]) for key in names])
    return table


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['mean']:.2f} {found['low']:.2f}–{found['high']:.2f}"


@contextmanager
def _progress() -> Iterator[Told]:
    """A bar on stderr, on terminals only, for the controller being searched."""
    from rich import progress as bars

    console = stderr()
    bar: Any = bars.Progress(
        bars.TextColumn("{task.description:<12} {task.completed}/{task.total} settings"),
        bars.BarColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    task = bar.add_task("reading", total=None)

    def told(name: str, done: int, total: int) -> None:
        bar.update(task, description=name, completed=done, total=total)

    with bar:
        yield told
