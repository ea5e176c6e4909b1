"""`forerun train-draft`: drafts that share what their target has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import note, status, stderr, stdout
from forerun.cli.shared.models import ALONE, Chat, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.progress import progress
from forerun.cli.shared.report import print_json
from forerun.errors import SettingError, require

if TYPE_CHECKING:
    from forerun.cli.shared.models import Job
    from forerun.training.drafts import Settings, Training

SCHEMA = 1
LAYERS = {"kangaroo": 2}
"""Of kinds that have another default than 1."""
WIDTHS = {"medusa": 5}
"""Of kinds that have another default than 8."""
OWN = "own.jsonl"
"""What the target wrote, in the draft's folder."""


@options.command
def train_draft(
    output: Annotated[str, options.output("DIR", "Where the draft decoder goes.")],
    models: Annotated[Models, Fields(Models, only=ALONE)],
    chat: Annotated[Chat, Fields(Chat)],
    pairs: Annotated[
        str | None,
        option(
            "FILE",
            "Of shared and block: pairs of texts for the target's task, lines SOURCE TAB TARGET, "
            'or JSON objects with "source" and "target".',
        ),
    ] = None,
    data: Annotated[
        str | None,
        option(
            "PATH|builtin",
            "Of kangaroo and medusa: texts or prompts, as for train-exits.",
        ),
    ] = None,
    kind: Annotated[
        str,
        option(
            "shared|block|kangaroo|medusa",
            "A decoder on the target's encoder that drafts token by token, or a block of tokens in "
            "one pass; or Kangaroo's adapter or Medusa's heads on a decoder-only target.",
        ),
    ] = "shared",
    layers: Annotated[
        int | None,
        option(
            "N",
            "Of the draft's decoder (default 1), or of the target below kangaroo's adapter "
            "(default 2); of medusa the blocks of a head (default 1).",
        ),
    ] = None,
    width: Annotated[
        int | None,
        option(
            "K", "Of block: tokens proposed in a pass (default 8); of medusa: heads (default 5)."
        ),
    ] = None,
    vocab: Annotated[
        int,
        option("N", "Of medusa: the heads say only the N most frequent tokens; 0 is all."),
    ] = 0,
    steps: Annotated[int, option("N", "Steps of training.")] = 1000,
    batch: Annotated[int, option("B", "Texts per step.")] = 32,
    lr: Annotated[float, option("X", "Peak learning rate.")] = 1e-3,
    own: Annotated[
        int,
        option(
            "N",
            "Learn from what the target itself writes for the first N sources, not from the "
            "file's targets; 0 takes these. They stay in own.jsonl in the folder: copied into that "
            "of another draft, they are not written again.",
        ),
    ] = 0,
    max_new_tokens: Annotated[int, option("N", "With --own: most tokens it writes.")] = 128,
    tokens: Annotated[
        int, option("N", "With --data: most positions to learn from, held-out ones included.")
    ] = 200_000,
    held_out: Annotated[
        int, option("N", "Texts kept apart to measure agreement; at most a fifth.")
    ] = 200,
    seed: Annotated[int, option("S", "Decides order and places.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Train a draft that belongs to its target; the target itself stays as it is.

    It learns the target's distributions: for an encoder-decoder target a decoder that reads its
    encoder's states, for others Kangaroo's adapter, which reads a shallow layer's, or Medusa's
    heads, which read the last one's. Interrupted, the same command goes on; with a larger --steps,
    it trains longer.
    """
    from forerun.training.drafts import CHECKPOINT, Settings

    require(held_out >= 1, "held-out", held_out, "≥ 1")
    require(own >= 0, "own", own, "≥ 0")
    require(tokens >= 1, "tokens", tokens, "≥ 1")
    out = Path(output)
    if out.exists() and not out.is_dir():
        raise SettingError(f"{out} is a file; name a folder")
    layers = LAYERS.get(kind, 1) if layers is None else layers
    width = WIDTHS.get(kind, 8) if width is None else width
    settings = Settings(kind, layers, width, steps, batch, lr, seed=seed, vocab=vocab)
    _check(settings, models.target, pairs, data)

    job = models.alone.load(batch_size=batch, chat=chat)
    if pairs is not None:
        trainer, texts = _on_encoder(job, settings, pairs, out / OWN, own, max_new_tokens)
    else:
        assert data is not None
        trainer, texts = _on_layers(job, settings, data, out, tokens)
    kept = max(1, min(held_out, len(texts) // 5))
    learnt, unseen = texts[kept:], texts[:kept]
    if not learnt:
        raise SettingError(f"{len(texts)} text is too few to train on; give at least 2")
    out.mkdir(parents=True, exist_ok=True)
    if (out / CHECKPOINT).exists():
        trainer.load(out / CHECKPOINT)
        note(stderr(), f"going on at step {trainer.step}")

    from forerun.training.runs import keep

    def records() -> Iterator[dict[str, Any]]:
        for record in trainer.train(learnt):
            if trainer.step % 200 == 0:
                record["held_out"] = trainer.agreement(unseen)
            yield record

    if trainer.step < steps:
        keep(trainer, records(), out, CHECKPOINT, until=steps)
    measured = trainer.agreement(unseen)
    about = trainer.export(out, len(learnt), measured)
    if as_json:
        print_json({"schema": SCHEMA, "complete": trainer.step >= steps, "draft": str(out),
                    "kind": about.kind, "layers": settings.layers, "width": settings.block,
                    **about.trained})  # fmt: skip
        return
    line = f"{trainer.step} steps, {trainer.tokens:,} tokens; held out: " + ", ".join(
        f"{name} {value}" for name, value in measured.items()
    )
    stdout().print(line)
    named = f"--target {models.target} " if models.target else ""
    note(stderr(), f"saved to {out}; use it with {named}--draft {out}")


def _check(settings: Settings, target: str | None, pairs: str | None, data: str | None) -> None:
    """Refuse texts that the kind of draft does not learn from."""
    if settings.on_encoder:
        if data is not None:
            raise SettingError(
                f"a draft of kind {settings.kind} learns from pairs; leave --data out, or say "
                "--kind kangaroo"
            )
        if target is None:
            raise SettingError("the shipped target has no encoder; give --target ID_OR_PATH of one")
        if pairs is None:
            raise SettingError("no texts; give --pairs FILE with lines SOURCE TAB TARGET")
    elif data is None or pairs is not None:
        raise SettingError(
            f"a draft of kind {settings.kind} learns from texts; give --data with a text file, a "
            "folder, a .jsonl file of prompts, or builtin"
        )


def _on_encoder(
    job: Job, settings: Settings, pairs: str, kept: Path, own: int, most: int
) -> tuple[Training[Any], list[Any]]:
    """Training on the target's encoder, and its texts; the target's own are `kept`."""
    from forerun.cli.shared.pair_texts import own_texts, read_pairs
    from forerun.training.drafts import Trainer

    trainer = Trainer(job.model.target, settings)
    with status("reading texts"):
        texts = read_pairs(Path(pairs), job.model)
    if own:
        texts = texts[:own]
        with progress("the target writes", len(texts), "texts") as tell:
            texts = own_texts(job.model, texts, most, kept, partial(tell, "the target writes"))
    return trainer, texts


def _on_layers(
    job: Job, settings: Settings, data: str, out: Path, tokens: int
) -> tuple[Training[Any], list[Any]]:
    """Training on one of the target's layers, and its texts, which are kept in the folder."""
    from forerun.cli.shared.exit_texts import open_source, read_documents
    from forerun.runtime.fingerprints import fingerprint
    from forerun.training.adapters import AdapterTrainer
    from forerun.training.medusa import MedusaTrainer

    source, target = open_source(data), job.model.target
    with progress("texts", tokens) as tell:
        documents = read_documents(
            source,
            job,
            out,
            tokens=tokens,
            seed=settings.seed,
            identity=f"{fingerprint(target.executor.module())} {data}",
            tell=partial(tell, "texts"),
        )
    if settings.kind == "medusa":
        return MedusaTrainer(target, settings, documents), documents
    return AdapterTrainer(target, settings), documents
