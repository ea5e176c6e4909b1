"""Classifies differences of greedy outputs: a floating-point near-tie, or a bug.

A verify pass multiplies matrices of another shape than a one-token pass, so the same logits come
out a few roundings apart. Where the two best tokens are closer than that, either may win and the
texts differ from there on. No other difference is correct: `explain` recomputes both logits,
`audit` looks for differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import product
from math import inf, isfinite
from typing import Any

import torch

from forerun.controllers import Controller
from forerun.engine import Sampling
from forerun.engine.sampling import Noise, Sampler
from forerun.engine.text import common
from forerun.errors import PromptError, SettingError, require
from forerun.lab.bench.peers import Peer
from forerun.lab.provenance import versions
from forerun.model import Model
from forerun.prompts import Prompt
from forerun.rules import RULES, AcceptanceRule
from forerun.runtime.base import Rows

SAFETY = 4.0  # a margin within this many times the logits' observed spread is a near-tie
CEILING = {torch.bfloat16: 8.0, torch.float16: 16.0}
"""Most roundings of the largest logit that shapes may put two logits apart; more is no rounding.
The shipped pair's are at most 1.6 apart in bfloat16."""
CEILING_WIDE = 128.0
"""Most roundings in float32 and above, where long sums round as coarsely as their results: 5.5 for
the shipped pair, and growing with width and depth."""
WIDTHS = (1, 2, 3, 5, 9, 17, 512)  # tokens fed in one pass to recompute a position
SCHEMA = 1
AROUND, ONWARD = 16, 4  # tokens shown of the common text before, and of each continuation


@dataclass(frozen=True)
class Difference:
    """The first position at which two greedy outputs of one prompt differ."""

    position: int  # output tokens the two have in common
    tokens: tuple[int | None, int | None]  # the next token of each; None where it ended
    margin: float  # smallest gap between the logits of the two tokens, over the shapes recomputed
    bound: float
    """How much a logit's difference may move between shapes: measured at this very prefix, and
    never less than rounding the largest logit in the model's dtype."""
    near_tie: bool
    spread: float = 0.0  # how much the difference of the two logits moved between the shapes
    ceiling: float = inf  # most that roundings can move it; a larger `spread` is a bug

    @property
    def message(self) -> str:
        kind = "a floating-point near-tie" if self.near_tie else "NOT a near-tie: this is a bug"
        return (
            f"differs from output token {self.position} on ({self.tokens[0]} / {self.tokens[1]}): "
            f"{kind} ({self.reason})"
        )

    @property
    def reason(self) -> str:
        if None in self.tokens:
            return "one ends where the other goes on"
        if self.spread > self.ceiling:
            return (
                f"the logits move by {self.spread:.2e} between shapes, roundings by "
                f"{self.ceiling:.2e} at most"
            )
        return f"margin {self.margin:.2e}, bound {self.bound:.2e}"

    def to_json(self) -> dict[str, Any]:
        """All fields; None for what is not finite."""
        out = asdict(self)
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in out.items()}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None if they are equal."""
    at = common(list(a), list(b))
    return None if at == len(a) == len(b) else at


def explain(
    model: Any,
    prompt: Sequence[int],
    a: Sequence[int],
    b: Sequence[int],
    sampling: Sampling | None = None,
    rows: int = 1,
) -> Difference:
    """Recompute the logits at the first difference in several shapes and classify it.

    Args:
        model: a `forerun.Model` (or anything with a `target` runtime) that is not generating.
        prompt: token ids.
        a: one output, greedy or drawn by its seed's noise (`gumbel`).
        b: the other; they must differ.
        sampling: what both were made with.
        rows: also recompute in batches of so many rows, ≥ 1.
    """
    at = first_difference(a, b)
    assert at is not None, "the outputs are equal"
    left = a[at] if at < len(a) else None
    right = b[at] if at < len(b) else None
    if left is None or right is None:  # one ended although the other went on: never a rounding
        return Difference(at, (left, right), inf, 0.0, False)
    before, source = model.context(prompt) if hasattr(model, "context") else (list(prompt), None)
    context = [*before, *a[:at]]
    transform = Transform(model, context, len(before), sampling or Sampling(), source)
    raw = [
        _logits(model.target, context, width, count, source).double()
        for count in sorted({1, rows})
        for width in sorted({min(width, len(context)) for width in WIDTHS})
    ]
    shapes = [transform(logits) for logits in raw]
    gaps = torch.stack([logits[left] - logits[right] for logits in shapes])
    spread = float(gaps.max() - gaps.min())
    eps, most = _precision(model.target)
    rounding = max(float(logits.abs().max()) for logits in raw) * eps
    ceiling = most * rounding
    bound = min(SAFETY * max(spread, rounding), ceiling)
    margin = float(gaps.abs().min())
    best = shapes[0].max()
    tied_at_top = all(float(best - shapes[0][t]) <= bound for t in (left, right))
    near = margin <= bound and tied_at_top and spread <= ceiling
    if not near and _on_the_edge(transform, raw, left, right, rounding, ceiling):
        return Difference(at, (left, right), 0.0, bound, True, 0.0, ceiling)
    return Difference(at, (left, right), margin, bound, near, spread, ceiling)


def _on_the_edge(
    transform: Transform,
    raw: Sequence[torch.Tensor],
    left: int,
    right: int,
    rounding: float,
    ceiling: float,
) -> bool:
    """Whether rounding decides if truncation keeps one of two tokens, and so which is drawn."""
    gaps = torch.stack([logits[left] - logits[right] for logits in raw])
    by = min(SAFETY * max(float(gaps.max() - gaps.min()), rounding), ceiling)
    for token, other in ((left, right), (right, left)):
        drawn = []
        for moved in (-by, by):
            logits = raw[0].clone()
            logits[token] += moved
            out = transform(logits)
            drawn.append(int(out.argmax()) if out[token].isfinite() == (moved > 0) else None)
        if drawn == [other, token]:
            return True
    return False


class Transform:
    """A request's penalties and biases at one place, and its noise, if it samples."""

    def __init__(
        self,
        model: Any,
        context: list[int],
        prompt: int,
        sampling: Sampling,
        source: Sequence[int] | None = None,
    ) -> None:
        self.context, self.prompt = context, prompt
        eos = frozenset(sampling.eos) if sampling.eos is not None else getattr(model, "eos", ())
        noise = Noise.of(sampling, context[:prompt], source)
        self._sampler = Sampler([sampling], [frozenset(eos)], [noise])

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """`(V,)` logits as the request judges them."""
        return self._sampler.process(logits.view(1, 1, -1), [self], [[]])[0, 0]


@torch.inference_mode()
def _logits(
    target: Rows, context: list[int], width: int, rows: int = 1, source: list[int] | None = None
) -> torch.Tensor:
    """The logits after `context` when its last `width` tokens are fed in one pass."""
    first = len(target.lengths)
    try:
        sources = None if source is None else [source] * rows
        target.read([context[: len(context) - width + 1]] * rows, sources=sources)
        piece = context[target.lengths[first] :]
        pieces = [*[[]] * first, *[piece] * rows]
        return target.feed(pieces, [min(len(p), 1) for p in pieces])[first, 0]
    finally:
        target.keep(list(range(first)))


def _precision(target: Any) -> tuple[float, float]:
    """Relative rounding of the products, and how many of them shapes may make at most."""
    dtype = getattr(torch, target.facts.precision, torch.float32)
    eps, most = torch.finfo(dtype).eps, CEILING.get(dtype, CEILING_WIDE)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-10, CEILING[torch.float16]  # TF32 keeps ten bits
    return eps, most


class Kind(StrEnum):
    """The outcome of one comparison."""

    IDENTICAL = "identical"
    NEAR_TIE = "near-tie"
    BUG = "bug"
    DIFFERS = "differs"  # by more than a near-tie, but a peer took part, so it is not called ours


@dataclass(frozen=True)
class Comparison:
    """Two greedy outputs of one prompt."""

    prompt: int  # index of the prompt
    check: str
    """How the first was made, e.g. ``"speculative"``."""
    against: str
    """How the second was made, e.g. ``"plain"``."""
    outputs: tuple[list[int], list[int]]
    kind: Kind
    difference: Difference | None = None  # None if they are identical


PLAIN, SPECULATIVE = "plain", "speculative"


def checks(batch_size: int = 1, peers: Sequence[Peer] = ()) -> list[tuple[str, str]]:
    """The comparisons of `audit` for each prompt: (check, against)."""
    pairs = [(SPECULATIVE, PLAIN)]
    if batch_size > 1:
        pairs += [(f"{name}, batch of {batch_size}", PLAIN) for name in (SPECULATIVE, PLAIN)]
    names = [peer.name for peer in peers]
    for peer in peers:
        pairs.append((peer.name, PLAIN))
        if peer.plain in names:
            pairs.append((peer.name, peer.plain))
    return pairs


def audit(
    model: Model,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling] | None = None,
    *,
    controller: str | Controller = "auto",
    rule: str | AcceptanceRule = "gumbel",
    batch_size: int = 1,
    peers: Sequence[Peer] = (),
) -> Iterator[Comparison]:
    """Decode in several ways and classify every first difference.

    Everything is compared with plain decoding of the prompt on its own: speculative decoding on its
    own, and speculative and plain decoding in ragged batches. A peer is compared with that, too,
    and with the same peer's plain decoding.

    Args:
        model: target and drafter, not generating.
        prompts: token ids.
        samplings: one per prompt; None takes the default of 128 tokens. Those that sample need a
            seed; beside peers, and under other rules than `gumbel`, they are made greedy.
        controller: how far to run ahead.
        rule: what to keep; a lossless one.
        batch_size: prompts in a ragged batch; 1 leaves the batches out.
        peers: others on the same weights, all `available`.

    Yields:
        Comparisons as they are made, those of `checks` for every prompt.

    Raises:
        SettingError: a lossy rule, no seed, or a setting that a peer does not know.
        PromptError: no prompts.
    """
    keep = RULES.make(rule)
    check_lossless(keep)
    require(batch_size >= 1, "batch size", batch_size, "≥ 1")
    if not prompts:
        raise PromptError("no prompts to audit")
    certain = list(samplings or [Sampling()] * len(prompts))
    if peers or not keep.gumbel_max:
        certain = [replace(s, temperature=0.0) for s in certain]
    if len(certain) != len(prompts):
        raise SettingError(f"{len(certain)} samplings for {len(prompts)} prompts; one per prompt")
    for sampling in certain:
        require(sampling.greedy or sampling.seed is not None, "seed", None, "set, to sample alike")
        if peers:
            check_common(sampling)
    how = {"controller": controller, "rule": keep}
    named = {peer.name: peer for peer in peers}
    return _compared(model, prompts, certain, how, batch_size, named)


def check_lossless(rule: str | AcceptanceRule) -> None:
    """Raise `SettingError` if a rule may change the text."""
    keep = RULES.make(rule)
    if not keep.lossless:
        raise SettingError(
            f"an audit is for lossless rules, and {RULES.text(keep)} changes the text on purpose; "
            "how much is told by the drift meter, drift_mean and drift_max of a generation's stats"
        )


def check_common(sampling: Sampling) -> None:
    """Raise `SettingError` if a request sets what peers do not know."""
    common = Sampling(
        max_new_tokens=sampling.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
    )
    # Temperature 0 leaves the truncations without effect.
    if replace(sampling, top_k=0, top_p=1.0, min_p=0.0) != common:
        raise SettingError(
            "with a peer, prompts may set max_new_tokens and repetition_penalty only, "
            f"got {sampling}"
        )


def _compared(
    model: Model,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    how: Mapping[str, Any],
    batch_size: int,
    peers: Mapping[str, Peer],
) -> Iterator[Comparison]:
    """As `audit`, whose arguments are checked; `how` holds controller and rule."""

    @cache
    def written(name: str, rows: tuple[int, ...]) -> list[list[int]]:
        """What prompts become together; of a peer, one prompt."""
        asked, wanted = [prompts[i] for i in rows], [samplings[i] for i in rows]
        if peer := peers.get(name):
            limits = wanted[0].max_new_tokens, wanted[0].repetition_penalty
            return peer.generate(asked, *limits).tokens
        plain, size = name.startswith(PLAIN), len(rows)
        done = model.generate(asked, sampling=wanted, batch_size=size, plain=plain, **how)
        return [completion.tokens for completion in done]

    pairs, alone = checks(batch_size, [*peers.values()]), {PLAIN, SPECULATIVE, *peers}
    every = tuple(range(len(prompts)))
    for start in every[::batch_size]:
        group = every[start : start + batch_size]
        for prompt, pair in product(group, pairs):
            rows = [(prompt,) if name in alone else group for name in pair]
            made = zip(pair, rows, strict=True)
            a, b = (written(name, own)[own.index(prompt)] for name, own in made)
            kind, difference = Kind.IDENTICAL, None
            if a != b:
                size = len(rows[0])
                difference = explain(model, prompts[prompt], a, b, samplings[prompt], size)
                theirs = Kind.BUG if peers.keys().isdisjoint(pair) else Kind.DIFFERS
                kind = Kind.NEAR_TIE if difference.near_tie else theirs
            yield Comparison(prompt, *pair, (a, b), kind, difference)


def summary(comparisons: Iterable[Comparison]) -> str:
    """`n of m identical, k near-ties, b bugs`, and the peers' differences if there are any.

    >>> summary([])
    '0 of 0 identical, 0 near-ties, 0 bugs'
    """
    n = counts(list(comparisons))
    near, bugs = ("" if n[name] == 1 else "s" for name in ("near_ties", "bugs"))
    line = f"{n['identical']:,} of {n['compared']:,} identical, {n['near_ties']:,} near-tie{near}"
    line += f", {n['bugs']:,} bug{bugs}"
    return line + (f", {n['differ']:,} of a peer differ" if n["differ"] else "")


def counts(done: Sequence[Comparison]) -> dict[str, int]:
    """How many comparisons there are of each kind."""
    kinds = Counter(str(c.kind) for c in done)
    names = {"identical": "identical", "near_ties": "near-tie", "bugs": "bug", "differ": "differs"}
    return {"compared": kinds.total(), **{name: kinds[kind] for name, kind in names.items()}}


def document(
    model: Model, rows: list[Prompt], done: list[Comparison], complete: bool, about: dict[str, Any]
) -> dict[str, Any]:
    """The JSON document; `outputs` stand with differences only."""
    by_check: dict[tuple[str, str], list[Comparison]] = {}
    for c in done:
        by_check.setdefault((c.check, c.against), []).append(c)
    return {
        "schema": SCHEMA,
        "complete": complete,
        "summary": summary(done),
        **counts(done),
        "checks": [{"check": a, "against": b, **counts(cs)} for (a, b), cs in by_check.items()],
        "differences": [_described(model, rows, c) for c in done if c.difference is not None],
        "settings": about,
        "versions": versions(),
    }


def _described(model: Model, rows: Sequence[Prompt], comparison: Comparison) -> dict[str, Any]:
    assert comparison.difference is not None
    row, at = rows[comparison.prompt], comparison.difference.position

    def decode(ids: list[int]) -> str:
        return str(model.tokenizer.decode(ids)) if model.tokenizer else " ".join(map(str, ids))

    before = [*row.ids, *comparison.outputs[0][:at]][-AROUND:]
    onward = [decode(out[at : at + ONWARD]) for out in comparison.outputs]
    return {
        "family": row.family,
        "id": row.id,
        "check": comparison.check,
        "against": comparison.against,
        "kind": comparison.kind.value,
        **comparison.difference.to_json(),
        "reason": comparison.difference.reason,
        "text": {"before": decode(before), "onward": onward},
        "outputs": comparison.outputs,
    }
