"""Stage 2: the draft practises copying, then learns from texts the finished target writes itself.

Reference: Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation"
(ICLR 2024).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.training.runs import keep, reporter, stopping
from recipes.corpus import load_pools
from recipes.export import export_model
from recipes.packing import Batch, Packer
from recipes.recipe import Part, Recipe
from recipes.runs import CHECKPOINT, TOKENIZER, Run
from recipes.step import Functions, divergence, losses
from recipes.tasks import FAMILIES, LONG_FAMILIES
from recipes.tasks.base import Pool

DRAFT_CHECKPOINT = "draft.pt"
TEXTS = "texts.jsonl"
GROUP = 64
"""Prompts that the target continues together; texts are kept in whole groups."""

# A document: its token ids, and how many of them are prompt.
Document = tuple[list[int], int]


@torch.no_grad()
def complete(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, greedy: bool, end: int = 0
) -> list[list[int]]:
    """Continues a batch of prompts (token ids); each output ends with ``end`` unless cut."""
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
    )
    outputs = []
    for row in out[:, width:].tolist():
        outputs.append(row[: row.index(end) + 1] if end in row else row)
    return outputs


def write_group(
    target: Any, tokenizer: Any, pool: Pool, seed: int, turn: int, length: int
) -> list[Document]:
    """What the target writes on a group of training prompts: a function of seed and ``turn``.

    Families take turns, stories and translation, the hardest for a draft, twice; a round of greedy
    texts is followed by one of texts sampled at temperature 1. Documents have at most ``length``
    tokens.
    """
    every = {**FAMILIES, **LONG_FAMILIES}
    names = ["stories", "translation", *every]
    family = every[names[turn % len(names)]]
    greedy = turn // len(names) % 2 == 0
    rng = random.Random(f"distill/{seed}/{turn}")
    torch.manual_seed(rng.getrandbits(32))
    prompts: list[list[int]] = []
    while len(prompts) < GROUP:
        prompt = tokenizer.encode(family.sample(rng, "train", pool).prompt).ids
        if len(prompt) <= length * 3 // 4:
            prompts.append(prompt)
    most = min(family.MAX_NEW_TOKENS, 192, length - max(map(len, prompts)))
    outputs = complete(target, prompts, most, greedy)
    return [(p + o, len(p)) for p, o in zip(prompts, outputs, strict=True)]


def own_texts(
    target: Any, tokenizer: Any, pool: Pool, path: Path, *, seed: int, tokens: int, length: int
) -> list[Document]:
    """At least ``tokens`` tokens the target wrote, with their prompts; kept at ``path``.

    A line per group; cut off, the same call goes on with the next group.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    groups: list[list[Document]] = [
        [(ids, size) for ids, size in json.loads(line)] for line in lines
    ]
    count = sum(len(ids) for group in groups for ids, _ in group)
    with path.open("a", encoding="utf-8") as file, reporter() as say, stopping() as stopped:
        while count < tokens:
            if stopped():
                raise KeyboardInterrupt
            group = write_group(target, tokenizer, pool, seed, len(groups), length)
            file.write(json.dumps(group) + "\n")
            file.flush()
            groups.append(group)
            count += sum(len(ids) for ids, _ in group)
            say(f"the target has written {count:,} of {tokens:,} tokens")
    return [document for group in groups for document in group]


def pack_documents(
    rng: random.Random, documents: list[Document], rows: int, length: int, prompt_weight: float
) -> Batch:
    """Whole documents drawn at random, (rows, length); what does not fit ends a row."""
    ids = np.zeros((rows, length), dtype=np.int64)
    weights = np.zeros((rows, length), dtype=np.float32)
    for row in range(rows):
        at = 0
        while True:
            tokens, prompt = rng.choice(documents)
            end = at + len(tokens)
            if end > length:
                break
            ids[row, at:end] = tokens
            weights[row, at : at + prompt] = prompt_weight
            weights[row, at + prompt : end] = 1
            # A cut text: end-of-text after it, not scored.
            at = end if tokens[-1] == 0 else end + 1
    return Batch(ids, weights)


def practice_rows(packer: Packer, rng: random.Random, rows: int, length: int) -> Batch:
    """Rows of strings that come twice."""
    batch = Batch(
        np.zeros((rows, length), dtype=np.int64), np.ones((rows, length), dtype=np.float32)
    )
    for row in range(rows):
        packer.repeats(rng, batch.ids[row], batch.weights[row])
    return batch


def _join(*batches: Batch) -> Batch:
    return Batch(
        np.concatenate([b.ids for b in batches]), np.concatenate([b.weights for b in batches])
    )


def _data(packer: Packer, step: int, rows: int, length: int) -> Batch:
    """Rows of stage 1's data that it did not use: one of books, the others of tasks."""
    tasks = packer.batch(f"draft/{step}", 0, Part("tasks", max(0, rows - 1), length))
    books = packer.batch("", 10_000_000 + step, Part("books", min(1, rows), length))
    return _join(books, tasks)


def practice_batch(packer: Packer, step: int) -> Batch:
    """Copies, and a quarter of data."""
    recipe = packer.recipe
    rows = max(2, recipe.distill_tokens // recipe.distill_length)
    rng = random.Random(f"practice/{packer.seed}/{step}")
    copies = practice_rows(packer, rng, rows - rows // 4, recipe.distill_length)
    return _join(copies, _data(packer, step, rows // 4, recipe.distill_length))


def distill_batch(packer: Packer, documents: list[Document], step: int, progress: float) -> Batch:
    """Two thirds the target's own texts, one third data; copies fade from a quarter to none."""
    recipe = packer.recipe
    length = recipe.distill_length
    rows = max(3, recipe.distill_tokens // length)
    rng = random.Random(f"distill/{packer.seed}/{step}")
    copies = round(rows / 4 * max(0.0, 1 - progress / recipe.distill_practice))
    data = (rows - copies) // 3
    own = pack_documents(rng, documents, rows - copies - data, length, 0.1)
    return _join(own, _data(packer, step, data, length), practice_rows(packer, rng, copies, length))


def steps_of(
    run: Run,
    target: Any,
    packer: Packer,
    documents: list[Document],
    steps: int,
    functions: Functions,
) -> Iterator[dict[str, Any]]:
    """Practice, then distillation; yields a record after every step.

    Two layers do not find out from the target's distributions how to copy in so short a training;
    without practice, extraction and rewriting have nearly no accepted drafts.
    """
    practice = run.recipe.practice_steps
    while run.step < practice + steps:
        begin = time.perf_counter()
        progress = (run.step - practice) / steps
        if run.step < practice:
            batch = practice_batch(packer, run.step)
            rate = min(1.0, (run.step + 1) / 50)
        else:
            batch = distill_batch(packer, documents, run.step, progress)
            rate = min(1.0, 20 * progress + 0.05, 1 - progress)
        ids, weights = run.tensors(batch)
        if run.step < practice:
            loss = losses(run.model, ids, weights, functions).final
        else:
            loss = divergence(target, run.model, ids, weights, functions)
        loss = loss / weights[:, 1:].sum()
        loss.backward()
        run.update(run.recipe.distill_rate * rate)
        yield run.advance(
            ids.numel(),
            time.perf_counter() - begin,
            stage="practice" if progress < 0 else "distill",
            loss=round(float(loss.detach()), 4),
        )


def distill(
    data: Path,
    out: Path,
    *,
    steps: int,
    texts: int = 400_000,
    start: Path | None = None,
    until: int | None = None,
    device: str = "cpu",
    compiled: bool = True,
) -> Path:
    """Stage 2: trains and exports ``out``/draft for the finished target in ``out``.

    ``texts`` is how many tokens the target writes, ``steps`` how long the draft learns after its
    practice. ``start`` is an exported draft to begin from, which needs no practice. Cut off, the
    same call goes on; ``until`` stops at that step, to be resumed.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    for name, value in (("steps", steps), ("texts", texts)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (out / "target" / "config.json").exists():
        raise FileNotFoundError(f"no finished target at {out / 'target'} (finish a run first)")
    pool = load_pools(data)["train"]
    path = out / DRAFT_CHECKPOINT
    if path.exists():
        run = Run.load(path, "draft", device)
    else:
        recipe, seed = Recipe(), 0
        if (out / CHECKPOINT).exists():  # an average of two runs has none
            first = Run.load(out / CHECKPOINT)
            recipe, seed = first.recipe, first.seed
        if start:
            recipe = replace(recipe, practice_steps=0)
        run = Run.new(recipe, seed, "draft", start=start, device=device)
    tokenizer = Tokenizer.from_file(str(out / "target" / TOKENIZER))
    loaded = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    target: Any = loaded.to(device).eval()
    length = run.recipe.distill_length
    documents = own_texts(
        target, tokenizer, pool, out / TEXTS, seed=run.seed, tokens=texts, length=length
    )
    packer = Packer(tokenizer, pool, run.recipe, run.seed)
    records = steps_of(run, target, packer, documents, steps, Functions.make(compiled))
    keep(run, records, out, DRAFT_CHECKPOINT, until=until)
    if run.step < run.recipe.practice_steps + steps:
        return out
    export_model(run.model, tokenizer, out / "draft")
    return out / "draft"
