"""Traces made by hand, for tests of what is done with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.lab.traces.trace import JUDGED, SIGNALS, Trace


def trace_of(hits: Any, depth: int = 12, **changes: Any) -> Trace:
    """A greedy trace where the draft guesses token p of text i if `hits[i, p]`, `(prompts, T)`.

    Every signal is 0.9 for a token that will be kept and 0.1 for one that will not.
    """
    hits = np.asarray(hits, dtype=bool)
    prompts, size = hits.shape
    beyond = np.zeros((prompts, depth), dtype=bool)
    ahead = np.concatenate([hits, beyond], 1)
    run = np.stack([ahead[:, i : i + size] for i in range(depth)], -1)
    kept = run.cumprod(-1)
    tokens = np.arange(prompts * size).reshape(prompts, size) + 1
    padded = np.concatenate([tokens, np.zeros_like(beyond)], 1)
    true = np.stack([padded[:, i : i + size] for i in range(depth)], -1)
    fields: dict[str, Any] = {
        "families": tuple("ab"[i % 2] for i in range(prompts)),
        "ids": tuple(f"p{i}" for i in range(prompts)),
        "sizes": np.full(prompts, size),
        "budgets": np.full(prompts, size),
        "prompt_tokens": np.full(prompts, 3),
        "tokens": tokens,
        "draft_tokens": np.where(run, true, 0),
        "matches": kept.sum(-1),
        "ends": np.full((prompts, size), depth + 1),
        "accept_prob": kept.astype(float),
        "signals": {name: np.where(run, 0.9, 0.1) for name in SIGNALS},
        "lengths": np.full((prompts, size), depth),
        "stops": np.zeros((prompts, size), np.int64),
        "judged": judged_greedily(run),
        "about": {"draft": {"name": "someone/draft"}},
    }
    return Trace(**{**fields, **changes})


def judged_greedily(right: Any) -> dict[str, Any]:
    """`JUDGED` of `(prompts, T, K)` drafted tokens that are the target's own, or its second."""
    values = {"ratio": right, "variation": ~right, "gap": ~right, "rank": ~right}
    return {name: values.get(name, np.ones_like(right)).astype(float) for name in JUDGED}


def periodic(length: int, prompts: int = 8, size: int = 60, depth: int = 12) -> Trace:
    """The draft is right `length` times, then wrong once: fixed(length) wastes nothing."""
    hit = np.arange(size) % (length + 1) != length
    return trace_of(np.tile(hit, (prompts, 1)), depth)


def random_trace(prompts: int = 12, size: int = 50, depth: int = 12, seed: int = 0) -> Trace:
    """Independent hits, likelier in family a than in b."""
    rates = np.array([0.9 if i % 2 == 0 else 0.5 for i in range(prompts)])
    hits = np.random.default_rng(seed).random((prompts, size)) < rates[:, None]
    return trace_of(hits, depth)
