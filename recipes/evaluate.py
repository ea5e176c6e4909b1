"""Measures the shipped pair on its test prompts: quality, agreement, perplexity."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.zoo import DRAFT, TARGET, ShippedPrompt, families, prompts
from recipes.distill import complete
from recipes.scoring import score, verdicts

BATCH = 50


def load(folder: Path, device: str = "cpu") -> Any:
    """A shipped model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


@torch.no_grad()
def nats_per_token(
    model: Any, tokenizer: Any, items: Sequence[ShippedPrompt]
) -> list[tuple[float, int]]:
    """Per prompt: summed negative log-likelihood of the answer's tokens, and their number."""
    device = next(model.parameters()).device
    results = []
    for begin in range(0, len(items), BATCH):
        part = items[begin : begin + BATCH]
        texts = [tokenizer(p.prompt + p.answer)["input_ids"] for p in part]
        sizes = [len(tokenizer(p.prompt)["input_ids"]) for p in part]
        width = max(map(len, texts))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in texts], device=device)
        log = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        nll = -log.gather(-1, ids[:, 1:, None])[..., 0]
        for row, (text, size) in enumerate(zip(texts, sizes, strict=True)):
            results.append((float(nll[row, size - 1 : len(text) - 1].sum()), len(text) - size))
    return results


def perplexity(model: Any, tokenizer: Any, items: Sequence[ShippedPrompt] | None = None) -> float:
    """Perplexity per token of the answers given their prompts (default: stories, test)."""
    results = nats_per_token(model, tokenizer, items or prompts("stories"))
    return math.exp(sum(nll for nll, _ in results) / sum(count for _, count in results))


@torch.no_grad()
def agreement(draft: Any, texts: Sequence[list[int]], sizes: Sequence[int]) -> list[list[bool]]:
    """Per text, per generated token (after the first ``sizes`` tokens): does the draft agree?

    The texts are the target's greedy outputs, so agreement is greedy acceptance of a draft that
    always continues the true prefix.
    """
    device = next(draft.parameters()).device
    results = []
    for begin in range(0, len(texts), BATCH):
        part = list(texts[begin : begin + BATCH])
        width = max(map(len, part))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in part], device=device)
        hits = draft(ids, use_cache=False).logits[:, :-1].argmax(-1) == ids[:, 1:]
        for row, text in enumerate(part):
            results.append(hits[row, sizes[begin + row] - 1 : len(text) - 1].tolist())
    return results


@torch.no_grad()
def overlap(
    target: Any, draft: Any, texts: Sequence[list[int]], sizes: Sequence[int]
) -> list[list[float]]:
    """Per text, per generated token: the probability that standard sampling accepts the draft.

    It is the mass that both distributions share at temperature 1, ``sum(min(target, draft))``.
    """
    device = next(draft.parameters()).device
    results = []
    for begin in range(0, len(texts), BATCH):
        part = list(texts[begin : begin + BATCH])
        width = max(map(len, part))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in part], device=device)
        shares = [m(ids, use_cache=False).logits[:, :-1].softmax(-1) for m in (target, draft)]
        mass = torch.minimum(*shares).sum(-1)
        for row, text in enumerate(part):
            results.append(mass[row, sizes[begin + row] - 1 : len(text) - 1].tolist())
    return results


@torch.no_grad()
def depth_agreement(
    target: Any, texts: Sequence[list[int]], sizes: Sequence[int], layers: Sequence[int]
) -> dict[int, float]:
    """Per layer: share of generated tokens that it predicts like the last layer.

    It predicts through the model's own last norm and head; the texts begin with ``sizes`` tokens
    of prompt.
    """
    same = dict.fromkeys(layers, 0)
    count = 0
    for text, size in zip(texts, sizes, strict=True):
        ids = torch.tensor([text], device=next(target.parameters()).device)
        out = target.model(ids, use_cache=False, output_hidden_states=True)
        place = slice(size - 1, len(text) - 1)
        best = target.lm_head(out.last_hidden_state[0, place]).argmax(-1)
        for layer in layers:
            state = target.model.norm(out.hidden_states[layer][0, place])
            same[layer] += int((target.lm_head(state).argmax(-1) == best).sum())
        count += len(text) - size
    return {layer: hits / max(1, count) for layer, hits in same.items()}


def block_efficiency(hits: Sequence[Sequence[bool]], drafted: int) -> float:
    """Tokens committed per round of a fixed length, replayed on greedy agreement.

    A round at position ``i`` accepts the run of agreeing tokens from ``i`` (at most ``drafted``)
    and commits one more; the last round of a text commits only what is left of it.
    """
    tokens = rounds = 0
    for row in hits:
        at = 0
        while at < len(row):
            run = 0
            while run < drafted and at + run < len(row) and row[at + run]:
                run += 1
            step = min(run + 1, len(row) - at)
            at, tokens, rounds = at + step, tokens + step, rounds + 1
    return tokens / rounds if rounds else 0.0


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson score)."""
    z = 1.96
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return middle - half, middle + half


def bootstrap(
    statistic: Callable[[list[int]], float], count: int, draws: int = 500
) -> tuple[float, float]:
    """95 % interval of a statistic over ``count`` prompts resampled with replacement."""
    rng = random.Random(0)
    values = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(draws))
    return values[int(0.025 * draws)], values[int(0.975 * draws) - 1]


def _interval(
    family: str,
    metric: str,
    items: Sequence[ShippedPrompt],
    outputs: Sequence[str],
) -> tuple[float, float]:
    if metric.startswith(("exact", "accuracy", "holds")):
        level = metric.removeprefix("accuracy_") if metric.startswith("accuracy_") else ""
        right = [
            ok
            for p, ok in zip(items, verdicts(family, items, outputs), strict=True)
            if not level or p.level == level
        ]
        return wilson(sum(right), len(right))
    return bootstrap(
        lambda at: score(family, [items[i] for i in at], [outputs[i] for i in at])[metric],
        len(items),
        draws=200,
    )


def _quality(
    family: str, model: Any, tokenizer: Any, items: list[ShippedPrompt], outputs: list[list[int]]
) -> dict[str, Any]:
    texts = [tokenizer.decode(out, skip_special_tokens=True) for out in outputs]
    results: dict[str, Any] = {}
    for metric, value in score(family, items, texts).items():
        if metric == "n":
            continue
        low, high = _interval(family, metric, items, texts)
        results[metric] = {"value": round(value, 4), "ci95": [round(low, 4), round(high, 4)]}
    nll = nats_per_token(model, tokenizer, items)

    def ppl(at: Sequence[int]) -> float:
        return math.exp(sum(nll[i][0] for i in at) / sum(nll[i][1] for i in at))

    low, high = bootstrap(ppl, len(items))
    results["perplexity"] = {
        "value": round(ppl(range(len(items))), 3),
        "ci95": [round(low, 3), round(high, 3)],
    }
    return results


def evaluate(
    *,
    target: Path = TARGET,
    draft: Path | None = DRAFT,
    names: Sequence[str] = families(),
    limit: int | None = None,
    split: str = "test",
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every metric of both models and the greedy acceptance rate, per family, in float32.

    Without a ``draft``, the target alone. ``depth_agreement`` is of its layers after a quarter and
    a half of its depth, through its own last norm and head.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    models = {"target": load(target, device)}
    if draft is not None:
        models["draft"] = load(draft, device)
    report: dict[str, Any] = {
        "parameters": {
            name: sum(p.numel() for p in model.parameters()) for name, model in models.items()
        },
        "split": split,
        "dtype": "float32",
        "families": {},
    }
    for family in names:
        items = prompts(family, split, limit)
        report["families"][family] = entry = _family(family, items, models, tokenizer)
        say(f"{family}: {_line(entry)}")
    return report


def _family(
    family: str, items: list[ShippedPrompt], models: dict[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The entry of one family."""
    ids = [tokenizer(p.prompt)["input_ids"] for p in items]
    entry: dict[str, Any] = {"n": len(items)}
    written: dict[str, list[list[int]]] = {}
    for name, model in models.items():
        written[name] = outputs = []
        for begin in range(0, len(ids), BATCH):
            part = ids[begin : begin + BATCH]
            outputs += complete(model, part, items[0].max_new_tokens, greedy=True)
        entry[name] = _quality(family, model, tokenizer, items, outputs)
    outputs, target = written["target"], models["target"]
    texts = [p + o for p, o in zip(ids, outputs, strict=True)]
    sizes = [len(p) for p in ids]
    layers = target.config.num_hidden_layers
    shares = depth_agreement(target, texts, sizes, sorted({layers // 4, layers // 2} - {0}))
    entry["depth_agreement"] = {str(layer): round(share, 4) for layer, share in shares.items()}
    entry["tokens_per_output"] = round(sum(map(len, outputs)) / len(outputs), 1)
    entry["samples"] = [
        {"prompt": p.prompt, "output": tokenizer.decode(o, skip_special_tokens=True)}
        for p, o in list(zip(items, outputs, strict=True))[:3]
    ]
    if "draft" in models:
        entry |= _acceptance(models, texts, sizes)
        entry["acceptance_rate_sampled"] = _sampled_acceptance(models, ids, items[0])
    return entry


def _acceptance(models: dict[str, Any], texts: list[list[int]], sizes: list[int]) -> dict[str, Any]:
    """Greedy acceptance and block efficiency on the target's greedy texts."""
    hits = agreement(models["draft"], texts, sizes)
    counts = [(sum(row), len(row)) for row in hits]

    def rate(at: Sequence[int]) -> float:
        return sum(counts[i][0] for i in at) / max(1, sum(counts[i][1] for i in at))

    low, high = bootstrap(rate, len(counts))
    return {
        "acceptance_rate": {
            "value": round(rate(range(len(counts))), 4),
            "ci95": [round(low, 4), round(high, 4)],
        },
        "block_efficiency": {str(k): round(block_efficiency(hits, k), 3) for k in (2, 4, 8)},
    }


def _sampled_acceptance(
    models: dict[str, Any], ids: list[list[int]], first: ShippedPrompt
) -> dict[str, Any]:
    """Acceptance at temperature 1, on texts the target samples for the first prompts."""
    torch.manual_seed(0)
    part = ids[: 2 * BATCH]
    outputs: list[list[int]] = []
    for begin in range(0, len(part), BATCH):
        batch = part[begin : begin + BATCH]
        outputs += complete(models["target"], batch, first.max_new_tokens, greedy=False)
    texts = [p + o for p, o in zip(part, outputs, strict=True)]
    shares = overlap(models["target"], models["draft"], texts, [len(p) for p in part])

    def mean(at: Sequence[int]) -> float:
        return sum(sum(shares[i]) for i in at) / sum(len(shares[i]) for i in at)

    low, high = bootstrap(mean, len(part))
    return {
        "n": len(part),
        "value": round(mean(range(len(part))), 4),
        "ci95": [round(low, 4), round(high, 4)],
    }


def _line(entry: dict[str, Any]) -> str:
    parts = []
    for name in ("target", "draft"):
        if name in entry:
            metrics = ", ".join(f"{key} {item['value']:.3g}" for key, item in entry[name].items())
            parts.append(f"{name} {metrics}")
    depths = ", ".join(f"{share:.3f} after {n}" for n, share in entry["depth_agreement"].items())
    parts.append(f"layers agree {depths}")
    if "acceptance_rate" in entry:
        parts.append(
            f"acceptance {entry['acceptance_rate']['value']:.3f}, at temperature 1 "
            f"{entry['acceptance_rate_sampled']['value']:.3f}"
        )
    return "; ".join(parts)
