"""`forerun sweep`: settings of a drafter, tuned for a model."""

from functools import partial
from typing import Annotated, Any

from rich.text import Text as Line

from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, remark, stdout, table
from forerun.cli.shared.models import ALONE, Models
from forerun.cli.shared.options import MODELS, OUTPUT, SAMPLING, VALIDATION, Fields, flag, option
from forerun.cli.shared.report import claim, report
from forerun.errors import SettingError, optional, require
from forerun.prompts import default_source, find_prompts, is_shipped, seeded
from forerun.registry import parse
from forerun.requests import Sampling

OF_FILE, OF_FAMILY = 30, 5  # prompts by default
app = options.group("Tune a drafter's settings for your model.")


@app.command()
@options.command
def specbound(
    models: Annotated[Models, Fields(Models, only=ALONE)],
    sampling: Annotated[dict[str, Any], Fields(Sampling, SAMPLING, ("temperature",))],
    exits: Annotated[str | None, option("DIR", panel=MODELS)] = None,
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
    keep: Annotated[bool, flag("--keep", panel=OUTPUT)] = False,
    as_json: options.Json = False,
) -> None:
    """Find threshold, annealing, depth, width and exit layers of specbound for a model.

    Writes a text per prompt, counts what every setting would take on it, searches by these counts,
    and times the best settings against plain decoding.

    Args:
        exits: exit heads, made by train-draft exits. Default: the shipped ones for the shipped
            target, else, as with "", the model's own head at every layer.
        keep: also keep them beside the exit heads: specbound's defaults with these heads.
    """
    source = default_source(prompts, models.target)
    for name, value in (("width", width), ("budget", budget), ("confirm", confirm)):
        require(value >= 1, name, value, "≥ 1")
    require(seed >= 0, "seed", seed, "≥ 0")
    claim(output)
    if keep and not exits:
        raise SettingError("--keep writes beside exit heads; name their folder with --exits")
    most = (OF_FAMILY if is_shipped(source) else OF_FILE) if limit is None else limit
    requested = seeded(find_prompts(source, "val", most, max_new_tokens), seed)

    from forerun.lab.exits.sweep import Sweep
    from forerun.runtime.heads import keep_settings

    optional("optuna", "lab")
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
    sweep = Sweep(job.model, exits, width=width, seed=seed)
    try:
        with progress("writing", len(rows)) as tell:
            document = sweep.run(rows, budget, confirm, about, tell)
    except KeyboardInterrupt:
        if output is not None and sweep.search is not None and sweep.best is not None:
            predicted = {"complete": False, "predicted": sweep.search.score(sweep.best)}
            sweep.settings(about | predicted).write(output)
            remark(f"interrupted; the best settings so far are in {output}")
        raise
    if output is not None:
        sweep.settings(document["about"]).write(output)
    if keep:
        keep_settings(str(exits), document["about"]["settings"])
    report(document, partial(_show, document), as_json, output)


def _show(document: dict[str, Any]) -> None:
    about, live = document["about"], {one["draft"]: one for one in document["confirmed"]}
    note(
        f"{about['prompts_used']:,} texts, {document['tried']:,} settings, "
        f"{document['positions']:,} positions\n"
    )
    right = ("threshold", "anneal", "width", "bonus", "predicted", "live", "95 % interval")
    shown = table("layers", right=right)
    listed = {one["draft"]: one["predicted"] for one in (*document["top"], *live.values())}
    for draft, predicted in listed.items():
        own, timed = parse(draft).kwargs, live.get(draft, {}).get("speedup")
        shown.add_row(
            own["layers"] + " (untuned)" * (draft == document["untuned"]),
            f"{own['threshold']:.2f}",
            f"{own['anneal']:g}",
            str(own["width"]),
            "yes" if own.get("bonus", True) else "no",
            f"{predicted:.2f}×",
            "" if timed is None else f"{timed['mean']:.2f}×",
            "" if timed is None else f"{timed['low']:.2f}–{timed['high']:.2f}",
        )
    stdout().print(shown)
    note(Line("\nwhat changes alone do to the predicted speed-up", "dim"))
    for name, values in document["sensitivity"].items():
        if name == "threshold":
            values = values[:: max(1, len(values) // 10)]
        note(f"{name:<10}" + "  ".join(f"{value} {score:.2f}" for value, score in values))
    best = document["confirmed"][0]
    shares = ", ".join(f"{name} {x * 100:.0f} %" for name, x in document["time"].items())
    note(f"\nwhere time goes: {shares}; {best['tokens_per_round']:.2f} tokens per round")
    if best["speedup"]["mean"] < 1:
        note("plain decoding is faster than every setting on these prompts")
    how = f'--draft "{best["draft"]}" --controller "{document["controller"]}"'
    note(Line.assemble("\n", (how, "cyan")))
