"""`forerun calibrate`: settings of a method, measured on a pair of models."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from forerun.cache import write_json
from forerun.cli.shared import options
from forerun.cli.shared.console import note, progress, stdout, table
from forerun.cli.shared.models import Chat, Models
from forerun.cli.shared.options import MODELS, PROMPTS, VALIDATION, Fields, flag, option
from forerun.cli.shared.report import claim, report
from forerun.errors import require
from forerun.prompts import default_source, find_prompts
from forerun.settings import Settings

app = options.group("Measure the settings a method needs for your models, as its paper does.")


DRAFT = Annotated[
    str | None,
    option(
        "ID_OR_PATH",
        "Its draft model, or none. Default: the shipped draft for the shipped target.",
        panel=MODELS,
    ),
]


@app.command()
@options.command
def easd(
    models: Annotated[Models, Fields(Models, draft=DRAFT)],
    chat: Annotated[Chat, Fields(Chat)],
    data: Annotated[str | None, options.prompts(VALIDATION)] = None,
    share: Annotated[float, option("P")] = 0.05,
    max_new_tokens: options.OwnMaxNewTokens = None,
    limit: options.Limit = None,
    batch_size: Annotated[int, option("B", "Prompts decoded together.", panel=PROMPTS)] = 16,
    target_only: Annotated[bool, flag("--target-only")] = False,
    output: Annotated[str | None, options.output("FILE", "Also save the result as JSON.")] = None,
    as_json: options.Json = False,
) -> None:
    """Find the entropy threshold of the rule easd for a pair of models.

    Decodes prompts greedily, averages the highest entropies, prints the rule.

    Args:
        share: of the steps, how many count as the most uncertain.
        target_only: leave the draft's entropy out; for drafters without one, like lookup.
    """
    source = default_source(data, models.target, "data")
    require(0 < share <= 1, "share", share, "in (0, 1]")
    claim(output)
    # As in the paper, the target decodes without penalties.
    requested = find_prompts(source, "val", limit, max_new_tokens, penalised=False)
    how = Settings(controller="fixed(5)")
    job, rows = models.open(requested, how=how, batch_size=batch_size, chat=chat)

    from forerun.lab import calibrate
    from forerun.lab.provenance import versions

    with progress("decoding", len(rows), "prompts") as tell:
        measured = calibrate.easd(
            job.model,
            [row.ids for row in rows],
            share=share,
            sampling=[row.sampling for row in rows],
            batch_size=batch_size,
            target_only=target_only,
            progress=tell,
        )
    settings = {name: job.about[name] for name in ("target", "draft", "device", "dtype", "chat")}
    settings |= {"data": source, "limit": limit, "max_new_tokens": max_new_tokens}
    about = {"settings": settings, "versions": versions()}
    document = {"schema": calibrate.SCHEMA, **measured, **about}
    if output is not None:
        write_json(Path(output), document)
    report(document, partial(_show, document), as_json, output)


def _show(result: dict[str, Any]) -> None:
    steps = result["target"]["steps"]
    texts = f"{result['prompts']:,} prompt{'s' if result['prompts'] > 1 else ''}"
    note(f"{texts}, {steps:,} decoding steps\n")
    shown = table("entropy in nats", right=("mean", "median", "95 %", "99 %", "highest"))
    shown.add_row("target", *_cells(result["target"]))
    if result["draft"] is not None:
        shown.add_row("draft", *_cells(result["draft"]))
    stdout().print(shown)
    of = (
        f"the {result['top']:,} highest target entropies ({result['share'] * 100:g} % of the steps)"
    )
    note(Text.assemble("\n", (f"τ_H = {result['entropy']:.4f}", "bold"), f"   mean of {of}"))
    if result["both"] is None:
        note("the draft was not read: the target alone decides, with any drafter")
    else:
        share = f"{max(result['both'] * 100, 0.01):.2f}" if result["both"] else "0"
        note(f"both models above τ_H: {share} % of the steps")
    if result["both"] == 0:
        note("so the penalty never fires on these prompts; a larger --share lowers τ_H")
    note(Text.assemble("\n", (f'--rule "{result["rule"]}"', "cyan")))


def _cells(values: dict[str, float]) -> list[str]:
    return [f"{values[name]:.3f}" for name in ("mean", "median", "q95", "q99", "max")]
