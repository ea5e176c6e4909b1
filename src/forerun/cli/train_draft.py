"""`forerun train-draft`: a shallow decoder on an encoder-decoder target's own encoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from forerun.cli.shared import options
from forerun.cli.shared.console import note, status, stderr, stdout
from forerun.cli.shared.options import option
from forerun.cli.shared.report import print_json
from forerun.errors import SettingError, require

SCHEMA = 1


def train_draft(
    output: Annotated[str, options.output("DIR", "Where the draft decoder goes.")],
    pairs: Annotated[
        str | None,
        option(
            "FILE",
            "Pairs of texts for the target's task: lines SOURCE TAB TARGET, or JSON objects with "
            '"source" and "target".',
        ),
    ] = None,
    target: options.Target = None,
    kind: Annotated[
        str,
        option("shared|block", "Drafts token by token, or a block of tokens in one pass."),
    ] = "shared",
    layers: Annotated[int, option("N", "Of the draft's decoder.")] = 1,
    width: Annotated[int, option("K", "Of block: tokens proposed in a pass.")] = 8,
    steps: Annotated[int, option("N", "Steps of training.")] = 1000,
    batch: Annotated[int, option("B", "Texts per step.")] = 32,
    lr: Annotated[float, option("X", "Peak learning rate.")] = 1e-3,
    own: Annotated[
        int,
        option(
            "N",
            "Learn from what the target itself writes for the first N sources, not from the "
            "file's targets; 0 takes these.",
        ),
    ] = 0,
    max_new_tokens: Annotated[int, option("N", "With --own: most tokens it writes.")] = 128,
    held_out: Annotated[
        int, option("N", "Texts kept apart to measure agreement; at most a fifth.")
    ] = 200,
    seed: Annotated[int, option("S", "Decides order and places.")] = 0,
    as_json: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train a draft for an encoder-decoder target; the target itself stays as it is.

    The draft reads the target's encoder states and embeddings and learns its distributions.
    Interrupted, the same command goes on; with a larger --steps, it trains longer.
    """
    if target is None:
        raise SettingError("the shipped target has no encoder; give --target ID_OR_PATH of one")
    if pairs is None:
        raise SettingError("no texts; give --pairs FILE with lines SOURCE TAB TARGET")
    require(held_out >= 1, "held-out", held_out, "≥ 1")
    require(own >= 0, "own", own, "≥ 0")
    out = Path(output)
    if out.exists() and not out.is_dir():
        raise SettingError(f"{out} is a file; name a folder")
    from forerun.training.drafts import Settings

    settings = Settings(kind, layers, width, steps, batch, lr, seed=seed)

    from forerun.cli.shared.pair_texts import own_texts, read_pairs
    from forerun.cli.shared.run import Plan
    from forerun.training.drafts import CHECKPOINT, Trainer

    model = Plan.alone(target, device, dtype, trust_remote_code, batch).load().model
    trainer = Trainer(model.target, settings)
    with status("reading texts"):
        texts = read_pairs(Path(pairs), model)
    if own:
        with status("the target writes"):
            texts = own_texts(model, texts[:own], max_new_tokens, batch)
    kept = max(1, min(held_out, len(texts) // 5))
    learnt, unseen = texts[kept:], texts[:kept]
    if not learnt:
        raise SettingError(f"{len(texts)} text is too few to train on; give at least 2")
    out.mkdir(parents=True, exist_ok=True)
    if (out / CHECKPOINT).exists():
        trainer.load(out / CHECKPOINT)
        note(stderr(), f"going on at step {trainer.step}")

    from forerun.zoo.runs import keep

    def records() -> Iterator[dict[str, Any]]:
        for record in trainer.train(learnt):
            if trainer.step % 200 == 0:
                record["held_out"] = trainer.agreement(unseen)
            yield record

    if trainer.step < steps:
        keep(trainer, records(), out, CHECKPOINT, until=steps)
    found = trainer.agreement(unseen)
    about = trainer.export(out, len(learnt), found)
    if as_json:
        print_json({"schema": SCHEMA, "complete": trainer.step >= steps, "draft": str(out),
                    "kind": about.kind, "layers": about.layers, "width": about.width,
                    **about.trained})  # fmt: skip
        return
    line = f"{trainer.step} steps, {trainer.tokens:,} tokens; held out: " + ", ".join(
        f"{name} {value}" for name, value in found.items()
    )
    stdout().print(line)
    note(stderr(), f"saved to {out}; use it with --target {target} --draft {out}")
