"""`forerun train-draft`: drafts that share what their target has."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.shared import options
from forerun.cli.shared.console import progress, remark, stdout, table
from forerun.cli.shared.models import ALONE, Chat, Job, Models
from forerun.cli.shared.options import Fields, option
from forerun.cli.shared.report import claim, print_json
from forerun.errors import SettingError, require
from forerun.training.settings import TrainingSettings

SCHEMA = 1
OWN = "own.jsonl.gz"  # what the target wrote, in the draft's folder


@options.command
def train_draft(
    output: Annotated[str, options.output("DIR", "Where the draft goes.")],
    models: Annotated[Models, Fields(Models, only=ALONE)],
    chat: Annotated[Chat, Fields(Chat)],
    training: Annotated[
        dict[str, Any],
        Fields(TrainingSettings, without=("kind", "anchors"), layers=(str | None, None)),
    ],
    kind: Annotated[str, typer.Argument(metavar="[KIND]", show_default=False)] = "shared",
    pairs: Annotated[str | None, option("FILE")] = None,
    data: Annotated[str | None, option("PATH|builtin")] = None,
    own: Annotated[int, option("N")] = 0,
    max_new_tokens: Annotated[int, option("N", "With --own: most tokens it writes.")] = 128,
    tokens: Annotated[int, option("N")] = 200_000,
    held_out: Annotated[int, option("N")] = 200,
    as_json: options.Json = False,
) -> None:
    """Train a draft that belongs to its target; the target itself stays as it is.

    It learns what the target says. Interrupted, the same command goes on; with a larger --steps,
    it trains longer.

    Args:
        kind: of targets with an encoder shared or block, a decoder on it that drafts a token or
            a block of tokens in one pass; of decoder-only ones eagle, a layer on its hidden
            states; eagle3, the same as a folder of speculators; medusa, heads on the last one;
            kangaroo, an adapter on a shallow one; exits, heads that let it stop early. Default:
            shared.
        pairs: of shared and block: pairs of texts for the target's task, lines SOURCE TAB TARGET,
            or JSON objects with "source" and "target".
        data: of the others: a .jsonl.gz file of forerun write; a text file or a folder of .txt
            files; a .jsonl file of prompts, which the target continues itself, or of {"text": ...};
            builtin, the shipped validation prompts.
        own: learn from what the target itself writes for the first N sources, not from the file's
            targets; 0 takes these. They stay in own.jsonl.gz in the folder: copied into that of
            another draft, they are not written again.
        tokens: with --data: most positions to learn from, held-out ones included.
        held_out: texts kept apart to measure agreement; at most a fifth.
    """
    from forerun.training.fit import CHECKPOINT, trainer

    require(held_out >= 1, "held-out", held_out, "≥ 1")
    require(own >= 0, "own", own, "≥ 0")
    require(tokens >= 1, "tokens", tokens, "≥ 1")
    if kind == "memory":
        raise SettingError(
            "a table for memory is not trained: forerun write has the target write texts, and "
            "forerun build-memory counts them"
        )
    out = Path(output)
    claim(output, folder=True)
    if training["layers"] is not None:
        from forerun.drafters.specbound import listed

        training["layers"] = listed(training["layers"], kind)
    settings = TrainingSettings(kind, **training)
    _check(settings, models.target, pairs, data)

    job = models.alone.load(chat=chat)
    writer = partial(models.writer, job.model)
    if pairs is not None:
        texts = _pairs(job, pairs, out / OWN, own, max_new_tokens, writer)
    else:
        texts = _documents(job, str(data), settings.seed, out, tokens, writer)
    every = max(5, -(-len(texts) // held_out))
    unseen = texts[::every]
    learnt = [text for place, text in enumerate(texts) if place % every]
    if not learnt:
        raise SettingError(f"{len(texts)} text is too few to train on; give at least 2")
    draft = trainer(job.model.target, settings, learnt)
    out.mkdir(parents=True, exist_ok=True)
    if (out / CHECKPOINT).exists():
        draft.load(out / CHECKPOINT)
        remark(f"going on at step {draft.step}")

    from forerun.training.runs import keep

    def records() -> Iterator[dict[str, Any]]:
        for record in draft.train(learnt):
            if draft.step % min(200, -(-settings.steps // 8)) == 0:
                record["held_out"] = draft.agreement(unseen)
            yield record

    if draft.step < settings.steps:
        keep(draft, records(), out, CHECKPOINT, until=settings.steps)
    measured = draft.agreement(unseen)
    about = draft.export(out, len(learnt), measured, models.target or "shipped")
    if as_json:
        print_json({"schema": SCHEMA, "complete": draft.step >= settings.steps, "draft": str(out),
                    "kind": about.kind, **about.settings, **about.trained})  # fmt: skip
    else:
        _show(f"{draft.step} steps, {draft.tokens:,} tokens; held out: ", measured)
        named = f"--target {models.target} " if models.target else ""
        remark(f"saved to {out}; use it with {named}--draft {out}")
    if draft.step < settings.steps:
        remark(f"interrupted after step {draft.step}; the same command goes on from here")
        raise KeyboardInterrupt


def _check(
    settings: TrainingSettings, target: str | None, pairs: str | None, data: str | None
) -> None:
    if settings.on_encoder:
        if data is not None:
            raise SettingError(
                f"a draft of kind {settings.kind} learns from pairs; leave --data out, or train "
                "another kind, like eagle"
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


def _pairs(
    job: Job, pairs: str, kept: Path, own: int, most: int, writer: Callable[[], Any]
) -> list[Any]:
    """Pairs of texts; the target's own are `kept`."""
    from forerun.cli.shared.training_texts import own_texts, read_pairs
    from forerun.runtime.grafts import model_of

    model_of(job.model.target, "on its encoder")
    texts = read_pairs(Path(pairs), job.model)
    if own:
        texts = texts[:own]
        with progress("the target writes", len(texts), "texts") as tell:
            tells = partial(tell, "the target writes")
            texts = own_texts(job, texts, most, kept, writer, tells)
    return texts


def _documents(
    job: Job, data: str, seed: int, out: Path, tokens: int, writer: Callable[[], Any]
) -> list[Any]:
    """Texts; what the target writes itself is kept in the folder."""
    from forerun.cli.shared.training_texts import read_documents
    from forerun.runtime.layers import LayerAccess
    from forerun.runtime.support import model_on_torch

    LayerAccess(model_on_torch(job.model.target, "a draft on its layers"))
    with progress("texts", tokens) as tell:
        counts = partial(tell, "texts")
        return read_documents(data, job, out, writer, tokens=tokens, seed=seed, tell=counts)


def _show(line: str, measured: dict[str, Any]) -> None:
    """The summary, for people: numbers in a line, and reports of layers in a table."""
    plain = {name: value for name, value in measured.items() if name not in ("layers", "lens")}
    stdout().print(line + ", ".join(f"{name} {value}" for name, value in plain.items()))
    if "layers" in measured:
        right = ("after layer", "logit lens", "trained", "confidence", "calibration error")
        shown = table(right=right)
        for lens, own in zip(measured["lens"], measured["layers"], strict=True):
            shares = (lens["agreement"], own["agreement"], own["confidence"], own["error"])
            shown.add_row(str(own["layer"]), *(f"{share * 100:.1f} %" for share in shares))
        stdout().print(shown)
