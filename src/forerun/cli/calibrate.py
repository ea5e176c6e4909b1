"""`forerun calibrate`: settings of a method, measured on a pair of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from forerun.cli.console import note, stderr, stdout
from forerun.errors import PromptError, SettingError, UnknownNameError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.cli.inputs import Request
    from forerun.lab.calibrate import Calibration, Entropies

BUILTIN = "builtin"
SCHEMA = 1

app = typer.Typer(
    help="Measure the settings a method needs for your models, as its paper does.",
    no_args_is_help=False,
)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def easd(
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A folder or a Hugging Face id. Default: the shipped one.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="Its draft model, or none. Default: the shipped draft for the shipped target.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|builtin[:FAMILY]",
            help="Validation prompts: a file as for generate --prompt-file (- reads stdin), or the "
            "shipped ones, of one family or of all. Default for the shipped target: builtin.",
        ),
    ] = None,
    share: Annotated[
        float,
        typer.Option(metavar="P", help="Of the steps, how many count as the most uncertain."),
    ] = 0.05,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Most tokens per prompt. Default: as the prompt says, or 128."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Only the first N prompts.")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="B", help="Prompts decoded together.")] = 16,
    target_only: Annotated[
        bool,
        typer.Option(
            "--target-only",
            metavar="",
            help="Leave the draft's entropy out; for drafters without one, like lookup.",
        ),
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also save the result as JSON."),
    ] = None,
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
    """Find the entropy threshold of the rule easd for a pair of models.

    Decodes prompts greedily, averages the highest entropies, prints the rule.
    """
    if data is None and target is not None:
        raise SettingError(
            "no prompts; give --data FILE with prompts of your task, or --data builtin"
        )
    data = data or BUILTIN
    require(0 < share <= 1, "share", share, "in (0, 1]")
    require(max_new_tokens is None or max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "≥ 1")
    require(limit is None or limit >= 1, "limit", limit, "≥ 1")
    if output is not None:
        _check_writable(Path(output))
    requests = read_data(data, max_new_tokens, limit)

    from forerun.cli.inputs import prepare
    from forerun.cli.report import versions
    from forerun.cli.run import load_job

    if not target_only:
        _check_draft(target, draft)
    job = load_job(
        target,
        draft,
        "gammatune+",
        "standard",
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    common = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    rows = prepare(job.model, requests, common)

    from forerun.lab import calibrate

    with _progress(len(rows)) as tell:
        found = calibrate.easd(
            job.model,
            [row.ids for row in rows],
            share=share,
            sampling=[row.sampling for row in rows],
            batch_size=batch_size,
            target_only=target_only,
            progress=tell,
        )
    settings = {name: job.about[name] for name in ("target", "draft", "device", "dtype")}
    settings |= {"data": data, "limit": limit, "max_new_tokens": max_new_tokens}
    document = {
        "schema": SCHEMA,
        **found.to_json(),
        "settings": settings,
        "versions": versions(),
    }
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
    if output is not None:
        Path(output).write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    _show(found)
    if output is not None:
        note(stderr(), f"saved to {output}")


def read_data(data: str, max_new_tokens: int | None, limit: int | None) -> list[Request]:
    """The validation prompts the user means; of the shipped ones never those for testing."""
    from forerun.cli.inputs import Request, read_requests
    from forerun.zoo import families, prompts

    name, _, family = data.partition(":")
    if name != BUILTIN:
        return read_requests(None, data)[:limit]
    if family and family not in families():
        raise UnknownNameError.among("family of shipped prompts", family, families())
    # In turns, so that the first few are of every family.
    chosen = [prompts(f, "val") for f in ([family] if family else families())]
    mixed = [p for p in chain(*zip_longest(*chosen)) if p is not None]
    if not mixed:
        raise PromptError("the shipped prompts are not in this copy; give --data FILE")
    return [
        Request(p.prompt, {"max_new_tokens": max_new_tokens or p.max_new_tokens}, p.id)
        for p in mixed[:limit]
    ]


def _check_draft(target: str | None, draft: str | None) -> None:
    """Refuse a drafter that has no entropy before anything is loaded."""
    from forerun.drafters.lookup import Lookup
    from forerun.model import drafter_spec

    by_default = draft is None and target is not None
    if by_default or (draft is not None and isinstance(drafter_spec(draft), Lookup)):
        raise SettingError(
            "the penalty of easd needs the draft's entropy, and lookup has no distribution"
            f"{' (it is the default drafter of your own target)' if by_default else ''}; give "
            "--draft ID_OR_PATH, or --target-only for easd(overlap=0,draft_entropy=False)"
        )


def _check_writable(path: Path) -> None:
    """Tell now what would otherwise be told after the work."""
    if path.is_dir():
        raise SettingError(f"-o {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise SettingError(f"-o {path}: there is no folder {path.parent}")


def _show(found: Calibration) -> None:
    """The summary, for people."""
    console = stdout()
    steps = found.target.steps
    texts = f"{found.prompts:,} prompt{'s' if found.prompts > 1 else ''}"
    note(console, f"{texts}, {steps:,} decoding steps\n")
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("entropy in nats", header_style="dim")
    for name in ("mean", "median", "95 %", "99 %", "highest"):
        table.add_column(name, header_style="dim", justify="right")
    table.add_row("target", *_cells(found.target))
    if found.draft is not None:
        table.add_row("draft", *_cells(found.draft))
    console.print(table)
    of = f"the {found.top:,} highest target entropies ({found.share * 100:g} % of the steps)"
    note(console, Text.assemble("\n", (f"τ_H = {found.entropy:.4f}", "bold"), f"   mean of {of}"))
    if found.both is None:
        note(console, "the draft was not read: the target alone decides, with any drafter")
    else:
        note(console, f"both models above τ_H: {_percent(found.both)} of the steps")
    if found.both == 0:
        note(console, "so the penalty never fires on these prompts; a larger --share lowers τ_H")
    note(console, Text.assemble("\n", (f'--rule "{found.rule}"', "cyan")))


def _cells(values: Entropies) -> list[str]:
    numbers = (values.mean, values.median, values.q95, values.q99, values.max)
    return [f"{number:.3f}" for number in numbers]


def _percent(share: float) -> str:
    return "0 %" if share == 0 else f"{max(share * 100, 0.01):.2f} %"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr, on terminals only, that is told the phase and the prompts done."""
    from rich import progress as bars

    console = stderr()
    bar: Any = bars.Progress(
        bars.TextColumn("{task.description:<8} {task.completed}/{task.total} prompts"),
        bars.BarColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    phases: dict[str, Any] = {}

    def tell(phase: str, done: int) -> None:
        if phase not in phases:
            phases[phase] = bar.add_task(phase, total=total)
        bar.update(phases[phase], completed=done)

    tell("decoding", 0)
    with bar:
        yield tell
