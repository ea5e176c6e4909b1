"""`forerun train-exits`: heads that let a model stop early."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal

from forerun.cli.shared import options
from forerun.cli.shared.console import note, stderr, stdout, table
from forerun.cli.shared.models import ALONE, Chat, Models
from forerun.cli.shared.options import OUTPUT, Fields, option
from forerun.cli.shared.progress import Tell, progress
from forerun.cli.shared.report import print_json
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.cli.shared.models import Job
    from forerun.runtime.layers import LayerAccess
    from forerun.training.exit_heads import LayerReport, Settings
    from forerun.training.features import Document, Features

SCHEMA = 1


@options.command
def train_exits(
    output: Annotated[str, options.output("DIR", "Where exits.safetensors and .json go.")],
    models: Annotated[Models, Fields(Models, only=ALONE)],
    chat: Annotated[Chat, Fields(Chat)],
    data: Annotated[
        str | None,
        option(
            "PATH|builtin",
            "A text file or a folder of .txt files; a .jsonl file of prompts, which the target "
            'continues itself, or of {"text": ...}; builtin, the shipped validation prompts.',
        ),
    ] = None,
    layers: Annotated[
        str | None,
        option("N,N,...", "Layers to exit after. Default: about six, evenly spaced."),
    ] = None,
    head: Annotated[
        str,
        option(
            "light|full",
            "An affine map before the model's own LM head, or an LM head per layer.",
        ),
    ] = "light",
    rank: Annotated[int, option("R", "Of light heads: small for large models; 0 is full.")] = 0,
    vocab: Annotated[
        int, option("N", "The heads say only the N most frequent tokens: cheaper; 0 is all.")
    ] = 0,
    loss: Annotated[
        str, option("hard|distill", "Learn the last layer's top token, or its distribution.")
    ] = "hard",
    tokens: Annotated[
        int, option("N", "Most positions to learn from, held-out ones included.")
    ] = 200_000,
    epochs: Annotated[int, option("N", "Passes over them.")] = 4,
    minutes: Annotated[
        float | None, option("M", "Most minutes of training; the schedule fits itself in.")
    ] = None,
    batch: Annotated[int, option("N", "Positions per step.")] = 256,
    lr: Annotated[
        float | None, option("X", "Peak learning rate. Default: 0.25 / hidden size.")
    ] = None,
    seed: Annotated[int, option("S", "Decides texts, order and start.")] = 0,
    cache: Annotated[
        str | None,
        option(
            "DIR",
            "Where features are kept; may be deleted after. Default: -o/cache.",
            panel=OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
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
    chosen = _parse_layers(layers)
    out, cache_folder = Path(output), Path(cache) if cache is not None else Path(output) / "cache"
    for folder in (out, cache_folder):
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"{folder} is a file; name a folder")

    from forerun.training.exit_heads import Settings

    settings = Settings(head, rank, vocab, loss, epochs, minutes, batch, lr, seed)

    from forerun.cli.shared.exit_texts import open_source

    source = open_source(data)

    from forerun.cli.shared.exit_texts import GROUP, hold_out, read_documents
    from forerun.training.features import fingerprint

    job = models.alone.load(batch_size=GROUP, chat=chat)
    access, exits = _exits(job, chosen, rank, vocab)
    identity = fingerprint(job.model.target.executor.module())
    began = time.perf_counter()
    try:
        with progress("texts", tokens) as tell:
            documents = read_documents(
                source,
                job,
                cache_folder,
                tokens=tokens,
                seed=seed,
                identity=f"{identity} {data}",
                tell=partial(tell, "texts"),
            )
            parts = hold_out(documents)
            trained, held = _features(access, parts, exits, cache_folder, identity, tell)
            heads, before, after = _train(access, trained, held, settings, cache_folder, tell)
    except KeyboardInterrupt:
        note(stderr(), "interrupted; the same command goes on from here")
        raise
    training = {
        "data": Path(data).name,
        **asdict(settings),
        "positions": trained.count,
        "held_out": held.count,
        "seconds": round(time.perf_counter() - began, 1),
        "lens": [asdict(report) for report in before],
        "trained": [asdict(report) for report in after],
    }
    _finish(job, heads, training, identity, out, as_json)


def _exits(
    job: Job, chosen: list[int] | None, rank: int, vocab: int
) -> tuple[LayerAccess, tuple[int, ...]]:
    """The target's layers, and those to exit after; what does not fit the model is refused."""
    from forerun.runtime.heads import check_layers, default_layers
    from forerun.runtime.layers import LayerAccess

    access = LayerAccess(job.model.target.executor.module())
    exits = check_layers(chosen or default_layers(access.layers), access.layers)
    if exits[-1] == access.layers:
        raise SettingError(
            f"layer {exits[-1]} is the model's last and needs no head; exit layers are 1 to "
            f"{access.layers - 1}"
        )
    require(rank <= access.width, "rank", rank, f"at most the hidden size, {access.width}")
    require(vocab <= len(access.unembedding), "vocab", vocab, "at most the model's vocabulary")
    return access, exits


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
    tell: Tell,
) -> tuple[Features, Features]:
    """Both caches; their size is printed before they are written."""
    from forerun.training.features import cache_bytes, collect, positions_of

    count = sum(map(positions_of, [*parts[0], *parts[1]]))
    size = cache_bytes(count, len(exits), access.width)
    note(
        stderr(),
        f"features of {count:,} positions after {len(exits)} layers: {decimal(size)} in {folder}",
    )

    def advance(done: int) -> None:
        tell("features", done, count)

    held = collect(access, parts[1], exits, folder / "held-out", identity=identity, tell=advance)
    done = held.count
    trained = collect(
        access,
        parts[0],
        exits,
        folder / "training",
        identity=identity,
        tell=lambda count: advance(done + count),
    )
    advance(count)  # nothing was reported if both were there already
    return trained, held


def _train(
    access: Any,
    trained: Features,
    held: Features,
    settings: Settings,
    folder: Path,
    tell: Tell,
) -> tuple[Any, list[LayerReport], list[LayerReport]]:
    """The heads, and the reports before and after."""
    from forerun.runtime.layers import LogitLens
    from forerun.training.exit_heads import CHECKPOINT, evaluate, train

    exits = list(held.hidden)
    before = evaluate(access, LogitLens(access), held, exits)
    tell("training", 0, 1)
    heads = train(
        access,
        trained,
        settings,
        checkpoint=folder / CHECKPOINT,
        tell=lambda share, loss: tell("training", share, 1),
    )
    return heads, before, evaluate(access, heads, held, exits)


def _finish(
    job: Job, heads: Any, training: dict[str, Any], identity: str, out: Path, as_json: bool
) -> None:
    from forerun.lab.provenance import versions
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
        print_json(document)
        return
    _show(training)
    note(stderr(), f"saved to {out} ({decimal(size)}); use them with --exits {out}")


def _show(training: dict[str, Any]) -> None:
    console = stdout()
    note(console, f"agreement with the last layer on {training['held_out']:,} held-out positions\n")
    right = ("after layer", "logit lens", "trained", "confidence", "calibration error")
    shown = table(right=right)
    for lens, own in zip(training["lens"], training["trained"], strict=True):
        shares = (lens["agreement"], own["agreement"], own["confidence"], own["error"])
        shown.add_row(str(own["layer"]), *(f"{share * 100:.1f} %" for share in shares))
    console.print(shown)
