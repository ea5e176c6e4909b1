"""Scenes to judge, and the exact enumeration of what a rule emits."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from functools import cache

import torch

from forerun.arrays import one_hot, softmax
from forerun.rules import RULES, AcceptanceRule
from forerun.types import Draft, Target, Verdict

NEG = -math.inf
LAST = 1 - 2**-53  # the highest coin


def make(spec: str) -> AcceptanceRule:
    return RULES.make(spec)


def tensors(part) -> dict[str, torch.Tensor]:
    """The tensors of a draft, target or verdict, by name."""
    return {f.name: v for f in fields(part) if (v := getattr(part, f.name)) is not None}


def assert_close(one: Verdict, other: Verdict, atol=0.0, but=()):
    """Equal, drift and all; `atol=0` is bit for bit."""
    assert tensors(one).keys() - but == tensors(other).keys() - but
    for name, value in tensors(one).items():
        if name not in but:
            torch.testing.assert_close(value, tensors(other)[name], atol=atol, rtol=0)


def scene(rows=5, width=4, vocab=7, *, seed=0, greedy=None, certain=False, dtype=torch.float32):
    """A random draft, target and coins, with all that rules read.

    As in the engine: sampling rows are at temperature 0.8, a greedy row's draft is certain.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (2 * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    lengths[: rows // 2] = width
    guess = normal(rows, width, vocab)
    raw = normal(rows, width + 1, vocab)
    if width:
        raw[:, :width] += guess  # so that some drafts are good
    tokens = guess.argmax(-1) * (torch.arange(width) < lengths.unsqueeze(-1))
    mask = torch.zeros(rows, dtype=torch.bool) if greedy is None else torch.as_tensor(greedy)
    mask = mask.expand(rows).clone()
    at = mask.view(-1, 1, 1)
    probs = torch.where(at, one_hot(guess), softmax((guess / 0.8).to(dtype)))
    coins = torch.rand(rows, width + 1, generator=g, dtype=torch.float64)
    made = torch.randint(0, 20, (rows,), generator=g).double()
    spent = torch.stack([made * torch.rand(rows, generator=g).double() / 20, made], -1)
    draft = Draft(tokens, lengths, None if certain else probs, guess)
    return draft, Target(torch.where(at, raw, raw / 0.8).to(dtype), mask, raw, spent), coins


# --- enumeration --------------------------------------------------------------------------------

Conditional = dict[tuple[int, ...], torch.Tensor]
"""Processed logits after every prefix."""


@dataclass(frozen=True)
class Keep:
    """Sampling transforms, written for clarity."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits / self.temperature
        order = logits.argsort(descending=True)
        keep = torch.zeros_like(logits, dtype=torch.bool)
        mass = 0.0
        for rank, token in enumerate(order.tolist()):
            if (self.top_k and rank >= self.top_k) or mass >= self.top_p:
                break
            keep[token] = True
            mass += logits.softmax(-1)[token].item()
        return logits.masked_fill(~keep, NEG)


TRANSFORMS = [
    Keep(),
    Keep(temperature=0.5),
    Keep(temperature=1.7),
    Keep(top_k=2),
    Keep(top_p=0.7),
    Keep(temperature=0.8, top_k=3, top_p=0.9),
]


@cache
def conditionals(vocab, depth, seed, keep) -> Conditional:
    g = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(depth) for p in itertools.product(range(vocab), repeat=n)]
    return {p: keep(1.5 * torch.randn(vocab, generator=g, dtype=torch.float64)) for p in prefixes}


def joint(target: Conditional, start: tuple[int, ...], depth: int, vocab: int):
    """Probability of every continuation of `start` up to `depth` tokens, by the chain rule."""
    table = {start: 1.0}
    for _ in range(depth - len(start)):
        table = {
            (*p, v): mass * chance
            for p, mass in table.items()
            for v, chance in enumerate(target[p].softmax(-1).tolist())
        }
    return table


def drawn(logits: torch.Tensor) -> list[float]:
    """Probability of drafting each token; from what is no distribution, `sample` takes token 0."""
    probs = logits.softmax(-1)
    return (one_hot(-torch.arange(len(probs))) if probs.isnan().any() else probs).tolist()


def drafts(draft: Conditional, window, vocab, certain, stop):
    """(tokens, probability, all tokens drawn) of every draft, stopping where `stop` says so."""
    if certain:
        tokens: tuple[int, ...] = ()
        while len(tokens) < window:
            tokens += (int(draft[tokens].argmax()),)
        return [(tokens, 1.0)]
    finished, open_ = [], [((), 1.0)]
    for i in range(window):
        grown = []
        for prefix, mass in open_:
            for v, p in enumerate(drawn(draft[prefix])):
                if p > 0:
                    kept = stop(draft[prefix], (*prefix, v))
                    place = grown if kept is None and i + 1 < window else finished
                    place.append(((*prefix, v) if kept is None else kept, mass * p))
        open_ = grown
    return finished


def never(logits, tokens):
    return None


def unsure(logits):
    return logits.softmax(-1).max() < 0.6


def keeps_last(logits, tokens):
    return tokens if unsure(logits) else None


def drops_last(logits, tokens):
    return tokens[:-1] if unsure(logits) else None


def outcomes(rule, target, draft, window, vocab, certain=False, stop=never, raw=None, spent=None):
    """`(draft, its probability, n)` and the verdict when coins ask for n accepted tokens, each.

    `raw` are the two models at temperature 1, if that is different.
    """
    blank = torch.zeros(vocab, dtype=torch.float64)
    cases = drafts(draft, window, vocab, certain, stop)
    meta = [(path, mass, n) for path, mass in cases for n in range(len(path) + 1)]

    def rows(table, places):
        """The logits after every prefix of every draft."""
        logits = [[table.get(path[:i], blank) for i in range(places)] for path, _, _ in meta]
        return torch.stack([torch.stack(row) for row in logits])

    raw_target, raw_draft = raw or (target, draft)
    tokens = torch.tensor([[*path, *[0] * (window - len(path))] for path, _, _ in meta])
    lengths = torch.tensor([len(path) for path, _, _ in meta])
    coins = [[0.0] * n + [LAST] * (window - n) + [0.5] for _, _, n in meta]
    guess = None if certain else rows(draft, window)
    verdict = rule.judge(
        Draft(tokens, lengths, None if guess is None else softmax(guess), rows(raw_draft, window)),
        Target(
            rows(target, window + 1),
            torch.zeros(len(meta), dtype=torch.bool),
            rows(raw_target, window + 1),
            None if spent is None else torch.tensor([spent]).double().expand(len(meta), 2),
        ),
        torch.tensor(coins, dtype=torch.float64),
    )
    return meta, verdict


def emitted(rule, target, draft, window, vocab, **how):
    """Exact distribution of the first `window + 1` emitted tokens.

    For every draft and every number of accepted tokens the rule is made to accept so many by its
    coins; its own accept probabilities and next-token distribution then weigh the outcome, and
    the target goes on from there.
    """
    meta, verdict = outcomes(rule, target, draft, window, vocab, **how)
    starts: dict[tuple[int, ...], float] = {}
    for row, (path, mass, n) in enumerate(meta):
        accept = verdict.accept_prob[row].tolist()
        weight = mass * math.prod(accept[:n]) * (1 - accept[n] if n < len(path) else 1)
        if verdict.accepted[row] != n:
            assert weight < 1e-15  # the coins could not force an outcome of probability zero
            continue
        for v, chance in enumerate(verdict.next_probs[row].tolist()):
            start = (*path[:n], v)
            starts[start] = starts.get(start, 0.0) + weight * chance
    return continued(starts, target, window + 1, vocab)


def continued(starts, target: Conditional, depth: int, vocab: int):
    """Distribution of `depth` tokens, of which the target adds what `starts` leave out."""
    table = dict.fromkeys(itertools.product(range(vocab), repeat=depth), 0.0)
    for start, weight in starts.items():
        if weight > 0:
            for end, mass in joint(target, start, depth, vocab).items():
                table[end] += weight * mass
    return table


def distance(rule, *, vocab=3, window=2, seed=0, keep=TRANSFORMS[0], **how):
    """Largest difference between what is emitted and the target's own distribution."""
    target = conditionals(vocab, window + 1, 2 * seed, keep)
    draft = conditionals(vocab, window + 1, 2 * seed + 1, keep)
    got = emitted(rule, target, draft, window, vocab, **how)
    want = joint(target, (), window + 1, vocab)
    assert math.isclose(sum(want.values()), 1)
    return max(abs(got[seq] - want[seq]) for seq in want)
