"""Stage 2: the draft learns from texts the finished target writes itself.

Reference: Zhou et al., "DistillSpec: Improving Speculative Decoding via Knowledge Distillation"
(ICLR 2024).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from forerun.zoo.optim import optimizers
from forerun.zoo.packing import Packer
from forerun.zoo.recipe import Recipe
from forerun.zoo.tasks import FAMILIES
from forerun.zoo.tasks.base import Pool

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


def self_generated(
    target: Any,
    tokenizer: Any,
    pool: Pool,
    recipe: Recipe,
    seconds: float,
    seed: int,
    rows: int = 64,
) -> list[Document]:
    """What the target writes on training prompts in ``seconds``: greedy and sampled in turn."""
    begin = time.perf_counter()
    rng = random.Random(f"distill/{seed}")
    torch.manual_seed(seed)
    # By tokens, stories get twice the share of each task.
    names = ["stories", "stories", *recipe.task_weights]
    documents: list[Document] = []
    turn = 0
    while time.perf_counter() - begin < seconds:
        name = names[turn % len(names)]
        greedy = turn // len(names) % 2 == 0
        family = FAMILIES[name]
        examples = [family.sample(rng, "train", pool) for _ in range(rows)]
        prompts = [tokenizer.encode(example.prompt).ids for example in examples]
        outputs = complete(target, prompts, min(family.MAX_NEW_TOKENS, 80), greedy)
        documents += [(p + o, len(p)) for p, o in zip(prompts, outputs, strict=True)]
        turn += 1
    return documents


def pack_documents(
    rng: random.Random, documents: list[Document], rows: int, length: int, prompt_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and loss weights (rows, length) of randomly drawn whole documents."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    weights = torch.zeros(rows, length)
    for row in range(rows):
        at = 0
        while True:
            tokens, prompt = rng.choice(documents)
            if at + len(tokens) > length:
                break
            ids[row, at : at + len(tokens)] = torch.tensor(tokens)
            weights[row, at : at + prompt] = prompt_weight
            weights[row, at + prompt : at + len(tokens)] = 1
            at += len(tokens)
            if at < length and tokens[-1] != 0:
                at += 1  # a cut text: end-of-text after it, not scored
    return ids, weights


def divergence(
    target: Any, draft: Any, ids: torch.Tensor, weights: torch.Tensor, autocast: bool
) -> torch.Tensor:
    """Forward KL(target ‖ draft) in nats per scored token."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            target_log = target(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        draft_log = draft(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    share = weights[:, 1:] / weights[:, 1:].sum()
    return ((target_log.exp() * (target_log - draft_log)).sum(-1) * share).sum()


def cross_entropy(
    draft: Any, ids: torch.Tensor, weights: torch.Tensor, autocast: bool
) -> torch.Tensor:
    """Cross-entropy of the draft alone, in nats per scored token."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        log = draft(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    share = weights[:, 1:] / weights[:, 1:].sum()
    return -(log.gather(-1, ids[:, 1:, None])[..., 0] * share).sum()


def practice_rows(
    packer: Packer, rng: random.Random, rows: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights (rows, length) of copying practice."""
    ids = np.zeros((rows, length), dtype=np.int64)
    weights = np.ones((rows, length), dtype=np.float32)
    for row in range(rows):
        packer.repeats(rng, ids[row], weights[row])
    return torch.from_numpy(ids), torch.from_numpy(weights)


def _mixture(
    packer: Packer,
    documents: list[Document],
    recipe: Recipe,
    rows: int,
    progress: float,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of one batch: two thirds own texts of the target, one third data.

    A quarter of the rows is copying practice at first.
    """
    rng = random.Random(f"distill/{packer.seed}/{step}")
    length = recipe.length
    practice = round(rows / 4 * max(0.0, 1 - progress / recipe.distill_practice))
    data = (rows - practice) // 3
    ids, weights = pack_documents(rng, documents, rows - practice - data, length, 0.1)
    batch = packer.batch(10_000_000 + step, length)
    repeats, scored = practice_rows(packer, rng, practice, length)
    chosen = slice(1, 1 + data)  # a batch begins with a book; then tasks
    return (
        torch.cat([ids, torch.from_numpy(batch.ids[chosen]), repeats]),
        torch.cat([weights, torch.from_numpy(batch.weights[chosen]), scored]),
    )


def _update(
    loss: torch.Tensor, draft: Any, both: list[torch.optim.Optimizer], rate: float
) -> float:
    """One optimiser step at ``rate`` times the peak learning rates; returns the loss."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    for optimizer in both:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def practise_copying(
    draft: Any,
    packer: Packer,
    recipe: Recipe,
    *,
    steps: int,
    minutes: float | None,
    compiled: bool,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Trains the draft alone, in place, to continue a string that it has seen before.

    Two layers do not find this out from the target's distributions in so short a training; without
    it, extraction and rewriting have nearly no accepted drafts. A quarter of the rows is data.
    """
    device = next(draft.parameters()).device
    autocast = compiled or device.type == "cuda"
    loss_of = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy
    both = optimizers([draft], recipe)
    length = max(64, recipe.length // 2)
    rows = max(4, recipe.batch_tokens // (2 * length))
    begin = time.perf_counter()
    for step in range(steps):
        if minutes is not None and time.perf_counter() - begin > 60 * minutes:
            return
        rng = random.Random(f"practice/{packer.seed}/{step}")
        ids, weights = practice_rows(packer, rng, rows - rows // 4, length)
        batch = packer.batch(20_000_000 + step, length)
        ids = torch.cat([ids, torch.from_numpy(batch.ids[1 : 1 + rows // 4])])
        weights = torch.cat([weights, torch.from_numpy(batch.weights[1 : 1 + rows // 4])])
        loss = loss_of(draft, ids.to(device), weights.to(device), autocast)
        rate = recipe.distill_rate * min(1.0, step / 50 + 0.05)
        value = _update(loss, draft, both, rate)
        report(
            {
                "practice_step": step + 1,
                "cross_entropy": round(value, 4),
                "tokens": (step + 1) * rows * length,
                "elapsed": round(time.perf_counter() - begin, 1),
            }
        )


def distill(
    target: Any,
    draft: Any,
    packer: Packer,
    documents: list[Document],
    recipe: Recipe,
    *,
    steps: int,
    minutes: float | None,
    compiled: bool,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Trains the draft in place, the learning rate falling linearly to zero."""
    device = next(draft.parameters()).device
    autocast = compiled or device.type == "cuda"
    loss_of = torch.compile(divergence, dynamic=False) if compiled else divergence
    both = optimizers([draft], recipe)
    length = recipe.length
    rows = max(3, recipe.batch_tokens // length)
    begin = time.perf_counter()
    step = 0
    while True:
        progress = step / steps
        if minutes is not None:
            progress = max(progress, (time.perf_counter() - begin) / (60 * minutes))
        if progress >= 1:
            return
        rate = recipe.distill_rate * min(1.0, progress * 20 + 0.05, 1 - progress)
        ids, weights = _mixture(packer, documents, recipe, rows, progress, step)
        loss = loss_of(target, draft, ids.to(device), weights.to(device), autocast)
        value = _update(loss, draft, both, rate)
        step += 1
        report(
            {
                "distill_step": step,
                "progress": round(progress, 4),
                "divergence": round(value, 4),
                "tokens": step * rows * length,
                "elapsed": round(time.perf_counter() - begin, 1),
            }
        )
