"""Fit what `auto` expects of a draft before a row has said anything.

    python -m benchmarks.auto_prior GREEDY.parquet[,...] SAMPLED.parquet[,...]

From traces of greedy and of sampled texts (`--rule standard`), one or more pairs' each, validation
prompts of all families. What is fitted are the tokens that rounds would judge that draft on to the
first rejection, one round after another; every pair weighs the same, and in it every family.
Prints the two rows of numbers that `controllers/survival.py` ships, and for each signal how well it
predicts families it was not fitted to.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np

from forerun.lab.traces.trace import Trace
from forerun.types import FloatArray, IntArray

MOST_MARGIN = 8.0
"""Logits beyond which a margin says nothing more to the fit."""


@dataclass(frozen=True)
class Judged:
    """Judged tokens, one array element each."""

    pair: IntArray
    family: IntArray
    """Of all pairs."""
    depth: IntArray
    """Tokens drafted before it in its round."""
    hit: FloatArray
    """Probability that it was kept."""
    signals: dict[str, FloatArray]
    newest: FloatArray
    """Margin of the token before it in its round."""


def judged(trace: Trace) -> Judged:
    """The tokens judged by rounds that end with the first rejection, the text or its draft."""
    family = np.unique(trace.families, return_inverse=True)[1]
    rows, place = np.arange(trace.prompts), np.zeros(trace.prompts, dtype=np.int64)
    parts: list[Judged] = []
    column = np.arange(trace.depth)
    while len(rows):
        match = trace.matches[rows, place]
        count = np.minimum(
            np.minimum(match + 1, trace.ends[rows, place]), trace.sizes[rows] - place
        )
        row, depth = np.nonzero(column < count[:, None])
        signals = {name: values[rows, place] for name, values in trace.signals.items()}
        margin = np.minimum(signals["logit_margin"], MOST_MARGIN)
        before = np.maximum(depth - 1, 0)
        parts.append(
            Judged(
                np.zeros_like(row),
                family[rows[row]],
                depth,
                trace.accept_prob[rows, place][row, depth],
                {name: values[row, depth] for name, values in signals.items()},
                margin[row, before],
            )
        )
        place = place + match + 1
        going = place < trace.sizes[rows]
        rows, place = rows[going], place[going]
    return joined(parts)


def joined(parts: list[Judged]) -> Judged:
    """The tokens of all."""
    join = np.concatenate
    return Judged(
        join([p.pair for p in parts]),
        join([p.family for p in parts]),
        join([p.depth for p in parts]),
        join([p.hit for p in parts]),
        {name: join([p.signals[name] for p in parts]) for name in parts[0].signals},
        join([p.newest for p in parts]),
    )


def of_pairs(paths: str) -> Judged:
    """The judged tokens of traces of some pairs, their names separated by commas."""
    parts: list[Judged] = []
    for pair, path in enumerate(paths.split(",")):
        one = judged(Trace.read(path))
        families = 1 + max((int(p.family.max()) for p in parts), default=-1)
        parts.append(replace(one, pair=one.pair + pair, family=one.family + families))
    return joined(parts)


def fitted(x: FloatArray, hit: FloatArray, weight: FloatArray) -> FloatArray:
    """Logistic regression of probabilities on `(n, features)`, by Newton's method."""
    b = np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ b))
        info = (x * (weight * p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(len(b))
        turn = np.linalg.solve(info, x.T @ (weight * (hit - p)))
        b = b + turn
        if np.abs(turn).max() < 1e-9:
            break
    return b


def even(pair: IntArray, family: IntArray) -> FloatArray:
    """Weights by which every pair counts the same, and every family of it."""
    weights: FloatArray = (1 / np.maximum(np.bincount(family), 1))[family]
    weights = weights / np.bincount(pair, weights)[pair]
    return weights / weights.mean()


def with_one(*features: FloatArray) -> FloatArray:
    """`(n, 1 + features)` a constant and the features."""
    return np.column_stack([np.ones(len(features[0])), *features])


def left_out(x: FloatArray, tokens: Judged) -> float:
    """Mean log-loss on each family of what was fitted to the others."""
    losses = []
    for family in np.unique(tokens.family):
        out = tokens.family == family
        b = fitted(x[~out], tokens.hit[~out], even(tokens.pair[~out], tokens.family[~out]))
        z = x[out] @ b
        losses.append((np.logaddexp(0, z) - tokens.hit[out] * z).mean())
    return float(np.mean(losses))


def prior(tokens: Judged, signal: str) -> list[float]:
    """The numbers of one row: token by margin or chosen, first token, next token."""
    weight = even(tokens.pair, tokens.family)
    margin = np.minimum(tokens.signals["logit_margin"], MOST_MARGIN)
    of = {"logit_margin": margin, "chosen": tokens.signals["chosen"]}[signal]
    constant, slope = fitted(with_one(of), tokens.hit, weight)
    kept = [constant, slope, 0.0] if signal == "logit_margin" else [constant, 0.0, slope]
    first = tokens.depth == 0
    begins = fitted(np.ones((first.sum(), 1)), tokens.hit[first], weight[first])
    x = with_one(tokens.newest[~first])
    return [*kept, *begins, *fitted(x, tokens.hit[~first], weight[~first])]


def main(paths: list[str]) -> None:
    """Print what is shipped, and the comparison of signals."""
    for name, path, signal in zip(
        ("GREEDY", "SAMPLED"), paths, ("logit_margin", "chosen"), strict=True
    ):
        tokens = of_pairs(path)
        print(f"{name} = ({', '.join(f'{b:.2f}' for b in prior(tokens, signal))})")
        for field, values in tokens.signals.items():
            x = with_one(np.minimum(values, MOST_MARGIN) if field == "logit_margin" else values)
            print(f"  {field:20s} log-loss on families left out {left_out(x, tokens):.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
