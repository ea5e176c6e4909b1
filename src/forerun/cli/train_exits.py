"""`forerun train-exits`: heads that let a model stop early."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from forerun.cli.console import note, stderr, stdout
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.cli.run import Job
    from forerun.training.exit_heads import LayerReport, Settings
    from forerun.training.features import Document, Features

SCHEMA = 1


def train_exits(
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="DIR", help="Where exits.safetensors and .json go."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|zoo:DIR|builtin",
            help="A text file or a folder of .txt files; a .jsonl file of prompts, which the "
            'target continues itself, or of {"text": ...}; zoo:DIR, training prompts of the '
            "shipped models from their data folder; builtin, the shipped validation prompts.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="A folder or a Hugging Face id. Default: the shipped one.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Layers to exit after. Default: about six, evenly spaced."
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            metavar="light|full",
            help="An affine map before the model's own LM head, or an LM head per layer.",
        ),
    ] = "light",
    rank: Annotated[
        int, typer.Option(metavar="R", help="Of light heads: small for large models; 0 is full.")
    ] = 0,
    vocab: Annotated[
        int,
        typer.Option(
            metavar="N", help="The heads say only the N most frequent tokens: cheaper; 0 is all."
        ),
    ] = 0,
    loss: Annotated[
        str,
        typer.Option(
            metavar="hard|distill", help="Learn the last layer's top token, or its distribution."
        ),
    ] = "hard",
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Most positions to learn from, held-out ones included.")
    ] = 200_000,
    epochs: Annotated[int, typer.Option(metavar="N", help="Passes over them.")] = 4,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="Most minutes of training; the schedule fits itself in."),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Positions per step.")] = 256,
    lr: Annotated[
        float | None,
        typer.Option(metavar="X", help="Peak learning rate. Default: 0.25 / hidden size."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Decides texts, order and start.")] = 0,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where features are kept; may be deleted after. Default: -o/cache."
        ),
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
    """Train heads for early exits; the model itself stays as it is.

    Runs the model once over the texts, keeps what its layers say on disk, and trains all heads
    from there to say what the last layer says. Interrupted, the same command goes on.
    """
    if data is None:
        raise SettingError(
            "no texts; give --data with a text file, a folder, a .jsonl file of prompts, or builtin"
        )
    require(tokens >= 1, "tokens", tokens, "≥ 1")
    asked = _parse_layers(layers)
    out, kept = Path(output), Path(cache) if cache is not None else Path(output) / "cache"
    for folder in (out, kept):
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"{folder} is a file; name a folder")

    from forerun.training.exit_heads import Settings

    settings = Settings(head, rank, vocab, loss, epochs, minutes, batch, lr, seed)

    from forerun.cli.exit_texts import open_source

    source = open_source(data, seed)

    from forerun.cli.exit_texts import GROUP, hold_out, read_documents
    from forerun.cli.run import load_job
    from forerun.runtime.heads import check_layers, default_layers
    from forerun.runtime.layers import LayerAccess
    from forerun.training.features import fingerprint

    job = load_job(
        target,
        "none",
        "fixed(0)",
        "standard",
        batch_size=GROUP,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    model: Any = job.model.target.model  # type: ignore[attr-defined]
    access = LayerAccess(model)
    exits = check_layers(asked or default_layers(access.layers), access.layers)
    if exits[-1] == access.layers:
        raise SettingError(
            f"layer {exits[-1]} is the model's last and needs no head; exit layers are 1 to "
            f"{access.layers - 1}"
        )
    require(rank <= access.width, "rank", rank, f"at most the hidden size, {access.width}")
    require(vocab <= len(access.unembedding), "vocab", vocab, "at most the model's vocabulary")
    identity = fingerprint(model)
    began = time.perf_counter()
    try:
        with _bars() as bar:
            documents = read_documents(
                source,
                job,
                kept,
                tokens=tokens,
                seed=seed,
                identity=f"{identity} {data}",
                tell=bar("texts", tokens),
            )
            parts = hold_out(documents)
            trained, held = _features(access, parts, exits, kept, identity, bar)
            found = _train(access, trained, held, settings, kept, bar)
    except KeyboardInterrupt:
        note(stderr(), "interrupted; the same command goes on from here")
        raise
    heads, before, after = found
    training = {
        "data": Path(data).name if not data.startswith("zoo:") else "zoo",
        **asdict(settings),
        "positions": trained.count,
        "held_out": held.count,
        "seconds": round(time.perf_counter() - began, 1),
        "lens": [asdict(report) for report in before],
        "trained": [asdict(report) for report in after],
    }
    _finish(job, heads, training, identity, out, as_json)


def _parse_layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--layers wants numbers like 2,4,6, got {text!r}") from error


def _features(
    access: Any,
    parts: tuple[list[Document], list[Document]],
    exits: tuple[int, ...],
    folder: Path,
    identity: str,
    bar: Callable[[str, int], Callable[[int], None]],
) -> tuple[Features, Features]:
    """Both caches, with their size told before they are written."""
    from forerun.training.features import cache_bytes, collect, positions_of

    count = sum(map(positions_of, [*parts[0], *parts[1]]))
    size = cache_bytes(count, len(exits), access.width)
    note(
        stderr(),
        f"features of {count:,} positions after {len(exits)} layers: {decimal(size)} in {folder}",
    )
    tell = bar("features", count)
    held = collect(access, parts[1], exits, folder / "held-out", identity=identity, tell=tell)
    done = held.count
    trained = collect(
        access,
        parts[0],
        exits,
        folder / "training",
        identity=identity,
        tell=lambda more: tell(done + more),
    )
    tell(count)  # nothing was told if both were there already
    return trained, held


def _train(
    access: Any,
    trained: Features,
    held: Features,
    settings: Settings,
    folder: Path,
    bar: Callable[[str, int], Callable[[int], None]],
) -> tuple[Any, list[LayerReport], list[LayerReport]]:
    """The heads, and the reports before and after."""
    from forerun.runtime.layers import LogitLens
    from forerun.training.exit_heads import CHECKPOINT, evaluate, train

    exits = list(held.hidden)
    before = evaluate(access, LogitLens(access), held, exits)
    tell = bar("training", 1000)
    heads = train(
        access,
        trained,
        settings,
        checkpoint=folder / CHECKPOINT,
        tell=lambda share, loss: tell(int(share * 1000)),
    )
    return heads, before, evaluate(access, heads, held, exits)


def _finish(
    job: Job, heads: Any, training: dict[str, Any], identity: str, out: Path, as_json: bool
) -> None:
    from forerun.cli.report import versions
    from forerun.runtime.heads import WEIGHTS, save_heads

    heads.about = {
        "target": Path(job.about["target"]).name,
        "fingerprint": identity,
        "training": training,
        "versions": {k: v for k, v in versions().items() if k != "platform"},
    }
    save_heads(heads, out)
    size = (out / WEIGHTS).stat().st_size
    if as_json:
        document = {
            "schema": SCHEMA,
            "kind": heads.kind,
            "layers": list(heads.layers),
            "bytes": size,
            **heads.about,
        }
        print(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2))
        return
    _show(training)
    note(stderr(), f"saved to {out} ({decimal(size)}); use them with --exits {out}")


def _show(training: dict[str, Any]) -> None:
    console = stdout()
    note(console, f"agreement with the last layer on {training['held_out']:,} held-out positions\n")
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("after layer", "logit lens", "trained", "confidence", "calibration error"):
        table.add_column(name, header_style="dim", justify="right")
    for lens, own in zip(training["lens"], training["trained"], strict=True):
        shares = (lens["agreement"], own["agreement"], own["confidence"], own["error"])
        table.add_row(str(own["layer"]), *(f"{share * 100:.1f} %" for share in shares))
    console.print(table)


@contextmanager
def _bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Bars on stderr, on terminals only; asked for one by name and total."""
    from rich import progress as rich

    console = stderr()
    shown = rich.Progress(
        rich.TextColumn("{task.description:<8}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )

    def bar(name: str, total: int) -> Callable[[int], None]:
        task = shown.add_task(name, total=total)
        return lambda done: shown.update(task, completed=min(done, total))

    with shown:
        yield bar
