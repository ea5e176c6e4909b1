"""`forerun sweep`: settings of a drafter, tuned for a model."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text as Line

from forerun.cli.shared import options
from forerun.cli.shared.console import note, stderr, stdout, table
from forerun.cli.shared.models import ALONE, Models
from forerun.cli.shared.options import MODELS, OUTPUT, SAMPLING, VALIDATION, Fields, flag, option
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import check_writable, print_json
from forerun.errors import SettingError, require
from forerun.requests import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.cli.shared.models import Job
    from forerun.lab.exits.exit_replay import Setting, Text
    from forerun.lab.exits.sweep import Confirmed, Search
    from forerun.prompts import Prompt

OF_FILE, OF_FAMILY = 30, 5
"""Prompts by default."""
app = typer.Typer(help="Tune a drafter's settings for your model.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@options.command
def specbound(
    models: Annotated[Models, Fields(Models, only=ALONE)],
    sampling: Annotated[dict[str, Any], Fields(Sampling, SAMPLING, ("temperature",))],
    exits: Annotated[
        str | None,
        option(
            "DIR",
            "Exit heads, made by train-draft exits. Default: the shipped ones for the shipped "
            'target, else, as with "", the model\'s own head at every layer.',
            panel=MODELS,
        ),
    ] = None,
    prompts: Annotated[str | None, options.prompts(VALIDATION)] = None,
    limit: Annotated[
        int | None, options.limit(f"Default: {OF_FILE} of a file, {OF_FAMILY} of a family.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 48,
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
) -> None:
    """Find threshold, annealing, depth, width and exit layers of specbound for a model.

    Writes a text per prompt, counts what every setting would take on it, searches by these counts,
    and times the best settings against plain decoding.
    """
    from forerun.prompts import default_source, find_prompts, is_shipped, seeded

    source = default_source(prompts, models.target)
    for name, value in (("width", width), ("budget", budget), ("confirm", confirm)):
        require(value >= 1, name, value, "≥ 1")
    require(seed >= 0, "seed", seed, "≥ 0")
    check_writable(output)
    if keep and not exits:
        raise SettingError("--keep writes beside exit heads; name their folder with --exits")
    most = (OF_FAMILY if is_shipped(source) else OF_FILE) if limit is None else limit
    requested = seeded(find_prompts(source, "val", most, max_new_tokens), seed)

    from forerun.lab.exits import sweep, sweep_report
    from forerun.runtime.heads import keep_settings

    sweep.load_optuna()

    job, rows = models.alone.open(requested, sampling)
    about: dict[str, Any] = {
        **{name: job.about[name] for name in ("target", "device", "dtype")},
        "exits": exits,
        "prompts": source,
        "max_new_tokens": max_new_tokens,
        **sampling,
        "budget": budget,
        "seed": seed,
    }
    run = _Sweep(job, exits, width=width, seed=seed)
    began = time.perf_counter()
    try:
        live = run.run(rows, budget, confirm)
    except KeyboardInterrupt:
        if run.search is not None and run.search.scores and output is not None:
            so_far = run.search.best()
            predicted = {"complete": False, "predicted": run.search.score(so_far)}
            sweep_report.save(output, so_far, run.named, about | predicted)
            note(stderr(), f"interrupted; the best settings so far are in {output}")
        raise
    search = run.search
    assert search is not None
    used = len(search.exits.texts)
    about |= {"seconds": round(time.perf_counter() - began, 1), "prompts_used": used}
    document = sweep_report.document(search, run.best, live, run.untuned, run.named, about)
    if output is not None:
        sweep_report.save(output, live[0].setting, run.named, document["about"])
    if keep:
        keep_settings(str(exits), live[0].setting.settings())
    if as_json:
        print_json(document)
        return
    _show(search, live, run.untuned, run.named)
    if output is not None:
        note(stderr(), f"saved to {output}")


class _Sweep:
    """Texts, costs, search and confirmation, under one bar.

    Args:
        job: the target.
        exits: exit heads, if they were named.
        width: most drafted tokens that are tried.
        seed: of the search, and of sampled text.
    """

    def __init__(self, job: Job, exits: str | None, *, width: int, seed: int) -> None:
        from forerun.runtime.drafts import own_draft
        from forerun.runtime.exits import exit_rows, layers_of
        from forerun.runtime.heads import load_heads
        from forerun.runtime.layers import LogitLens

        trained = own_draft(job.model.target.facts.name, "exits") if exits is None else exits
        self.named = exits or (None if trained else "")
        """The target's own heads need no naming; that none are used must be written."""
        self._job, self._width, self._seed = job, width, seed
        self._model: Any = job.model.target.executor.module()
        self._fast, self._trained = exit_rows(self._model), bool(trained)
        access = layers_of(self._fast).access
        self._heads: Any = load_heads(trained, access) if trained else LogitLens(access)
        self.search: Search | None = None
        self.best: Any = None
        self.untuned: Setting | None = None

    def run(self, rows: Sequence[Prompt], budget: int, confirm: int) -> list[Confirmed]:
        """Search and time; the settings timed, the fastest first."""
        from forerun.lab.exits import sweep
        from forerun.lab.exits.exit_costs import measure
        from forerun.lab.exits.exit_replay import Exits
        from forerun.runtime.exits import exit_rows, layers_of

        model, heads = self._job.model, self._heads
        layers = sweep.candidates(tuple(heads.layers))
        with progress("writing", len(rows)) as tell:
            texts: list[Text] = []
            for text in sweep.written(model, ((row.ids, row.sampling) for row in rows)):
                texts.append(text)
                tell("writing", len(texts))
            advance = partial(tell, "timing")
            costs = measure(model, self._fast, heads, layers, texts, self._width, advance)
            counted = Exits(exit_rows(self._model), heads, layers, texts)
            self.search = search = sweep.Search(counted, costs, self._width)
            self.best = search.run(budget, self._seed, partial(tell, "searching"))
            chosen = search.top(confirm)
            depth = layers_of(self._fast).access.layers
            self.untuned = sweep.untuned(tuple(heads.layers), depth, self._trained)
            if self.untuned is not None and set(self.untuned.layers) <= set(layers):
                search.score(self.untuned)
                if self.untuned not in chosen:
                    chosen.append(self.untuned)
            advance = partial(tell, "confirming")
            return sweep.confirm(model, self._fast, heads, search, chosen, advance)


def _show(
    search: Search, live: list[Confirmed], untuned: Setting | None, exits: str | None
) -> None:
    from forerun.lab.exits.sweep_report import SHOWN

    console = stdout()
    note(
        console,
        f"{len(search.exits.texts):,} texts, {len(search.scores):,} settings, "
        f"{search.exits.prefixes:,} prefixes run\n",
    )
    timed = {c.setting: c for c in live}
    right = ("threshold", "anneal", "width", "bonus", "predicted", "live", "95 % interval")
    shown = table("layers", right=right)
    listed = search.top(SHOWN)
    for setting in [*listed, *(s for s in timed if s not in listed)]:
        done = timed.get(setting)
        shown.add_row(
            ",".join(map(str, setting.layers)) + (" (untuned)" if setting == untuned else ""),
            f"{setting.threshold:.2f}",
            f"{setting.anneal:g}",
            str(setting.width),
            "yes" if setting.bonus else "no",
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
    total = sum(parts.values())
    shares = ", ".join(f"{name} {seconds / total * 100:.0f} %" for name, seconds in parts.items())
    note(console, f"\nwhere time goes: {shares}; {best.per_round:.2f} tokens per round")
    if best.speedup["mean"] < 1:
        note(console, "plain decoding is faster than every setting on these prompts")
    how = f'--draft "{best.setting.spec(exits)}" --controller "{best.setting.controller}"'
    note(console, Line.assemble("\n", (how, "cyan")))
