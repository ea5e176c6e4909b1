"""`forerun replay`, `ablate`: what any controller would do on a recorded trace, and how fast."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Annotated, Any

import typer
from rich.text import Text

from forerun.checks import whole
from forerun.cli.shared import options
from forerun.cli.shared.console import collected, note, progress, remark, status, stdout, table
from forerun.cli.shared.options import flag, option
from forerun.cli.shared.report import claim, print_json
from forerun.cli.shared.report import report as deliver
from forerun.controllers import CONTROLLERS
from forerun.errors import SettingError, UnknownNameError
from forerun.lab.bounds.bounds import lenient_bounds
from forerun.lab.traces import replay_report as report
from forerun.lab.traces.costs import Cell, CostTable
from forerun.lab.traces.results import takes_leaves
from forerun.lab.traces.trace import Trace
from forerun.lab.traces.tune import tunable, without, worth


@options.command
def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file of forerun record.")],
    costs: options.CostTable,
    controller: Annotated[list[str] | None, option("SPEC")] = None,
    rules: Annotated[str | None, option("SPECS")] = None,
    family: Annotated[list[str] | None, option("NAME")] = None,
    batch: Annotated[int, option("B", panel=options.COSTS)] = 1,
    context: options.NearContext = 128,
    bounds: Annotated[bool, flag("--bounds")] = False,
    clock: Annotated[str | None, option("KIND")] = None,
    seed: Annotated[int, option("N", "Of the clock's noise and the order of the prompts.")] = 0,
    output: Annotated[str | None, options.output("CSV")] = None,
    as_json: options.Json = False,
) -> None:
    """Predict speed, rounds and drafted tokens of controllers without running a model.

    Exact for greedy traces: counts are those of the live engine.

    Args:
        controller: like gammatune(eta=0.3); repeatable. Default: all that are registered.
        rules: judge the recorded runs by these rules, like "ears(beta=0.1);easd;cm-asd"; what
            follows is the text's own. Default: what was kept when they were recorded.
        family: only prompts of this family; repeatable.
        batch: decode so many texts together, as live, at the costs nearest to the batch's size.
        bounds: also show the share of what is possible: of the clairvoyant oracle, and of the best
            that sees only what a controller sees; if one takes second choices, also of oracles that
            judge one, or all. With --rules: the best at a price of drift.
        clock: run the real engine, governor and meter under a made-up clock, noise or cold (noise,
            and passes that are slow at first), and compare with plain decoding under another.
        output: also save a table, a row per controller and family.
    """
    whole("batch", batch, 1)
    whole("seed", seed)
    if bounds and batch > 1:
        raise SettingError("bounds are of texts decoded by themselves; leave out --batch")
    controllers = {spec: CONTROLLERS.make(spec) for spec in controller or tunable()}
    claim(output)
    costs_table = CostTable.find(costs)
    cell, synthetic = costs_table.at(batch, context), "synthetic" in costs_table.about
    texts = _of(Trace.read(trace), family or [])
    warn_of_mixed_models(texts.about, costs_table.about)
    if clock is not None:
        if bounds or batch > 1 or rules:
            why = "a clock is of texts served one by one"
            raise SettingError(f"{why}; leave out --batch, --bounds, --rules")
        return _timed(texts, cell, controllers, clock, seed, as_json)
    judges: list[str | None] = [None]
    if rules:
        from forerun.rules import RULES  # needs torch

        judges = [RULES.text(RULES.make(rule)) for rule in rules.split(";") if rule.strip()]
    limits, lenient = {}, []
    if bounds:
        with status("finding the bounds") as tell:
            if rules:
                lenient = lenient_bounds(texts, cell)
            else:
                trees = any(map(takes_leaves, controllers.values()))
                limits = report.bounds(texts, cell, tell, trees)
    if batch > 1 and cell.batch != batch and not synthetic:
        near = f"no costs of a batch of {batch}: those of {cell.batch} are taken"
        remark(f"{near}; forerun costs --batch {batch} measures them")
    runs = {rule: report.runner(texts, costs_table, batch, context, rule) for rule in judges}
    shared = cell.batch if batch == 1 else 1
    made = (
        report.result(texts, run, policy, limits, shared, rule)
        for policy, (rule, run) in product(controllers.values(), runs.items())
    )
    specs = [spec for spec in controllers for _ in runs]
    results, interrupted = collected(made, "replaying", len(specs), "replays")
    if results:
        document = report.document(results, texts, cell, batch, lenient)
        if output is not None:
            report.write_csv(results, output)
        show = partial(_show, document, specs, texts, cell, synthetic)
        deliver(document, show, as_json, output)
    if interrupted:
        raise KeyboardInterrupt


def warn_of_mixed_models(trace: Mapping[str, Any], costs: Mapping[str, Any]) -> None:
    """Warn if a trace and a table of measured costs are of different models."""
    for role in ("target", "draft"):
        recorded, measured = trace.get(role), costs.get(role)
        if not (isinstance(recorded, Mapping) and isinstance(measured, Mapping)):
            continue
        keys = recorded.get("sha256"), measured.get("sha256")
        if all(keys) and keys[0] != keys[1]:
            remark(
                f"the trace is of the {role} {recorded.get('name')} and the costs are of "
                f"{measured.get('name')}: the figures hold for no pair of models"
            )


def _timed(
    trace: Trace, cell: Cell, controllers: Mapping[str, Any], clock: str, seed: int, as_json: bool
) -> None:
    """Ratios to plain decoding, prompt by prompt, under a made-up clock."""
    from forerun.lab.traces.virtual import in_order, ratios, timed

    rows, order = {}, in_order(trace, seed)
    with progress("replaying", len(controllers)) as tell:
        for spec, made in controllers.items():
            done = timed(trace, made, cell, order, clock, seed)
            rows[spec], rows["plain"] = (
                ratios(done.plain, seconds) for seconds in (done.seconds, done.again)
            )
            tell("replaying", len(rows) - 1)
    if as_json:
        return print_json({"clock": clock, "seed": seed, "ratios": rows})
    heads = list(rows["plain"])
    shown = table("controller", right=heads, no_wrap=True)
    for spec, row in rows.items():
        shown.add_row(spec, *(f"{row[head]:.3f}" for head in heads))
    stdout().print(shown)
    note("\nplain seconds over seconds; plain is plain decoding under other noise")


def _of(trace: Trace, families: Sequence[str]) -> Trace:
    present = list(dict.fromkeys(trace.families))
    for name in families:
        if name not in present:
            raise UnknownNameError.among("family of the trace", name, present)
    if not families:
        return trace
    return trace.take([i for i, name in enumerate(trace.families) if name in families])


def _show(
    document: Mapping[str, Any], specs: Sequence[str], trace: Trace, cell: Cell, synthetic: bool
) -> None:
    """The results, the fastest first, each under its spec as it was given."""
    pairs = zip(specs, document["controllers"], strict=False)  # interrupted, there are fewer
    results = sorted(pairs, key=lambda pair: -pair[1]["families"]["all"]["speedup"]["mean"])
    size = f"{trace.prompts:,} prompts, {int(trace.sizes.sum()):,} tokens"
    together = document["batch"] if document["batch"] > 1 else cell.batch
    note(f"{size}; c = {cell.ratio:.2f}, batch {together}, context {cell.context}\n")
    first = results[0][1]
    rate = "tokens/pass" if synthetic else "tokens/s"  # a second is a target pass then
    ruled, counted = "rule" in first, ["rounds", "drafted", "wasted"]
    more = ["tokens/round", "drift"] if ruled else counted
    bounds = list(first["families"]["all"].get("share", ()))
    names = ["controller", *(["rule"] if ruled else [])]
    shown = table(*names, right=["speed-up", rate, *more, *bounds], no_wrap=True)
    for spec, result in results:
        group = result["families"]["all"]
        kept = [f"{group['tokens_per_round']['mean']:.3f}", f"{group['drift']:.4f}"]
        shown.add_row(
            spec,
            *([result["rule"]] if ruled else []),
            Text(_half(group["speedup"]), "bold"),
            f"{group['tokens_per_second']['mean']:,.{2 if synthetic else 1}f}",
            *(kept if ruled else [f"{group[name]:,}" for name in counted]),
            *(f"{group['share'][bound]['mean']:.1%}" for bound in bounds),
        )
    stdout().print(shown)
    families = [name for name in first["families"] if name != "all"]
    if len(families) > 1 and not ruled:
        note("\nspeed-up by family")
        shown = table("controller", right=families, no_wrap=True)
        for spec, result in results:
            own = (result["families"][name]["speedup"]["mean"] for name in families)
            shown.add_row(spec, *map("{:.2f}".format, own))
        stdout().print(shown)
    if bounds:
        note(f"\n{', '.join(bounds)}: share of the speed of that bound")
    note(Text("\n± is half of the 95 % interval over prompts", "dim"))
    if capped := [spec for spec, one in results if one["families"]["all"]["capped"]]:
        note(
            f"not exact for {', '.join(capped)}: drafts of more than the trace's {trace.depth} "
            "tokens were cut; record with a larger --depth"
        )
    if lenient := document.get("lenient_bound"):
        note("\nlength and leniency chosen together, all ratios known")
        shown = table("drift at most", right=["speed-up", "drift"])
        for bound in lenient:
            shown.add_row(f"{bound['budget']:g}", _half(bound["speedup"]), f"{bound['drift']:.4f}")
        stdout().print(shown)


def _half(value: dict[str, float]) -> str:
    return f"{value['mean']:.2f} ±{(value['high'] - value['low']) / 2:.2f}"


@options.command
def ablate(
    controller: Annotated[str, typer.Argument(metavar="CONTROLLER")],
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file of forerun record.")],
    costs: Annotated[list[str], option("FILE|c=10,slope=0.02", panel=options.COSTS)],
    context: options.NearContext = 128,
    seed: Annotated[int, option("N", "Of the order of the prompts.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Replay a controller without each of its mechanisms, one at a time.

    The prompts are requests of one engine, one after another. Shown is the change of the total
    speed, in per cent, with its 95 % interval over prompts.

    Args:
        controller: with all of its mechanisms, like auto.
        costs: what a round costs, as of forerun replay; repeatable, a column each.
    """
    whole("seed", seed)
    made, texts = CONTROLLERS.make(controller), Trace.read(trace)
    if not without(made):
        raise SettingError(
            f"{controller} declares no mechanisms; a field does by controllers.base.mechanism"
        )
    cells = {spec: CostTable.find(spec).at(1, context) for spec in costs}
    results = {}
    with progress("replaying", len(cells)) as tell:
        for spec, cell in cells.items():
            results[spec] = worth(texts, made, cell, seed)
            tell("replaying", len(results))
    if as_json:
        print_json({"schema": 1, "controller": CONTROLLERS.text(made), "costs": results})
        return
    shown = table("without", right=list(cells), no_wrap=True)
    shown.add_row("nothing", *(f"{one['']['speedup']:.3f}" for one in results.values()))
    for name in without(made):
        shown.add_row(name, *(_change(one[name]) for one in results.values()))
    stdout().print(shown)
    note("\nnothing: speed-up over plain decoding; else % of that, and its 95 % interval")


def _change(one: dict[str, float]) -> str:
    change, low, high = (100 * one[name] for name in ("change", "low", "high"))
    return f"{change:+.1f} [{low:+.1f}, {high:+.1f}]"
