"""`forerun sweep`: settings of a drafter, tuned for a model."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text as Line

from forerun.cli import options
from forerun.cli.console import note, stderr, stdout, table
from forerun.cli.options import MODELS, OUTPUT, VALIDATION, flag, option
from forerun.cli.progress import progress
from forerun.cli.report import check_writable, print_json, save_json, versions
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.lab.exit_replay import Setting, Text
    from forerun.lab.sweep import Confirmed, Search

SCHEMA = 1
OF_FILE, OF_FAMILY = 30, 5
"""Prompts by default."""
SHOWN = 8
"""Settings in the table."""

app = typer.Typer(help="Tune a drafter's settings for your model.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def specbound(
    target: options.Target = None,
    exits: Annotated[
        str | None,
        option(
            "DIR",
            "Exit heads, made by train-exits. Default: the shipped ones for the shipped target, "
            'else, as with "", the model\'s own head at every layer.',
            panel=MODELS,
        ),
    ] = None,
    prompts: Annotated[str | None, options.prompts(VALIDATION)] = None,
    limit: Annotated[
        int | None, options.limit(f"Default: {OF_FILE} of a file, {OF_FAMILY} of a family.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 48,
    temperature: options.Temperature = 0.0,
    budget: Annotated[int, option("N", "Settings that the search tries.")] = 300,
    width: Annotated[int, option("N", "Most drafted tokens per round that are tried.")] = 12,
    confirm: Annotated[int, option("N", "Best settings that are timed live.")] = 3,
    seed: Annotated[int, option("S", "Of the search, and of sampled text.")] = 0,
    output: Annotated[str | None, options.output("FILE", "Save the best settings as JSON.")] = None,
    keep: Annotated[
        bool,
        flag(
            "--keep",
            "Also keep them beside the exit heads: specbound's defaults with these heads.",
            OUTPUT,
        ),
    ] = False,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Find threshold, annealing, depth, width and exit layers of specbound for a model.

    Writes a text per prompt, counts what every setting would take on it, searches by these counts,
    and times the best settings against plain decoding.
    """
    from forerun.cli.prompts import find_prompts, given_or_shipped, is_shipped, seeded, tokenise

    where = given_or_shipped(prompts, target)
    for name, value in (("width", width), ("budget", budget), ("confirm", confirm)):
        require(value >= 1, name, value, "≥ 1")
    require(seed >= 0, "seed", seed, "≥ 0")
    check_writable(output)
    if keep and not exits:
        raise SettingError("--keep writes beside exit heads; name their folder with --exits")
    most = (OF_FAMILY if is_shipped(where) else OF_FILE) if limit is None else limit
    found = seeded(find_prompts(where, "val", most, max_new_tokens), seed)

    from forerun.lab import sweep

    sweep.load_optuna()

    from forerun.cli.run import Plan
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
    plan = Plan(
        target,
        "none",
        "fixed(0)",
        "standard",
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    job, rows = plan.open(lambda reader: tokenise(reader, found, {"temperature": temperature}))
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
        with progress("writing", len(rows)) as tell:
            texts: list[Text] = []
            for text in sweep.written(job.model, ((row.ids, row.sampling) for row in rows)):
                texts.append(text)
                tell("writing", len(texts))
            told = partial(tell, "timing")
            costs = measure(job.model, fast, heads, layers, texts, width, seed=seed, tell=told)
            search = sweep.Search(Exits(ExitModel(model), heads, layers, texts, seed), costs, width)
            best = search.run(budget, seed, partial(tell, "searching"))
            chosen = search.top(confirm)
            untuned = sweep.untuned(tuple(heads.layers), fast.access.layers, bool(trained))
            if untuned is not None and set(untuned.layers) <= set(layers):
                search.score(untuned)
                if untuned not in chosen:
                    chosen.append(untuned)
            told = partial(tell, "confirming")
            live = sweep.confirm(job.model, fast, heads, search, chosen, told)
    except KeyboardInterrupt:
        if search is not None and search.scores and output is not None:
            about["complete"] = False
            so_far = search.best()
            _save(output, so_far, named, {**about, "predicted": search.score(so_far)})
            note(stderr(), f"interrupted; the best settings so far are in {output}")
        raise
    about |= {"seconds": round(time.perf_counter() - began, 1), "prompts_used": len(texts)}
    document = _document(search, best, live, untuned, named, about)
    if output is not None:
        _save(output, live[0].setting, named, document["about"])
    if keep:
        keep_settings(str(exits), live[0].setting.settings())
    if as_json:
        print_json(document)
        return
    _show(search, live, untuned, named)
    if output is not None:
        note(stderr(), f"saved to {output}")


def _save(path: str, setting: Setting, exits: str | None, about: dict[str, Any]) -> None:
    """The settings file: what `generate` is to be run with, wherever it is run."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "controller": f"fixed({setting.width})",
        "rule": None,
        "draft": setting.spec(None if exits else exits),
    }
    if exits:
        document["exits"] = os.path.relpath(exits, Path(path).parent)
    save_json(path, document | {"about": about})


def _document(
    search: Search,
    best: Setting,
    live: list[Confirmed],
    untuned: Setting | None,
    exits: str | None,
    about: dict[str, Any],
) -> dict[str, Any]:
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
    right = ("threshold", "anneal", "width", "predicted", "live", "95 % interval")
    shown = table("layers", right=right)
    listed = search.top(SHOWN)
    for setting in [*listed, *(s for s in timed if s not in listed)]:
        done = timed.get(setting)
        shown.add_row(
            ",".join(map(str, setting.layers)) + (" (untuned)" if setting == untuned else ""),
            f"{setting.threshold:.2f}",
            f"{setting.anneal:g}",
            str(setting.width),
            f"{search.score(setting):.2f}×",
            "" if done is None else f"{done.speedup['mean']:.2f}×",
            "" if done is None else f"{done.speedup['low']:.2f}–{done.speedup['high']:.2f}",
        )
    console.print(shown)
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
    if best.speedup["mean"] < 1:
        note(console, "plain decoding is faster than every setting on these prompts")
    spec = best.setting.spec(exits)
    width = best.setting.width
    note(console, Line.assemble("\n", (f'--draft "{spec}" --controller "fixed({width})"', "cyan")))
