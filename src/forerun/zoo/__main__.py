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
    out: Annotated[Path, typer.Option(help="Folder for checkpoint and log.")] = Path("zoo-run"),
    steps: Annotated[int | None, typer.Option(help="Stop at this step; default: never.")] = None,
    decay: Annotated[
        int | None, typer.Option(help="Let the learning rate fall to zero over so many steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides weights and data order.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    start: Annotated[
        Path | None, typer.Option(help="An exported model to begin from; default: fresh weights.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the training step.")
    ] = True,
) -> None:
    """Train the target; stop it at any time, resume it, and end it with --decay."""
    from forerun.zoo.train import train as run

    try:
        run(
            data,
            out,
            steps=steps,
            decay=decay,
            seed=seed,
            resume=resume,
            start=start,
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
