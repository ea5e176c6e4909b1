"""Trains target and draft together: the draft learns the target's distribution as it forms."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from forerun.zoo.corpus import load_pools
from forerun.zoo.optim import optimizers
from forerun.zoo.packing import Packer
from forerun.zoo.recipe import Recipe
from forerun.zoo.tasks import FAMILIES
from forerun.zoo.tasks.base import Pool
from forerun.zoo.tokenizer import train_tokenizer

CHECKPOINT = "checkpoint.pt"
TOKENIZER = "tokenizer.json"
LOG = "log.jsonl"


@dataclass
class Pair:
    """Two models in training and what they are trained with."""

    target: Any
    draft: Any
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    elapsed: float = 0.0
    """Seconds of training so far, over all resumed parts."""


def prepare_tokenizer(out: Path, pool: Pool, recipe: Recipe, seed: int) -> Any:
    """The run's tokenizer: read from ``out``, or trained on books and a draw of every family."""
    from tokenizers import Tokenizer

    path = out / TOKENIZER
    if not path.exists():
        rng = random.Random(seed)
        texts = [text for title in sorted(pool.books) for text in pool.books[title]]
        for name in recipe.task_weights:
            for _ in range(recipe.tokenizer_draws * (5 if name == "translation" else 1)):
                example = FAMILIES[name].sample(rng, "train", pool)
                texts.append(example.prompt + example.answer)
        train_tokenizer(texts, recipe.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def pair_losses(
    target: Any, draft: Any, ids: torch.Tensor, weights: torch.Tensor, autocast: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(target cross-entropy, draft cross-entropy, draft divergence), in nats per token.

    ``ids`` and ``weights`` are (rows, length). The divergence is the cross-entropy of the draft
    against the target's distribution: forward KL up to the target's entropy. It does not train
    the target.
    """
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        target_logits = target(ids, use_cache=False).logits[:, :-1]
        draft_logits = draft(ids, use_cache=False).logits[:, :-1]
    goal, share = ids[:, 1:, None], weights[:, 1:] / weights[:, 1:].sum()
    target_log = target_logits.float().log_softmax(-1)
    draft_log = draft_logits.float().log_softmax(-1)
    target_ce = -(target_log.gather(-1, goal)[..., 0] * share).sum()
    draft_ce = -(draft_log.gather(-1, goal)[..., 0] * share).sum()
    divergence = -((target_log.detach().exp() * draft_log).sum(-1) * share).sum()
    return target_ce, draft_ce, divergence


@torch.no_grad()
def validate(
    target: Any, draft: Any, tokenizer: Any, pool: Pool, count: int = 24
) -> dict[str, dict[str, float]]:
    """Per family, on answers of fixed validation items: both losses, accuracy, agreement."""
    device = next(target.parameters()).device
    report = {}
    for name, family in FAMILIES.items():
        rng = random.Random(7)
        rows, spans = [], []
        for _ in range(count):
            example = family.sample(rng, "val", pool)
            prompt = tokenizer.encode(example.prompt).ids
            answer = [*tokenizer.encode(example.answer).ids[:200], 0]
            rows.append(prompt + answer)
            spans.append((len(prompt), len(prompt) + len(answer)))
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        mask = torch.zeros(ids.shape, device=device)
        for row, (begin, end) in enumerate(spans):
            mask[row, begin:end] = 1
        mask = mask[:, 1:]
        goal = ids[:, 1:]
        with torch.autocast(device.type, torch.bfloat16):
            logits = [m(ids, use_cache=False).logits[:, :-1].float() for m in (target, draft)]
        losses = [F.cross_entropy(x.mT, goal, reduction="none") for x in logits]
        best = [x.argmax(-1) for x in logits]
        total = mask.sum()
        report[name] = {
            "target": round(float((losses[0] * mask).sum() / total), 4),
            "draft": round(float((losses[1] * mask).sum() / total), 4),
            "right": round(float(((best[0] == goal) * mask).sum() / total), 4),
            "agree": round(float(((best[0] == best[1]) * mask).sum() / total), 4),
        }
    return report


def save_checkpoint(path: Path, pair: Pair, settings: dict[str, Any]) -> None:
    """Writes beside, then renames: a killed run never leaves half a checkpoint."""
    state = {
        "target": pair.target.state_dict(),
        "draft": pair.draft.state_dict(),
        "optimizers": [o.state_dict() for o in pair.optimizers],
        "step": pair.step,
        "elapsed": pair.elapsed,
        "settings": settings,
    }
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    os.replace(beside, path)


def load_checkpoint(path: Path, pair: Pair) -> None:
    """Restores models, optimiser states, step and elapsed time."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    pair.target.load_state_dict(state["target"])
    pair.draft.load_state_dict(state["draft"])
    for optimizer, saved in zip(pair.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    pair.step, pair.elapsed = state["step"], state["elapsed"]


def new_pair(recipe: Recipe, seed: int, device: str) -> Pair:
    """Freshly initialised models with their optimisers."""
    torch.manual_seed(seed)
    target = recipe.target.build(recipe.vocab_size).to(device)
    draft = recipe.draft.build(recipe.vocab_size).to(device)
    return Pair(target, draft, optimizers([target, draft], recipe))


@contextmanager
def reporter() -> Iterator[Callable[[str], None]]:
    """Says how far a run is: one changing line on a terminal, plain lines otherwise."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)


def steps_of(
    pair: Pair, packer: Packer, recipe: Recipe, steps: int, minutes: float | None, compiled: bool
) -> Iterator[dict[str, float]]:
    """Trains; yields a record after every step. Ends when steps or minutes are used up."""
    device = next(pair.target.parameters()).device
    autocast = compiled or device.type == "cuda"
    losses = torch.compile(pair_losses, dynamic=False) if compiled else pair_losses
    parameters = [p for m in (pair.target, pair.draft) for p in m.parameters()]
    while True:
        progress = pair.step / steps
        if minutes is not None:
            progress = max(progress, pair.elapsed / (60 * minutes))
        if progress >= 1:
            return
        begin = time.perf_counter()
        rate = recipe.rate(progress)
        for optimizer in pair.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * rate
        length = recipe.long_length if progress >= recipe.long_from else recipe.length
        batch = packer.batch(pair.step, length, recipe.practice(progress))
        ids = torch.from_numpy(batch.ids).to(device)
        weights = torch.from_numpy(batch.weights).to(device)
        target_ce, draft_ce, divergence = losses(pair.target, pair.draft, ids, weights, autocast)
        share = recipe.draft_cross_entropy
        (target_ce + share * draft_ce + (1 - share) * divergence).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begin
        pair.step += 1
        pair.elapsed += seconds
        yield {
            "step": pair.step,
            "progress": round(progress, 4),
            "rate": round(rate, 4),
            "target": round(float(target_ce.detach()), 4),
            "draft": round(float(draft_ce.detach()), 4),
            "divergence": round(float(divergence.detach()), 4),
            "tokens_per_second": round(ids.numel() / seconds),
            "elapsed": round(pair.elapsed, 1),
        }


def train(
    data: Path,
    out: Path,
    *,
    steps: int = 4000,
    minutes: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    resume: bool = False,
    recipe: Recipe | None = None,
    compiled: bool = True,
    checkpoint_seconds: float = 300,
    validate_every: int = 100,
    stop_after: int | None = None,
) -> Pair:
    """Stage 1: trains the pair on ``data``, writing checkpoints and a log to ``out``.

    The schedule follows whichever is further along, ``steps`` or ``minutes``; so a run on a busy
    machine still ends with its learning rate at zero. ``stop_after`` leaves the run early, at
    that step, to be resumed.
    """
    recipe = recipe or Recipe()
    pools = load_pools(data)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(out, pools["train"], recipe, seed)
    pair = new_pair(recipe, seed, device)
    path = out / CHECKPOINT
    if resume:
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: no {path}")
        load_checkpoint(path, pair)
    packer = Packer(tokenizer, pools["train"], recipe, seed)
    settings: dict[str, Any] = {"steps": steps, "minutes": minutes, "seed": seed}
    saved = time.monotonic()
    with (out / LOG).open("a", encoding="utf-8") as log, reporter() as say:
        for record in steps_of(pair, packer, recipe, steps, minutes, compiled):
            line: dict[str, Any] = dict(record)
            if pair.step % validate_every == 0 or record["progress"] >= 1 - 1 / steps:
                line["validation"] = validate(pair.target, pair.draft, tokenizer, pools["val"])
            log.write(json.dumps(line) + "\n")
            log.flush()
            if pair.step % 20 == 0 or pair.step <= 5 or "validation" in line:
                left = pair.elapsed / max(record["progress"], 1e-6) * (1 - record["progress"])
                say(
                    f"step {pair.step}  target {record['target']:.3f}  "
                    f"draft {record['divergence']:.3f}  "
                    f"{record['tokens_per_second']:.0f} tokens/s  {left / 60:.0f} min left"
                )
            if time.monotonic() - saved > checkpoint_seconds:
                save_checkpoint(path, pair, settings)
                saved = time.monotonic()
            if pair.step == stop_after:
                break
    save_checkpoint(path, pair, settings)
    return pair


def main(
    data: Path,
    out: Path,
    *,
    minutes: float | None = None,
    distill_minutes: float | None = None,
    steps: int = 4000,
    distill_steps: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    resume: bool = False,
    recipe: Recipe | None = None,
    compiled: bool = True,
) -> Path:
    """The whole recipe: stage 1, stage 2, export to ``out``/target and ``out``/draft.

    Times are of training, in minutes; ``distill_minutes`` defaults to a third of ``minutes``:
    a sixth of it goes to copying practice, a quarter to generating texts, the rest to learning
    from them. ``distill_steps`` (also of the practice) defaults to half of ``steps``. Resuming
    a run that was cut in stage 2 begins stage 2 again.
    """
    from forerun.zoo.distill import distill, practise_copying, self_generated
    from forerun.zoo.export import export_pair

    recipe = recipe or Recipe()
    if steps < 1 or (minutes is not None and minutes <= 0):
        raise ValueError(f"steps and minutes must be positive, got {steps} and {minutes}")
    pair = train(
        data,
        out,
        steps=steps,
        minutes=minutes,
        device=device,
        seed=seed,
        resume=resume,
        recipe=recipe,
        compiled=compiled,
    )
    if distill_minutes is None and minutes is not None:
        distill_minutes = minutes / 3
    distill_steps = distill_steps or max(1, steps // 2)
    pools = load_pools(data)
    tokenizer = prepare_tokenizer(out, pools["train"], recipe, seed)
    packer = Packer(tokenizer, pools["train"], recipe, seed)
    with (out / LOG).open("a", encoding="utf-8") as log, reporter() as say:

        def report(record: dict[str, Any]) -> None:
            log.write(json.dumps(record) + "\n")
            log.flush()
            step = record.get("distill_step") or record["practice_step"]
            if step % 20 == 0:
                loss = record.get("divergence", record.get("cross_entropy"))
                speed = record["tokens"] / max(record["elapsed"], 0.1)
                say(f"stage 2, step {step}  draft {loss:.3f}  {speed:.0f} tokens/s")

        say("stage 2: the draft practises copying")
        practise_copying(
            pair.draft,
            packer,
            recipe,
            steps=distill_steps,
            minutes=None if distill_minutes is None else distill_minutes / 6,
            compiled=compiled,
            report=report,
        )
        writing = (distill_minutes or 20.0) / 4
        say(f"stage 2: the target writes texts for {writing:.1f} minutes")
        documents = self_generated(
            pair.target, tokenizer, pools["train"], recipe, writing * 60, seed
        )
        say(f"stage 2: the draft learns from {sum(len(d[0]) for d in documents)} tokens")
        distill(
            pair.target,
            pair.draft,
            packer,
            documents,
            recipe,
            steps=distill_steps,
            minutes=None if distill_minutes is None else distill_minutes * 7 / 12,
            compiled=compiled,
            report=report,
        )
        final = validate(pair.target, pair.draft, tokenizer, pools["val"])
        log.write(json.dumps({"final_validation": final}) + "\n")
    export_pair(pair.target, pair.draft, tokenizer, out)
    print(f"written: {out / 'target'} and {out / 'draft'}")
    return out
