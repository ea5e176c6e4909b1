"""Settings of a method, measured on a pair of models as its paper measures them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun.drafters.model import ModelDrafter
from forerun.drafters.none import NullDrafter
from forerun.engine import Sampling
from forerun.errors import PromptError, SettingError, require
from forerun.model import Model, PromptLike
from forerun.registry import Spec
from forerun.runtime.base import Rows
from forerun.signals import entropy

SCHEMA = 1
ELEMENTS = 1 << 24  # most logits held at once, so that a large vocabulary does not fill the memory


def easd(
    model: Model,
    prompts: Sequence[PromptLike],
    *,
    share: float = 0.05,
    sampling: Sampling | Sequence[Sampling] | None = None,
    batch_size: int = 16,
    target_only: bool = False,
    progress: Callable[[str, int], None] = lambda phase, done: None,
) -> dict[str, Any]:
    """τ_H of the rule `easd`: the mean of the target's highest entropies over validation prompts.

    The highest ⌈share · steps⌉ of greedy texts, at temperature 1 and before sampling transforms.

    Args:
        model: target and drafter; the drafter's entropies are taken at the same steps, to show how
            often both exceed τ_H.
        prompts: of the task, not those that are tested on.
        share: of the steps, in (0, 1] (0.05 in the paper).
        sampling: one for all prompts or one per prompt; always made greedy.
        batch_size: prompts decoded together.
        target_only: leave the drafter's entropies out, for `easd(overlap=0, draft_entropy=False)`.
        progress: called with the phase, ``"decoding"`` or ``"reading"``, and the prompts done.

    Returns:
        The document of `calibrate easd` (docs/json.md) but for `schema`, `settings` and `versions`:
        `rule`, a spec, τ_H to four decimals; `entropy`, τ_H in nats, the mean of the `top` highest,
        a `share` of all; `target` and `draft`, `statistics` of the entropies, the draft's at the
        same steps within its context; `both`, the share of these at which both exceed τ_H. What is
        of the draft is None if it was not read.

    Raises:
        PromptError: no prompts, or one that is empty or does not fit.
        SettingError: a drafter that is no draft model, or a share out of range.

    Reference: Su et al. 2025 (EASD), §3.6.
    """
    drafter = _drafter(model, target_only)
    require(type(share) in (int, float) and 0 < share <= 1, "share", share, "in (0, 1]")
    if not prompts:
        raise PromptError("no prompts to calibrate on")
    texts = _decode(model, prompts, sampling, batch_size, progress)
    of_target, of_draft = [], []
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        sources = [text.source for text in batch if text.source is not None]
        of_target.append(_entropies(model.target, batch, sources))
        if drafter is not None:
            of_draft.append(_entropies(drafter.rows, batch, drafter.readable(sources)))
        progress("reading", start + len(batch))
    target, draft = torch.cat(of_target), None if drafter is None else torch.cat(of_draft)
    return _calibrated(target, draft, share) | {"share": share, "prompts": len(prompts)}


def _calibrated(target: torch.Tensor, draft: torch.Tensor | None, share: float) -> dict[str, Any]:
    """The rest of what `easd` returns, of `(n,)` entropies; the draft's are NaN where it did not
    read."""
    threshold, top = top_mean(target.tolist(), share)
    settings: dict[str, Any] = {"entropy": round(threshold, 4)}
    own, both = None, None
    if draft is None:
        settings |= {"overlap": 0, "draft_entropy": False}
    else:
        read = ~draft.isnan()
        if not read.any():
            raise PromptError("no prompt fits the draft's context; use shorter ones")
        own = statistics(draft[read])
        both = ((target > threshold) & (draft > threshold))[read].double().mean().item()
    named = {"method": "easd", "rule": str(Spec("easd", (), settings)), "entropy": threshold}
    return {**named, "top": top, "target": statistics(target), "draft": own, "both": both}


def _drafter(model: Model, target_only: bool) -> ModelDrafter | None:
    """Whose entropies are taken beside the target's."""
    if target_only or isinstance(model.drafter, NullDrafter):
        return None
    if not isinstance(model.drafter, ModelDrafter):
        raise SettingError(
            "the penalty of easd needs the draft's entropy, and this drafter is no model; give a "
            "draft model, or `target_only` for easd(overlap=0,draft_entropy=False)"
        )
    return model.drafter


def statistics(values: torch.Tensor) -> dict[str, float]:
    """Of `(n,)` float64 entropies in nats, n ≥ 1: `steps`, `mean`, `median`, `q95`, `q99`, `max`;
    quantiles between two values are interpolated."""
    steps, ranked = len(values), values.numpy()
    median, q95, q99 = np.quantile(ranked, (0.5, 0.95, 0.99)).tolist()
    named = {"steps": steps, "mean": math.fsum(ranked.tolist()) / steps, "median": median}
    return {**named, "q95": q95, "q99": q99, "max": float(ranked.max())}


def top_mean(values: Sequence[float], share: float) -> tuple[float, int]:
    """Mean of the highest ⌈share · n⌉ of n ≥ 1 values, and how many those are."""
    # As written: 0.07 · 100 is 7, although the float product exceeds it.
    count = math.ceil(Fraction(str(share)) * len(values))
    return math.fsum(sorted(values)[-count:]) / count, count


class DecodedText(NamedTuple):
    """Token ids of a prompt, of what an encoder reads, if there is one, and of the output."""

    prompt: list[int]
    source: list[int] | None
    output: list[int]


def _decode(
    model: Model,
    prompts: Sequence[PromptLike],
    sampling: Sampling | Sequence[Sampling] | None,
    batch_size: int,
    tell: Callable[[str, int], None],
) -> list[DecodedText]:
    """Greedy outputs, by length, so that those read together are alike."""
    ids = [model.encode(prompt) for prompt in prompts]
    if sampling is None or isinstance(sampling, Sampling):
        greedy: Any = replace(sampling or Sampling(), temperature=0.0)
    else:
        greedy = [replace(s, temperature=0.0) for s in sampling]
    outputs: dict[int, list[int]] = {}
    for event in model.stream(ids, sampling=greedy, batch_size=batch_size):
        if event.completion is not None:
            outputs[event.request] = event.completion.tokens
            tell("decoding", len(outputs))
    contexts = [model.context(given) for given in ids]
    written = [outputs[i] for i in sorted(outputs)]
    texts = [DecodedText(*own, out) for own, out in zip(contexts, written, strict=True)]
    return sorted(texts, key=lambda text: (len(text.output), len(text.prompt)))


@torch.inference_mode()
def _entropies(
    rows: Rows, texts: list[DecodedText], sources: Sequence[Sequence[int]] | None
) -> torch.Tensor:
    """Float64 entropies in nats after the prompt and after each output token but the last, text by
    text; NaN where a text is beyond the context."""
    out = [torch.full((len(t.output),), torch.nan, dtype=torch.float64) for t in texts]
    pieces = [[t.prompt[-1], *t.output[:-1]][: max(rows.limit - len(t.prompt), 0)] for t in texts]
    longest = max(map(len, pieces))
    width = max(1, ELEMENTS // (len(texts) * rows.vocab_size))
    try:
        rows.read([text.prompt[: rows.limit] for text in texts], longest, sources or None)
        for start in range(0, longest, width):
            parts = [piece[start : start + width] for piece in pieces]
            logits = rows.feed(parts).log_softmax(-1, dtype=torch.float64)
            for row, part in enumerate(parts):
                own = entropy(logits[row, : len(part)]).cpu()
                out[row][start : start + len(part)] = own
    finally:
        rows.keep([])
    return torch.cat(out)
