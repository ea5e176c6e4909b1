"""Fresh problems, bulk generation and scores for the tables about quality."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.progress import Progress

import forerun
from benchmarks.common import console
from forerun.engine import Sampling
from forerun.engine.results import Origin
from recipes.evaluate import wilson
from recipes.scoring import verdicts
from recipes.tasks import FAMILIES, arithmetic
from recipes.tasks.base import Pool

Problem = Any
CELLS = ("arithmetic easy", "arithmetic hard", "extraction")


@dataclass(frozen=True)
class Outcome:
    """One method on one cell."""

    right: list[bool]
    texts: list[str]
    tokens: int
    rounds: int
    accepted: int
    drift: float
    seconds: float
    untested: float = 0.0
    """Share of its tokens that are the target's own without a rejection."""

    def to_json(self) -> dict[str, Any]:
        """Accuracy with a 95 % Wilson interval, and the counts."""
        low, high = wilson(sum(self.right), len(self.right))
        return {
            "accuracy": float(np.mean(self.right)),
            "low": low,
            "high": high,
            "n": len(self.right),
            "tokens": self.tokens,
            "accepted_per_round": self.accepted / max(self.rounds, 1),
            "drift_mean": self.drift,
        }


def problems(cell: str, count: int) -> list[Problem]:
    """`count` different new problems of the test split (no training text can contain them)."""
    family, _, level = cell.partition(" ")
    rng, by_prompt = random.Random(f"quality/{cell}"), {}
    while len(by_prompt) < count:
        if level:
            made = arithmetic.sample(rng, "test", Pool(), level)
        else:
            made = FAMILIES[family].sample(rng, "test", Pool())
        by_prompt.setdefault(made.prompt, made)
    return list(by_prompt.values())


def coins(count: int, seed: int = 0, **how: Any) -> list[Sampling]:
    """A sampling for each text with a seed of its own: with one for all, one draw would be in all
    of them, and no interval over texts would hold."""
    return [Sampling(seed=seed + i, **how) for i in range(count)]


def solve(
    model: forerun.Model, cell: str, items: Sequence[Problem], batch: int = 64, **settings: Any
) -> Outcome:
    """Generate an answer to every problem and score it."""
    family = cell.partition(" ")[0]
    # Longest first: rows of a batch end together.
    order = sorted(range(len(items)), key=lambda i: -len(items[i].prompt))
    done: list[Any] = [None] * len(items)
    how = {k: settings.pop(k) for k in list(settings) if k in Sampling.__dataclass_fields__}
    samplings = coins(len(items), max_new_tokens=FAMILIES[family].MAX_NEW_TOKENS, **how)
    made = model.generate(
        [items[i].prompt for i in order],
        batch_size=batch,
        sampling=[samplings[i] for i in order],
        **settings,
    )
    for i, completion in zip(order, made, strict=True):
        done[i] = completion
    texts = [d.text for d in done]
    stats = [d.stats for d in done]
    tokens = sum(s.tokens for s in stats)
    return Outcome(
        right=verdicts(family, items, texts),
        texts=texts,
        tokens=tokens,
        rounds=sum(s.rounds for s in stats),
        accepted=sum(s.accepted for s in stats),
        drift=sum((s.drift_mean or 0) * s.tokens for s in stats) / tokens,
        seconds=max(s.seconds for s in stats),
        untested=sum(p.origin in (Origin.BONUS, Origin.PLAIN) for d in done for p in d.pieces)
        / tokens,
    )


def paired(ours: Sequence[bool], theirs: Sequence[bool], seed: int = 0) -> dict[str, float]:
    """Difference of two accuracies on the same problems, with a 95 % bootstrap interval."""
    gain = np.asarray(ours, float) - np.asarray(theirs, float)
    draw = np.random.default_rng(seed).integers(0, len(gain), (4000, len(gain)))
    low, high = np.quantile(gain[draw].mean(1), [0.025, 0.975])
    return {"mean": float(gain.mean()), "low": float(low), "high": float(high)}


def percent(cell: dict[str, float], digits: int = 1) -> str:
    """`41.2 [38.0, 44.5]`, in percent."""
    values = cell.get("accuracy", cell.get("mean", 0.0)), cell["low"], cell["high"]
    mean, low, high = (f"{100 * value:.{digits}f}" for value in values)
    return f"{mean} [{low}, {high}]"


def bar(label: str, total: int) -> tuple[Progress, Any]:
    """A progress bar on stderr."""
    progress = Progress(console=console, transient=True)
    return progress, progress.add_task(label, total=total)
