"""`forerun record`: a trace that any controller can be replayed over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from forerun.cli.console import note, stderr, stdout
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from forerun.cli.prompts import Found
    from forerun.lab.record import Part, Task
    from forerun.lab.trace import Trace

SCHEMA = 1
MODELS = "Models"
PROMPTS = "Prompts"
SAMPLING = "Sampling"
OUTPUT = "Output"


def record(
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE|builtin:FAMILY",
            help="A file as for generate --prompt-file (- reads stdin), or the shipped prompts of "
            "one family or (builtin:all) of all.",
            rich_help_panel=PROMPTS,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="TRACE",
            help="The Parquet file to write.",
            rich_help_panel=OUTPUT,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A folder or a Hugging Face id. Default: the shipped one.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="Its draft model. Default: the shipped draft for the shipped target.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="val|test",
            help="Of the shipped prompts: val to develop on, test to report on.",
            rich_help_panel=PROMPTS,
        ),
    ] = "val",
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Only the first N prompts of each family.", rich_help_panel=PROMPTS
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Most tokens to write; less where a prompt asks for less.",
            rich_help_panel=PROMPTS,
        ),
    ] = 64,
    depth: Annotated[
        int,
        typer.Option(
            metavar="K", help="Tokens drafted from each position.", rich_help_panel=OUTPUT
        ),
    ] = 24,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", help="0 is greedy; higher is more random.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Keep the K most likely tokens; 0 keeps all.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Keep the smallest set with this much probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Drop tokens below P times the highest probability.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Above 1 makes tokens already in the text unlikely. Default: 1; 1.2 for the "
            "shipped stories, which loop without it.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            metavar="",
            help="Go on after the end of text.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            metavar="S",
            help="Prompt i gets the random stream S + i, counted from 0.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0,
    batch_size: Annotated[
        int,
        typer.Option(metavar="B", help="Prompts recorded together.", rich_help_panel=PROMPTS),
    ] = 16,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            metavar="",
            help="Print one JSON document and nothing else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="cpu, cuda, cuda:1, ... Default: a GPU if any.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="auto, float32, bfloat16 or float16. Default: as the model was saved.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            metavar="",
            help="Run code that comes with a checkpoint.",
            rich_help_panel=MODELS,
        ),
    ] = False,
) -> None:
    """Write down what the draft says at every position of the target's own texts.

    From the file, forerun replay predicts the speed of any controller without running a model.
    Interrupted, it keeps the prompts that are complete.
    """
    from forerun.checks import whole
    from forerun.cli.inputs import make_sampling
    from forerun.cli.prompts import find_prompts, tokenise
    from forerun.lab.trace import check_writable

    whole("depth", depth, 1)
    whole("seed", seed)
    require(limit is None or limit >= 1, "limit", limit, "≥ 1")
    check_writable(output)
    given: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "ignore_eos": ignore_eos,
    }
    forced = {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
    make_sampling({**given, **forced, "seed": seed, "max_new_tokens": max_new_tokens})
    asked = _first(find_prompts(prompts, split, None, max_new_tokens), limit)
    builtin = prompts.partition(":")[0] == "builtin"
    if not builtin:
        given, forced = {**given, **forced}, {}  # the file's own settings come first
    found = [
        replace(
            one,
            request=replace(
                one.request,
                settings={**given, "seed": seed + i, **one.request.settings, **forced},
            ),
        )
        for i, one in enumerate(asked)
    ]
    _check_draft(target, draft)

    from forerun.cli.run import load_job

    job = load_job(
        target,
        draft,
        "fixed(0)",
        "standard",
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    chosen = tokenise(job.model, found)

    from forerun.lab.record import Task, finish, parts

    tasks = [Task(p.family, p.id, p.ids, p.sampling) for p in chosen]
    about = {
        "prompts": prompts if builtin else Path(prompts).name,
        "split": split if builtin else None,
        "limit": limit,
        "seed": seed,
    }
    done: list[Part] = []

    def save() -> Trace:
        trace = finish(job.model, tasks, done, batch_size, about)
        trace.write(output)
        return trace

    try:
        with _progress(tasks) as tell:
            for part in parts(job.model, tasks, depth=depth, batch_size=batch_size):
                done.append(part)
                tell(part.trace.prompts)
    except KeyboardInterrupt:
        if done:
            note(stderr(), f"interrupted; {output} holds {save().prompts} of {len(tasks)} prompts")
        else:
            note(stderr(), "interrupted before the first batch was complete; nothing is saved")
        raise
    trace = save()
    if as_json:
        document = {"schema": SCHEMA, "families": _families(trace), "about": trace.about}
        print(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2))
        return
    _show(trace, output)


def _first(found: Sequence[Found], limit: int | None) -> list[Found]:
    """The first of each family."""
    seen: Counter[str] = Counter()
    out = []
    for one in found:
        seen[one.family] += 1
        if limit is None or seen[one.family] <= limit:
            out.append(one)
    return out


def _check_draft(target: str | None, draft: str | None) -> None:
    """Refuse a drafter that is no model before anything is loaded."""
    from forerun.drafters.model import ModelDraft
    from forerun.model import drafter_spec

    if draft is None:
        if target is not None:
            raise SettingError("recording needs a draft model; give --draft ID_OR_PATH")
    elif not isinstance(drafter_spec(draft), ModelDraft):
        raise SettingError(
            f"recording needs a draft model, and --draft {draft} is none; give a folder or a "
            "Hugging Face id"
        )


def _families(trace: Trace) -> dict[str, dict[str, Any]]:
    """What is in a trace, family by family."""
    out = {}
    for family in dict.fromkeys(trace.families):
        some = trace.take([i for i, name in enumerate(trace.families) if name == family])
        matches = some.matches[some.valid]
        out[family] = {
            "prompts": some.prompts,
            "tokens": len(matches),
            "first_kept": round(float((matches > 0).mean()), 4),
            "run_kept": round(float(matches.mean()), 3),
        }
    return out


def _show(trace: Trace, output: str) -> None:
    """The summary, for people."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("family", header_style="dim")
    for name in ("prompts", "tokens", "first drafted kept", f"of {trace.depth} drafted kept"):
        table.add_column(name, header_style="dim", justify="right")
    for family, one in _families(trace).items():
        table.add_row(
            family,
            f"{one['prompts']:,}",
            f"{one['tokens']:,}",
            f"{one['first_kept'] * 100:.1f} %",
            f"{one['run_kept']:.2f}",
        )
    stdout().print(table)
    spent = trace.about["seconds"]
    note(
        stdout(),
        f"\n{spent['total']:.1f} s, of which writing the texts took {spent['plain']:.1f} s: "
        f"{spent['ratio']:.2f} times plain generation",
    )
    note(stderr(), f"saved to {output}")


@contextmanager
def _progress(tasks: Sequence[Task]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, on terminals only, that is told of prompts done."""
    from rich import progress as rich

    console = stderr()
    shown = rich.Progress(
        rich.TextColumn("recording {task.completed}/{task.total} prompts"),
        rich.BarColumn(),
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )
    bar = shown.add_task("recording", total=len(tasks))
    with shown:
        yield lambda more: shown.advance(bar, more)
