"""Stage 1: trains the target alone; a run goes on for as long as there is time, then decays."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.zoo.corpus import load_pools
from forerun.zoo.optim import optimizers
from forerun.zoo.packing import Batch, Packer
from forerun.zoo.recipe import Architecture, Exits, Part, Recipe
from forerun.zoo.step import Functions, losses
from forerun.zoo.tasks import FAMILIES, LONG_FAMILIES
from forerun.zoo.tasks.base import Pool
from forerun.zoo.tokenizer import train_tokenizer

CHECKPOINT = "checkpoint.pt"
TOKENIZER = "tokenizer.json"
LOG = "log.jsonl"


@dataclass
class Run:
    """A target in training, all that a checkpoint keeps of it."""

    target: Any
    optimizers: list[torch.optim.Optimizer]
    recipe: Recipe
    seed: int
    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    """Seconds of training so far, over all sittings."""
    decay: tuple[int, int] | None = None
    """The step at which the learning rate begins to fall, and how many steps it takes."""

    def save(self, path: Path) -> None:
        """Writes beside, then renames: a killed run never leaves half a checkpoint.

        Batches and the choice of exits are functions of seed and step, so no generator is kept.
        """
        state = {
            "target": self.target.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "decay": self.decay,
        }
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        os.replace(beside, path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """A saved run, with the recipe it was begun with."""
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: no {path}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        run = cls.new(recipe_of(state["recipe"]), state["seed"])
        run.target.load_state_dict(state["target"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.tokens, run.elapsed = state["step"], state["tokens"], state["elapsed"]
        run.decay = state["decay"] and tuple(state["decay"])
        return run

    @classmethod
    def new(cls, recipe: Recipe, seed: int, start: Path | None = None) -> Run:
        """A run at step 0, from fresh weights or from those of an exported model."""
        torch.manual_seed(seed)
        target = recipe.target.build(recipe.vocab_size)
        if start is not None:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
            target.load_state_dict(model.state_dict())
        return cls(target, optimizers([target], recipe), recipe, seed)


def recipe_of(saved: dict[str, Any]) -> Recipe:
    """A recipe from its saved form; settings that the code has gained since take their default."""
    known = {name: saved[name] for name in Recipe.__dataclass_fields__ if name in saved}
    for name in ("target", "draft"):
        known[name] = Architecture(**known[name])
    known["parts"] = tuple(Part(**part) for part in known["parts"])
    known["exits"] = Exits(**known["exits"])
    return Recipe(**known)


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


@dataclass(frozen=True)
class Loss:
    """What one step measured: nats per weighted token, and agreement with the last layer."""

    final: float
    exits: dict[int, float]


def accumulate(run: Run, batches: list[Batch], functions: Functions) -> Loss:
    """Adds the gradients of all micro-batches of a step; losses are means over the step."""
    rng = random.Random(f"exits/{run.seed}/{run.step}")
    exits, layers = run.recipe.exits, run.recipe.target.layers
    candidates = exits.weights(layers)
    total = float(sum(batch.weights[:, 1:].sum() for batch in batches))
    final = 0.0
    sums: dict[int, list[float]] = {}
    for batch in batches:
        ids, weights = torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
        drawn = rng.sample(sorted(candidates), exits.count(layers)) if candidates else []
        count = ids[:, 1:].numel()
        chosen = sorted(rng.sample(range(count), max(1, count // exits.share)))
        positions = torch.tensor(chosen)
        own = float(weights[:, 1:].sum())
        chosen_weight = float(weights[:, 1:].reshape(-1)[positions].sum()) or 1.0
        loss, matched = losses(
            run.target, ids, weights, functions, {d: candidates[d] for d in drawn}, positions
        )
        objective = loss / total
        for depth, value in matched.items():
            objective = objective + value * candidates[depth] * own / total / chosen_weight
            sums.setdefault(depth, []).append(float(value.detach()) / chosen_weight)
        objective.backward()
        final += float(loss.detach())
    return Loss(final / total, {d: sum(v) / len(v) for d, v in sorted(sums.items())})


def update(run: Run, rate: float) -> None:
    """One optimiser step at ``rate`` times the peak learning rates."""
    torch.nn.utils.clip_grad_norm_(run.target.parameters(), 1.0)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def steps_of(run: Run, packer: Packer, functions: Functions) -> Iterator[dict[str, Any]]:
    """Trains; yields a record after every step. Ends with the decay, if one was begun."""
    while run.decay is None or run.step < sum(run.decay):
        begin = time.perf_counter()
        finishing = run.decay is not None and run.step >= run.decay[0]
        rate = run.recipe.rate(run.step, run.decay)
        batches = packer.batches(run.step, finishing)
        loss = accumulate(run, batches, functions)
        update(run, rate)
        seconds = time.perf_counter() - begin
        tokens = sum(batch.ids.size for batch in batches)
        run.step += 1
        run.tokens += tokens
        run.elapsed += seconds
        yield {
            "step": run.step,
            "tokens": run.tokens,
            "rate": round(rate, 4),
            "loss": round(loss.final, 4),
            "exits": {depth: round(value, 3) for depth, value in loss.exits.items()},
            "tokens_per_second": round(tokens / seconds),
            "elapsed": round(run.elapsed, 1),
        }


@torch.no_grad()
def validate(
    target: Any, tokenizer: Any, pool: Pool, layers: tuple[int, ...], count: int = 24
) -> dict[str, dict[str, float]]:
    """Per family, on answers of fixed validation items: loss, accuracy, agreement of layers.

    ``loss`` in nats per token; ``right``: the most likely token is the text's; ``agree_<layer>``:
    that layer's most likely token (last norm, shared head) is the last layer's.
    """
    report = {}
    for name, family in {**FAMILIES, **LONG_FAMILIES}.items():
        rng = random.Random(7)
        sums: dict[str, float] = {}
        tokens = 0
        for _ in range(count if name in FAMILIES else count // 3):
            example = family.sample(rng, "val", pool)
            prompt = tokenizer.encode(example.prompt).ids
            answer = [*tokenizer.encode(example.answer).ids, 0]
            ids = torch.tensor([prompt + answer])
            out = target.model(ids, use_cache=False, output_hidden_states=True)
            place = slice(len(prompt) - 1, ids.shape[1] - 1)
            logits = target.lm_head(out.last_hidden_state[0, place])
            goal, best = ids[0, len(prompt) :], logits.argmax(-1)
            log = logits.log_softmax(-1)
            sums["loss"] = sums.get("loss", 0) - float(log.gather(1, goal[:, None]).sum())
            sums["right"] = sums.get("right", 0) + float((best == goal).sum())
            for layer in layers:
                state = target.model.norm(out.hidden_states[layer][0, place])
                agree = float((target.lm_head(state).argmax(-1) == best).sum())
                sums[f"agree_{layer}"] = sums.get(f"agree_{layer}", 0) + agree
            tokens += len(answer)
        report[name] = {key: round(value / tokens, 4) for key, value in sums.items()}
    return report


@contextmanager
def reporter() -> Iterator[Callable[[str], None]]:
    """Says how far a run is: one changing line on a terminal, plain lines otherwise."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)


def begin(
    out: Path, recipe: Recipe | None, seed: int, resume: bool, start: Path | None
) -> Run:
    """The run to go on with: from the checkpoint in ``out``, or new."""
    out.mkdir(parents=True, exist_ok=True)
    if resume:
        return Run.load(out / CHECKPOINT)
    if (out / CHECKPOINT).exists():
        raise ValueError(f"{out / CHECKPOINT} exists: resume it, or choose another folder")
    if start is not None:
        (out / TOKENIZER).write_bytes((start / TOKENIZER).read_bytes())
    return Run.new(recipe or Recipe(), seed, start)


def train(
    data: Path,
    out: Path,
    *,
    steps: int | None = None,
    decay: int | None = None,
    seed: int = 0,
    resume: bool = False,
    start: Path | None = None,
    recipe: Recipe | None = None,
    compiled: bool = True,
    checkpoint_seconds: float = 240,
    validate_every: int = 100,
) -> Run:
    """Stage 1: trains the target on ``data``, writing checkpoints and a log to ``out``.

    Goes on until step ``steps`` (default: for ever), or, once a ``decay`` of so many steps is
    begun, to its end. A stopped run (SIGTERM, SIGINT) saves itself first. ``start`` is an exported
    model to begin from instead of fresh weights.
    """
    run = begin(out, recipe, seed, resume, start)
    if decay is not None and run.decay is None:
        run.decay = (run.step, decay)
    pools = load_pools(data)
    tokenizer = prepare_tokenizer(out, pools["train"], run.recipe, run.seed)
    packer = Packer(tokenizer, pools["train"], run.recipe, run.seed)
    depth = run.recipe.target.layers
    layers = tuple(sorted({max(1, depth // 4), max(1, depth // 2)}))
    saved = time.monotonic()
    with (out / LOG).open("a", encoding="utf-8") as log, reporter() as say, stopping() as stopped:
        for record in steps_of(run, packer, Functions.make(compiled)):
            last = run.step == steps or (run.decay is not None and run.step >= sum(run.decay))
            if run.step % validate_every == 0 or last:
                record["validation"] = validate(run.target, tokenizer, pools["val"], layers)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if run.step % 20 == 0 or run.step <= 5 or last:
                say(
                    f"step {run.step}  {run.tokens / 1e6:.2f} M tokens  loss {record['loss']:.3f}"
                    f"  {record['tokens_per_second']} tokens/s"
                )
            if time.monotonic() - saved > checkpoint_seconds:
                run.save(out / CHECKPOINT)
                saved = time.monotonic()
            if last or stopped():
                break
    run.save(out / CHECKPOINT)
    return run


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM and SIGINT into a question that the loop asks after every step."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
