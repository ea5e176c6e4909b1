"""`forerun sweep`: settings of a drafter, tuned for a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text as Line

from forerun.cli.console import note, stderr, stdout
from forerun.errors import PromptError, SettingError, UnknownNameError, require

if TYPE_CHECKING:
    from forerun.cli.inputs import Request, Row
    from forerun.lab.exit_replay import Setting, Text
    from forerun.lab.sweep import Confirmed, Search

BUILTIN = "builtin"
SCHEMA = 1
OF_FILE, OF_FAMILY = 30, 5
"""Prompts by default."""
SHOWN = 8
"""Settings in the table."""
Tell = Callable[[int, int], None]

app = typer.Typer(help="Tune a drafter's settings for your model.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def specbound(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A folder or a Hugging Face id. Default: the shipped one.",
        ),
    ] = None,
    exits: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Exit heads, made by train-exits. Default: the shipped ones for the shipped "
            'target, else, as with "", the model\'s own head at every layer.',
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|builtin:FAMILY|builtin:all",
            help="Validation prompts: a file as for generate --prompt-file, or the shipped ones. "
            "Default for the shipped target: builtin:all.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Prompts: the first N of the file or of each family. Default: 30, or 5.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens per prompt.")] = 48,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Of the text; 0 is greedy.")
    ] = 0.0,
    budget: Annotated[int, typer.Option(metavar="N", help="Settings that the search tries.")] = 300,
    width: Annotated[
        int, typer.Option(metavar="N", help="Most drafted tokens per round that are tried.")
    ] = 12,
    confirm: Annotated[
        int, typer.Option(metavar="N", help="Best settings that are timed live.")
    ] = 3,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the search, and of sampled text.")] = 0,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Save the best settings as JSON."),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            metavar="",
            help="Also keep them beside the exit heads: specbound's defaults with these heads.",
        ),
    ] = False,
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
    """Find threshold, annealing, depth, width and exit layers of specbound for a model.

    Writes a text per prompt, counts what every setting would take on it, searches by these counts,
    and times the best settings against plain decoding.
    """
    if prompts is None and target is not None:
        raise SettingError(
            "no prompts; give --prompts FILE with prompts of your task, or --prompts builtin:all"
        )
    where = prompts or f"{BUILTIN}:all"
    for name, value in (("limit", limit), ("max_new_tokens", max_new_tokens), ("width", width),
                        ("budget", budget), ("confirm", confirm)):  # fmt: skip
        require(value is None or value >= 1, name, value, "≥ 1")
    require(seed >= 0, "seed", seed, "≥ 0")
    if output is not None:
        _check_writable(Path(output))
    if keep and not exits:
        raise SettingError("--keep writes beside exit heads; name their folder with --exits")
    requests = read_prompts(where, limit)

    from forerun.lab import sweep

    sweep.load_optuna()

    from forerun.cli.inputs import prepare
    from forerun.cli.run import load_job
    from forerun.lab.exit_costs import measure
    from forerun.lab.exit_replay import Exits
    from forerun.runtime.exits import ExitModel
    from forerun.runtime.heads import keep_settings, load_heads
    from forerun.runtime.layers import LogitLens
    from forerun.zoo import EXITS

    trained = exits
    if exits is None and target is None and EXITS.is_dir():
        trained = str(EXITS)
    # Shipped heads need no naming; that there shall be none must be said.
    named = exits or (None if trained else "")
    job = load_job(
        target,
        "none",
        "fixed(0)",
        "standard",
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    rows = prepare(job.model, requests, {"temperature": temperature})
    model: Any = job.model.target.model  # type: ignore[attr-defined]
    fast = ExitModel(model)
    heads: Any = load_heads(trained, fast.access) if trained else LogitLens(fast.access)
    layers = sweep.candidates(tuple(heads.layers))
    began = time.perf_counter()
    search: Search | None = None
    about: dict[str, Any] = {
        **{name: job.about[name] for name in ("target", "device", "dtype")},
        "exits": exits,
        "prompts": where,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "budget": budget,
        "seed": seed,
    }
    try:
        with _bars() as bar:
            texts: list[Text] = []
            for text in sweep.written(job.model, _short(rows, max_new_tokens, seed)):
                texts.append(text)
                bar("writing")(len(texts), len(rows))
            costs = measure(
                job.model, fast, heads, layers, texts, width, seed=seed, tell=bar("timing")
            )
            search = sweep.Search(Exits(ExitModel(model), heads, layers, texts, seed), costs, width)
            best = search.run(budget, seed, bar("searching"))
            chosen = search.top(confirm)
            untuned = sweep.untuned(tuple(heads.layers), fast.access.layers, bool(trained))
            if untuned is not None and set(untuned.layers) <= set(layers):
                search.score(untuned)
                if untuned not in chosen:
                    chosen.append(untuned)
            live = sweep.confirm(job.model, fast, heads, search, chosen, bar("confirming"))
    except KeyboardInterrupt:
        if search is not None and search.scores and output is not None:
            about["complete"] = False
            _save(
                Path(output),
                search.best(),
                exits,
                {**about, "predicted": search.score(search.best())},
            )
            note(stderr(), f"interrupted; the best settings so far are in {output}")
        raise
    about |= {"seconds": round(time.perf_counter() - began, 1), "prompts_used": len(texts)}
    document = _document(search, best, live, untuned, named, about)
    if output is not None:
        _save(Path(output), live[0].setting, named, document["about"])
    if keep:
        keep_settings(str(exits), live[0].setting.settings())
    if as_json:
        print(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2))
        return
    _show(search, live, untuned, named)
    if output is not None:
        note(stderr(), f"saved to {output}")


def read_prompts(where: str, limit: int | None) -> list[Request]:
    """The validation prompts the user means; of the shipped ones never those for testing."""
    from forerun.cli.demo import SHOWN as SETTINGS
    from forerun.cli.inputs import Request, read_requests
    from forerun.zoo import families
    from forerun.zoo import prompts as shipped

    name, _, family = where.partition(":")
    if name != BUILTIN:
        return read_requests(None, where)[: limit or OF_FILE]
    if family not in ("", "all", *families()):
        raise UnknownNameError.among("family of shipped prompts", family, [*families(), "all"])
    chosen = [
        [
            Request(p.prompt, {"max_new_tokens": p.max_new_tokens, **SETTINGS.get(f, {})}, p.id)
            for p in shipped(f, "val", limit=limit or OF_FAMILY)
        ]
        for f in (families() if family in ("", "all") else [family])
    ]
    # In turns, so that the first few are of every family.
    mixed = [r for r in chain(*zip_longest(*chosen)) if r is not None]
    if not mixed:
        raise PromptError("the shipped prompts are not in this copy; give --prompts FILE")
    return mixed


def _short(rows: list[Row], most: int, seed: int) -> Iterator[tuple[list[int], Any]]:
    """Token ids and sampling of each prompt, with at most so many tokens and a seed of its own."""
    for number, row in enumerate(rows):
        of = row.sampling
        tokens = min(of.max_new_tokens, most)
        yield (
            row.ids,
            replace(
                of,
                max_new_tokens=tokens,
                min_new_tokens=min(of.min_new_tokens, tokens),
                seed=seed + number if of.seed is None else of.seed,
            ),
        )


def _check_writable(path: Path) -> None:
    """Tell now what would otherwise be told after the work."""
    if path.is_dir():
        raise SettingError(f"-o {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise SettingError(f"-o {path}: there is no folder {path.parent}")


def _save(path: Path, setting: Setting, exits: str | None, about: dict[str, Any]) -> None:
    """The settings file: what `generate` is to be run with."""
    document = {
        "schema": SCHEMA,
        "controller": f"fixed({setting.width})",
        "rule": None,
        "draft": setting.spec(exits),
        "about": about,
    }
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _document(
    search: Search,
    best: Setting,
    live: list[Confirmed],
    untuned: Setting | None,
    exits: str | None,
    about: dict[str, Any],
) -> dict[str, Any]:
    from forerun.cli.report import versions

    parts = search.costs.parts(search.counts(live[0].setting))
    whole = sum(parts.values())
    return {
        "schema": SCHEMA,
        "draft": live[0].setting.spec(exits),
        "controller": f"fixed({live[0].setting.width})",
        "top": [
            {"draft": setting.spec(exits), "predicted": round(search.score(setting), 4)}
            for setting in search.top(SHOWN)
        ],
        "confirmed": [c.to_json(exits) for c in live],
        "untuned": None if untuned is None else untuned.spec(exits),
        "time": {name: round(seconds / whole, 4) for name, seconds in parts.items()},
        "sensitivity": {
            name: [[value, round(score, 4)] for value, score in values]
            for name, values in search.sensitivity(live[0].setting).items()
        },
        "costs_ms": search.costs.to_json(),
        "tried": len(search.scores),
        "prefixes": search.exits.asked,
        "about": {
            **about,
            "settings": live[0].setting.settings(),
            "speedup": live[0].to_json(exits)["speedup"],
            "predicted": round(live[0].predicted, 4),
            "best_predicted": best.spec(exits),
            "versions": versions(),
        },
    }


def _show(
    search: Search, live: list[Confirmed], untuned: Setting | None, exits: str | None
) -> None:
    """The summary, for people."""
    console = stdout()
    note(
        console,
        f"{len(search.exits.texts):,} texts, {len(search.scores):,} settings, "
        f"{search.exits.asked:,} prefixes run\n",
    )
    timed = {c.setting: c for c in live}
    table = _table("layers", "threshold", "anneal", "width", "predicted", "live", "95 % interval")
    listed = search.top(SHOWN)
    for setting in [*listed, *(s for s in timed if s not in listed)]:
        done = timed.get(setting)
        table.add_row(
            ",".join(map(str, setting.layers)) + (" (untuned)" if setting == untuned else ""),
            f"{setting.threshold:.2f}",
            f"{setting.anneal:g}",
            str(setting.width),
            f"{search.score(setting):.2f}×",
            "" if done is None else f"{done.speedup.mean:.2f}×",
            "" if done is None else f"{done.speedup.low:.2f}–{done.speedup.high:.2f}",
        )
    console.print(table)
    best = live[0]
    note(console, Line("\nwhat changes alone do to the predicted speed-up", "dim"))
    for name, values in search.sensitivity(best.setting).items():
        if name == "threshold":
            values = values[:: max(1, len(values) // 10)]
        note(console, f"{name:<10}" + "  ".join(f"{value} {score:.2f}" for value, score in values))
    parts = search.costs.parts(search.counts(best.setting))
    whole = sum(parts.values())
    shares = ", ".join(f"{name} {seconds / whole * 100:.0f} %" for name, seconds in parts.items())
    note(console, f"\nwhere time goes: {shares}; {best.per_round:.2f} tokens per round")
    if best.speedup.mean < 1:
        note(console, "plain decoding is faster than every setting on these prompts")
    spec = best.setting.spec(exits)
    width = best.setting.width
    note(console, Line.assemble("\n", (f'--draft "{spec}" --controller "fixed({width})"', "cyan")))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, header_style="dim", justify="left" if name == "layers" else "right")
    return table


@contextmanager
def _bars() -> Iterator[Callable[[str], Tell]]:
    """Bars on stderr, on terminals only; asked for one by name."""
    from rich import progress as rich

    console = stderr()
    shown = rich.Progress(
        rich.TextColumn("{task.description:<10}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    tasks: dict[str, Any] = {}

    def bar(name: str) -> Tell:
        def tell(done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
            shown.update(tasks[name], completed=done, total=total)

        return tell

    with shown:
        yield bar
