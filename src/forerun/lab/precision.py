"""How far greedy texts in another precision are from those in float32, and where they part.

A reduced precision is another model, near the first: each logit moves a little, and where the two
best are closer than that, another token may win. `compare` writes the same prompts in both, and
then reads the float32 texts in both, so that every position counts once, whatever came before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from forerun.engine import Sampling
from forerun.errors import PromptError
from forerun.lab.audit import Transform, first_difference
from forerun.model import Model
from forerun.runtime.base import CHUNK, Rows

QUANTILES = {"median": 0.5, "p99": 0.99, "largest": 1.0}


@dataclass(frozen=True)
class AuditedText:
    """What became of one prompt."""

    prompt: int  # index of the prompt
    first: int | None  # the first output token that differs; None: the texts are equal
    gaps: list[float]  # per position of the float32 text the gap of its two best logits
    moved: list[float]  # per position the largest difference of any logit
    other: list[int]  # positions whose best token is another


def compare(
    exact: Model,
    other: Model,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling] | None = None,
) -> Iterator[AuditedText]:
    """Write and read prompts in float32 and in another precision, one after the other, greedily."""
    if not prompts:
        raise PromptError("no prompts to compare")
    for i, prompt in enumerate(prompts):
        how = replace(samplings[i] if samplings else Sampling(), temperature=0.0)
        text, theirs = (
            model.generate([list(prompt)], sampling=how, plain=True)[0].tokens
            for model in (exact, other)
        )
        seen = [_logits(model.target, prompt, text) for model in (exact, other)]
        best = [_best(exact, prompt, text, how, logits) for logits in seen]
        gaps = [gap for _, gap in best[0]]
        parted = [at for at, (a, b) in enumerate(zip(*best, strict=True)) if a[0] != b[0]]
        moved = (seen[0] - seen[1]).abs().amax(-1).tolist()
        yield AuditedText(i, first_difference(text, theirs), gaps, moved, parted)


def summary(texts: Sequence[AuditedText]) -> dict[str, Any]:
    """Counts, quantiles of how far logits moved, and gaps where another token was best."""
    moved = [x for text in texts for x in text.moved]
    parted = [text.gaps[at] for text in texts for at in text.other]
    differ = [(text.gaps, text.first) for text in texts if text.first is not None]
    first = [gaps[at] for gaps, at in differ if at < len(gaps)]
    return {
        "texts": len(texts),
        "texts_differ": len(differ),
        "positions": len(moved),
        "positions_differ": len(parted),
        "moved": _quantiles(moved),
        "gaps_all": _quantiles([gap for text in texts for gap in text.gaps]),
        "gaps_where_best_differs": _quantiles(parted),
        "gaps_where_texts_part": _quantiles(first),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}


@torch.inference_mode()
def _logits(target: Rows, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """`(len(text), V)` float64 logits before each token of a text, read in chunks."""
    tokens = [*prompt, *text[:-1]]
    try:
        target.read([list(prompt)])
        out = []
        while (at := target.lengths[0]) < len(tokens):
            out.append(target.feed([tokens[at : at + CHUNK]])[0].double().cpu())
        return torch.cat(out)
    finally:
        target.keep([])


def _best(
    model: Model, prompt: Sequence[int], text: Sequence[int], how: Sampling, logits: torch.Tensor
) -> list[tuple[int, float]]:
    """Per position the best token under the request's penalties, and its lead over the second."""
    out = []
    for at, row in enumerate(logits):
        judged = Transform(model, [*prompt, *text[:at]], len(prompt), how)(row)
        values, tokens = judged.topk(2)
        out.append((int(tokens[0]), float(values[0] - values[1])))
    return out
