"""`python -m recipes`: train, finish, distill, evaluate, and build the prompt files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.zoo import DRAFT, FOLDER, TARGET, families, long_families

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train the models that ship.")

Data = Annotated[Path, typer.Option(help="Folder with books/ and tatoeba/.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Task = Annotated[str, typer.Option(help="translation or digest.")]
Compiled = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the training step (bfloat16).")
]


@contextmanager
def _errors() -> Iterator[None]:
    """Says in one line what is wrong with the arguments or missing."""
    try:
        yield
    except (FileNotFoundError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


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
    shape: Annotated[
        str | None, typer.Option(help="LAYERSxHIDDEN of a smaller model, for experiments: 8x160.")
    ] = None,
    draft_shape: Annotated[
        str | None, typer.Option(help="LAYERSxHIDDEN of the draft that distill will make.")
    ] = None,
    exit_weight: Annotated[
        float | None, typer.Option(help="Weight of the early-exit loss; 0 leaves it out.")
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Peak learning rates, as a share of the recipe's.")
    ] = 1.0,
    device: Device = "cpu",
    compiled: Compiled = True,
) -> None:
    """Train the target; stop it at any time, resume it, and end it with --decay."""
    from recipes.recipe import variant
    from recipes.train import Beginning
    from recipes.train import train as run

    with _errors():
        recipe = variant(shape, exit_weight, draft_shape, rate)
        beginning = Beginning(recipe, seed, start, resume, device)
        run(data, out, beginning, steps=steps, decay=decay, compiled=compiled)


@app.command()
def translator(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for checkpoint and log.")] = Path("translator"),
    steps: Annotated[int | None, typer.Option(help="Stop at this step; default: never.")] = None,
    decay: Annotated[
        int | None,
        typer.Option(help="Let the learning rate fall to zero over so many steps, then export."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides weights and data order.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    task: Task = "translation",
) -> None:
    """Train the encoder-decoder translator; stop and resume it, and end it with --decay.

    With --task digest it is a smaller model that learns to condense passages; a run that is
    resumed keeps its task.
    """
    from recipes.marian import recipe_for
    from recipes.marian import train as run

    with _errors():
        run(data, out, steps=steps, decay=decay, seed=seed, resume=resume, recipe=recipe_for(task))


@app.command()
def pairs(
    data: Data,
    out: Annotated[Path, typer.Option(help="The file.")] = Path("pairs.tsv"),
    limit: Annotated[int, typer.Option(help="Texts.")] = 20000,
    seed: Annotated[int, typer.Option(help="Decides which, and how they are joined.")] = 0,
    task: Task = "translation",
) -> None:
    """Write texts of the translator's training, or the digest's, for forerun train-draft."""
    from recipes.marian import write_pairs

    with _errors():
        print(f"written: {write_pairs(data, out, limit, seed, task):,} texts to {out}")


@app.command()
def bleu(
    data: Data,
    model: Annotated[
        str, typer.Argument(help="Folder of an exported translator; default: the one that ships.")
    ] = "translator",
    limit: Annotated[int, typer.Option(help="Test sentences.")] = 300,
) -> None:
    """Measure a translator's SacreBLEU on held-out sentences and short texts; needs sacrebleu."""
    from recipes.marian import evaluate as measure

    with _errors():
        print(json.dumps(measure(model, data, limit)))


@app.command()
def finish(
    data: Data,
    run: Annotated[Path, typer.Option(help="Folder of a target's run; it stays as it is.")],
    out: Annotated[Path, typer.Option(help="Folder for the finished copy.")],
    steps: Annotated[int, typer.Option(help="Steps over which the learning rate falls.")] = 400,
    device: Device = "cpu",
    compiled: Compiled = True,
) -> None:
    """Let the learning rate of a copy of a run fall to zero; export its target."""
    from recipes.train import finish as end

    with _errors():
        print(f"written: {end(data, run, out, steps=steps, device=device, compiled=compiled)}")


@app.command()
def average(
    first: Annotated[Path, typer.Argument(help="Folder of an exported model.")],
    second: Annotated[Path, typer.Argument(help="Folder of one that was trained on from it.")],
    out: Annotated[Path, typer.Option(help="Folder for the model between them.")],
    share: Annotated[float, typer.Option(help="Of the second's weights, 0 to 1.")] = 0.5,
) -> None:
    """Write the weighted mean of two models' weights."""
    from recipes.export import average as between

    with _errors():
        between(first, second, share, out)
        print(f"written: {out}")


@app.command("round")
def round_weights(
    folder: Annotated[Path, typer.Argument(help="Folder of an exported model or a draft.")],
) -> None:
    """Store its matrices in 8 bits, as the translator and its drafts ship."""
    from recipes.export import round_to_8_bits

    with _errors():
        round_to_8_bits(folder)
        print(f"written: {folder}")


@app.command()
def distill(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder of a finished target.")],
    steps: Annotated[int, typer.Option(help="Steps of learning, after copying practice.")] = 2000,
    texts: Annotated[int, typer.Option(help="Tokens that the target writes.")] = 400_000,
    start: Annotated[
        Path | None,
        typer.Option(help="An exported draft to begin from, without practice."),
    ] = None,
    device: Device = "cpu",
    compiled: Compiled = True,
) -> None:
    """Train a draft on what the finished target writes itself; export it."""
    from recipes.distill import distill as learn

    with _errors():
        how: dict[str, Any] = {"device": device, "compiled": compiled}
        print(f"written: {learn(data, out, steps=steps, texts=texts, start=start, **how)}")


@app.command()
def curves(out: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Print a run's validation curves as a Markdown table."""
    from recipes.train import curves as table

    with _errors():
        print(table(out))


@app.command()
def evaluate(
    models: Annotated[
        Path | None,
        typer.Option(help="Folder with target/ and perhaps draft/; default: the shipped pair."),
    ] = None,
    long: Annotated[bool, typer.Option(help="Also the families with long outputs.")] = False,
    limit: Annotated[int | None, typer.Option(help="Prompts per family; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the report.", dir_okay=False)] = Path(
        "zoo.json"
    ),
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    device: Device = "cpu",
) -> None:
    """Measure quality, perplexity and greedy acceptance rate per family; write JSON."""
    from recipes.evaluate import evaluate as measure

    with _errors():
        report = measure(
            target=models / "target" if models else TARGET,
            draft=(models / "draft" if (models / "draft").exists() else None) if models else DRAFT,
            names=(*families(), *long_families()) if long else families(),
            limit=limit,
            split=split,
            device=device,
            say=print,
        )
    report["command"] = "python -m recipes evaluate" + (f" --limit {limit}" if limit else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {out}")


@app.command()
def prompts(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = FOLDER,
) -> None:
    """Write the held-out prompt files again."""
    from recipes.build_prompts import build

    with _errors():
        build(data, out)


@app.command("training-prompts")
def training_prompts(
    data: Data,
    out: Annotated[Path, typer.Option(help="The file.")] = Path("prompts.jsonl"),
    limit: Annotated[int, typer.Option(help="Prompts.")] = 20000,
    seed: Annotated[int, typer.Option(help="Decides which.")] = 0,
    tasks: Annotated[
        int, typer.Option(help="Of every task, beside two stories; 4: alike by tokens.")
    ] = 1,
) -> None:
    """Write prompts of the pair's training, for forerun train-draft --data."""
    from recipes.build_prompts import write_training_prompts

    with _errors():
        print(
            f"written: {write_training_prompts(data, out, limit, seed, tasks):,} prompts to {out}"
        )


if __name__ == "__main__":
    app()
