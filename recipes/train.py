"""Stage 1: trains the target alone; a run goes on for as long as there is time, then decays."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.training.runs import LOG, keep
from recipes.corpus import load_pools
from recipes.export import export_model
from recipes.packing import Batch, Packer
from recipes.recipe import Recipe
from recipes.runs import CHECKPOINT, TOKENIZER, Run, prepare_tokenizer
from recipes.step import Functions, losses
from recipes.tasks import FAMILIES, LONG_FAMILIES
from recipes.tasks.base import Pool
from recipes.unlikely import continuations


@dataclass(frozen=True)
class Loss:
    """What one step measured, in nats per weighted token."""

    final: float
    exits: dict[int, float]
    """Per drawn layer: cross-entropy against the last layer's distribution."""
    guides: dict[str, tuple[float, float]]
    """Per guide: of its attention, and of the answers of its layers."""


def accumulate(run: Run, batches: list[Batch], functions: Functions) -> Loss:
    """Adds the gradients of all micro-batches of a step; losses are means over the step."""
    rng = random.Random(f"exits/{run.seed}/{run.step}")
    recipe, exits, layers = run.recipe, run.recipe.exits, run.recipe.target.layers
    guides = {name: how for name, how in recipe.guides.items() if how.fits(recipe.target)}
    depth_weights = exits.weights(layers)
    total = float(sum(batch.weights[:, 1:].sum() for batch in batches))
    final = 0.0
    measured: dict[int, list[float]] = {}
    guided_losses: dict[str, list[tuple[float, float]]] = {name: [] for name in guides}
    for batch in batches:
        ids, weights = run.tensors(batch)
        scored = weights[:, 1:].reshape(-1)
        drawn = rng.sample(sorted(depth_weights), exits.count(layers)) if depth_weights else []
        count = max(1, len(scored) // exits.share)
        chosen = sorted(rng.sample(range(len(scored)), count))
        positions = torch.tensor(chosen, device=ids.device)
        names = [name for name in guides if batch.guides.get(name)]
        guided = [(guides[n], torch.tensor(batch.guides[n], device=ids.device)) for n in names]
        loss = losses(run.model, ids, weights, functions, drawn, positions, guided)
        objective = loss.final / total
        # A micro-batch counts by its weights, not by what of them was drawn.
        seen = max(float(scored[positions].sum()), 1e-6)
        part = float(scored.sum()) / total
        for depth, value in loss.exits.items():
            objective = objective + value * (depth_weights[depth] * part / seen)
            measured.setdefault(depth, []).append(float(value.detach()) / seen)
        for name, (attention, answers) in zip(names, loss.guides, strict=True):
            objective = (
                objective + attention * guides[name].attention + answers * guides[name].answer
            )
            guided_losses[name].append((float(attention.detach()), float(answers.detach())))
        objective.backward()
        final += float(loss.final.detach())
    return Loss(
        final / total,
        {d: sum(v) / len(v) for d, v in sorted(measured.items())},
        {name: tuple(np.mean(values, axis=0)) for name, values in guided_losses.items() if values},
    )


def unlearn(run: Run, batch: Batch, functions: Functions) -> float:
    """Adds the gradient of the unlikelihood of what repeats in ``batch``; returns its share."""
    how = run.recipe.unlikely
    written = batch.ids.shape[0] * (how.length - how.prompt)
    loss = losses(run.model, *run.tensors(batch), functions).final
    (loss * (how.weight / written)).backward()
    return float(-batch.weights.sum()) / written


def steps_of(run: Run, packer: Packer, functions: Functions) -> Iterator[dict[str, Any]]:
    """Trains; yields a record after every step. Ends with the decay, if one was begun."""
    while run.decay is None or run.step < sum(run.decay):
        begin = time.perf_counter()
        finishing = run.decay is not None and run.step >= run.decay[0] + run.decay[1] // 2
        rate = run.recipe.rate(run.step, run.decay)
        batches = packer.batches(run.step, finishing)
        loss = accumulate(run, batches, functions)
        repetition = {}
        if run.recipe.unlikely.weight and run.step % run.recipe.unlikely.every == 0:
            batch = continuations(run.model, packer, run.step)
            repetition["repeated"] = round(unlearn(run, batch, functions), 3)
        run.update(rate)
        yield run.advance(
            sum(batch.ids.size for batch in batches),
            time.perf_counter() - begin,
            rate=round(rate, 4),
            loss=round(loss.final, 4),
            exits={depth: round(value, 3) for depth, value in loss.exits.items()},
            guides={n: [round(float(v), 3) for v in both] for n, both in loss.guides.items()},
            **repetition,
        )


@torch.no_grad()
def validate(
    target: Any, tokenizer: Any, pool: Pool, layers: tuple[int, ...], count: int = 24
) -> dict[str, dict[str, float]]:
    """Per family, on answers of fixed validation items: loss, accuracy, agreement of layers.

    ``loss`` in nats per token; ``right``: share of tokens at which the most likely one is the
    text's; ``agree_<layer>``: at which that layer's (last norm, shared head) is the last layer's.
    """
    report = {}
    for name, family in {**FAMILIES, **LONG_FAMILIES}.items():
        rng = random.Random(7)
        sums: dict[str, float] = {}
        tokens = 0
        for _ in range(count if name in FAMILIES else max(1, count // 3)):
            example = family.sample(rng, "val", pool)
            prompt = tokenizer.encode(example.prompt).ids
            answer = [*tokenizer.encode(example.answer).ids, 0]
            for key, value in _score(target, prompt, answer, layers).items():
                sums[key] = sums.get(key, 0.0) + value
            tokens += len(answer)
        report[name] = {key: round(value / tokens, 4) for key, value in sums.items()}
    return report


def _score(
    target: Any, prompt: list[int], answer: list[int], layers: tuple[int, ...]
) -> dict[str, float]:
    """Sums over the answer's tokens of what `validate` reports."""
    device = next(target.parameters()).device
    ids = torch.tensor([prompt + answer], device=device)[:, -1024:]
    out = target.model(ids, use_cache=False, output_hidden_states=True)
    place = slice(ids.shape[1] - len(answer) - 1, ids.shape[1] - 1)
    logits = target.lm_head(out.last_hidden_state[0, place])
    goal, best = ids[0, -len(answer) :], logits.argmax(-1)
    sums = {
        "loss": -float(logits.log_softmax(-1).gather(1, goal[:, None]).sum()),
        "right": float((best == goal).sum()),
    }
    for layer in layers:
        state = target.model.norm(out.hidden_states[layer][0, place])
        sums[f"agree_{layer}"] = float((target.lm_head(state).argmax(-1) == best).sum())
    return sums


@dataclass(frozen=True)
class Beginning:
    """What a run begins from."""

    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0
    """Decides fresh weights and the order of the data."""
    start: Path | None = None
    """An exported model to begin from instead of fresh weights."""
    resume: bool = False
    """Go on from the checkpoint in the run's folder, whatever the other fields say."""
    device: str = "cpu"

    def open(self, out: Path) -> Run:
        """The run to go on with in a folder."""
        if self.resume:
            return Run.load(out / CHECKPOINT, device=self.device)
        if (out / CHECKPOINT).exists():
            raise ValueError(f"{out / CHECKPOINT} exists: resume it, or choose another folder")
        run = Run.new(self.recipe, self.seed, start=self.start, device=self.device)
        out.mkdir(parents=True, exist_ok=True)
        if self.start is not None:
            shutil.copyfile(self.start / TOKENIZER, out / TOKENIZER)
        return run


def train(
    data: Path,
    out: Path,
    beginning: Beginning | None = None,
    *,
    steps: int | None = None,
    decay: int | None = None,
    compiled: bool = True,
    validate_every: int = 100,
    items: int = 24,
) -> Run:
    """Stage 1: trains the target on ``data``, writing checkpoints and a log to ``out``.

    Goes on until step ``steps`` (default: for ever) or, once a ``decay`` of so many steps is
    begun, to its end; a decay that is under way goes on. Every ``validate_every`` steps and at the
    end, ``items`` prompts per family are validated.
    """
    for name, value in (("steps", steps), ("decay", decay)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    pools = load_pools(data)
    run = (beginning or Beginning()).open(out)
    if decay is not None and run.decay is None:
        run.decay = (run.step, decay)
    tokenizer = prepare_tokenizer(out, pools["train"], run.recipe, run.seed)
    packer = Packer(tokenizer, pools["train"], run.recipe, run.seed)
    depth = run.recipe.target.layers
    layers = tuple(sorted({max(1, depth // 4), max(1, depth // 2)}))

    def records() -> Iterator[dict[str, Any]]:
        end = sum(run.decay) if run.decay else steps
        for record in steps_of(run, packer, Functions.make(compiled)):
            if run.step % validate_every == 0 or run.step == end:
                record["validation"] = validate(run.model, tokenizer, pools["val"], layers, items)
            yield record

    if steps is None or run.step < steps:
        keep(run, records(), out, CHECKPOINT, until=steps)
    return run


def finish(
    data: Path,
    run: Path,
    out: Path,
    *,
    steps: int,
    device: str = "cpu",
    compiled: bool = True,
    items: int = 24,
) -> Path:
    """Ends a copy of a run: lets the learning rate fall to zero over ``steps``, exports the target.

    The run itself is left as it is and can go on. Cut off, the same call goes on in ``out``.
    """
    if not (out / CHECKPOINT).exists():
        if not (run / CHECKPOINT).exists():
            raise FileNotFoundError(f"nothing to finish: no {run / CHECKPOINT}")
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / TOKENIZER, out / TOKENIZER)
        shutil.copyfile(run / CHECKPOINT, out / "copied.tmp")
        (out / "copied.tmp").replace(out / CHECKPOINT)
    beginning = Beginning(resume=True, device=device)
    ended = train(data, out, beginning, decay=steps, compiled=compiled, items=items)
    if ended.decay is None or ended.step < sum(ended.decay):
        return out  # stopped: the same command goes on
    from tokenizers import Tokenizer

    export_model(ended.model, Tokenizer.from_file(str(out / TOKENIZER)), out / "target")
    return out / "target"


def curves(folder: Path) -> str:
    """The validation curves in a run's log, as a Markdown table: per family nats per token."""
    path = folder / LOG
    if not path.exists():
        raise FileNotFoundError(f"no log at {path}")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [r for r in records if "validation" in r]
    if not rows:
        raise ValueError(f"no validation in {path} yet")
    names = list(rows[-1]["validation"])
    lines = [
        f"| tokens, M | {' | '.join(names)} | agree, quarter, % | half, % |",
        "|" + "---|" * (len(names) + 3),
    ]
    for row in rows:
        scores = [row["validation"][name] for name in names]
        depths = [key for key in scores[0] if key.startswith("agree_")]
        agree = [sum(s[key] for s in scores) / len(scores) for key in (depths[0], depths[-1])]
        cells = [f"{s['loss']:.3f}" for s in scores] + [f"{100 * a:.1f}" for a in agree]
        lines.append(f"| {row['tokens'] / 1e6:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)
