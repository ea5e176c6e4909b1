"""``python -m forerun.zoo``: train, evaluate, and build the prompt files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.zoo.promptset import FOLDER

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The pair that ships.")

Data = Annotated[Path, typer.Option(help="Folder with books/ and tatoeba/.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def _fail(error: Exception) -> None:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(2)


@app.command()
def train(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, log and export.")] = Path(
        "zoo-run"
    ),
    minutes: Annotated[
        float | None, typer.Option(help="Time for stage 1; the schedule fits itself into it.")
    ] = None,
    distill_minutes: Annotated[
        float | None, typer.Option(help="Time for stage 2; default: a third of --minutes.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Most steps of stage 1.")] = 4000,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Decides weights and data order.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the training step.")
    ] = True,
) -> None:
    """Train target and draft together, then the draft on the target's own texts; export both."""
    from forerun.zoo.train import main

    try:
        main(
            data,
            out,
            minutes=minutes,
            distill_minutes=distill_minutes,
            steps=steps,
            device=device,
            seed=seed,
            resume=resume,
            compiled=compiled,
        )
    except (FileNotFoundError, ValueError) as error:
        _fail(error)


@app.command()
def evaluate(
    limit: Annotated[int | None, typer.Option(help="Prompts per family; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("zoo.json"),
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    device: Device = "cpu",
) -> None:
    """Measure quality, perplexity and greedy acceptance rate per family; write JSON."""
    from forerun.zoo.evaluate import evaluate as measure

    try:
        report = measure(limit=limit, split=split, device=device, say=print)
    except (FileNotFoundError, ValueError, ImportError) as error:
        _fail(error)
    report["command"] = "python -m forerun.zoo evaluate" + (f" --limit {limit}" if limit else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {out}")


@app.command()
def prompts(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = FOLDER,
) -> None:
    """Write the held-out prompt files again."""
    from forerun.zoo.build_prompts import build

    try:
        build(data, out)
    except (FileNotFoundError, ValueError) as error:
        _fail(error)


if __name__ == "__main__":
    app()
