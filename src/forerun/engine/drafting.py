"""The first step of a round: let the drafter run ahead as far as each row's controller wants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.drafters.base import Drafter
from forerun.engine.control import Control
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.rules.base import sample
from forerun.signals import measure
from forerun.types import BoolArray, FloatArray, IntArray, Signals, Stop


@dataclass(frozen=True)
class Wanted:
    """What the rows' controllers and rules want to know of the draft distributions."""

    control: frozenset[str]
    """Fields of `Signals` that controllers read, on the host."""
    rule: frozenset[str]
    """Fields of `Signals` that rules read, on the device."""
    ranks: int
    """Most likely tokens that rules read."""


@dataclass
class Drafted:
    """What the rows drafted in one round."""

    tokens: list[list[int]]
    stopped_by: IntArray
    """`(rows,)` values of `Stop`."""
    logits: list[torch.Tensor] = field(default_factory=list)
    """Per step `(rows, V)` processed logits the tokens came from; empty where they were certain."""
    measured: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Per step what rules read, `(rows,)` each."""
    ranked: list[torch.Tensor] = field(default_factory=list)
    """Per step `(rows, ranks)` most likely tokens, where rules read them."""
    seen: dict[str, FloatArray] = field(default_factory=dict)
    """What controllers read, `(rows, limit)` each; meaningless beyond `shown`."""
    shown: int = 0
    """Steps that said something."""
    steps: int = 0
    """Steps the drafter took, a preview's included; without one that caught up with a context."""
    first: float = 0.0
    """Seconds of the first of these steps, if it was the round's first."""
    prepared: float = 0.0
    """Seconds it took to catch up with long contexts."""

    @property
    def lengths(self) -> IntArray:
        """`(rows,)` drafted tokens."""
        return np.array([len(tokens) for tokens in self.tokens])

    @property
    def signals(self) -> Signals:
        """What the drafter said about each token, fields `(rows, steps)`."""
        if not self.shown:
            return Signals()
        return Signals(**{name: values[:, : self.shown] for name, values in self.seen.items()})


def draft(
    rows: Sequence[Row],
    drafter: Drafter,
    control: Control,
    sampler: Sampler,
    rest_first: bool = False,
) -> Drafted:
    """Draft for every row until its limit, its controller, the drafter or the text says stop.

    With `rest_first`, a row has no room for a draft in its first round.
    """
    wanted = control.limit()
    none = [rest_first and not row.rounds for row in rows]
    room = np.array(
        [0 if rest else row.room(drafter.limit) for row, rest in zip(rows, none, strict=True)]
    )
    limits = np.minimum(wanted, room)
    stopped = np.where(room < wanted, Stop.BUDGET, Stop.LIMIT)
    if not control.any_previews:
        return _run(rows, drafter, control, sampler, limits, stopped)
    previews = control.previews
    # A greedy preview is the draft; a sampled one only says how long the draft shall be.
    keep = sampler.all_greedy
    out = _run(rows, drafter, control, sampler, np.where(previews | keep, limits, 0), stopped)
    planned = np.where(previews, control.plan(out.lengths, out.signals), limits)
    stopped = np.where(planned < out.lengths, Stop.CONFIDENCE, out.stopped_by)
    if keep:
        for tokens, n in zip(out.tokens, planned, strict=True):
            del tokens[n:]
        out.stopped_by = np.where(previews, stopped, out.stopped_by)
        return out
    for at in np.flatnonzero(previews).tolist():
        drafter.rollback(at, len(rows[at].context) - 1)  # the next step feeds the last token
    anew = _run(rows, drafter, control, sampler, np.minimum(planned, limits), stopped)
    anew.steps, anew.prepared = anew.steps + out.steps, anew.prepared + out.prepared
    anew.first = out.first
    return anew


def _run(
    rows: Sequence[Row],
    drafter: Drafter,
    control: Control,
    sampler: Sampler,
    limits: IntArray,
    stopped_by: IntArray,
) -> Drafted:
    """Draft up to `limits`; rows that reach them were `stopped_by`."""
    out = Drafted([[] for _ in rows], stopped_by.copy())
    active, asks = limits > 0, control.asks
    if not active.any():
        return out
    wanted = Wanted(
        control.signals,
        frozenset().union(*(row.rule.signals for row in rows)),
        max(row.rule.ranks for row in rows),
    )
    began = time.perf_counter()
    out.seen = {name: np.zeros((len(rows), int(limits.max()))) for name in wanted.control}
    # What each row drafts from, extended in place as it goes; None where it does not (any more).
    texts = [list(row.context) if on else None for row, on in zip(rows, active, strict=True)]
    most: list[int] = limits.tolist()
    catching_up = drafter.prepare(texts)
    out.prepared = time.perf_counter() - began
    took: float | None = None
    while active.any():
        tokens, ended = _next(rows, texts, drafter, wanted, sampler, out, active)
        if took is None:
            took = time.perf_counter() - began
            if catching_up:
                out.prepared = took
            else:
                out.first, out.steps = took - out.prepared, 1
        else:
            out.steps += 1
        for i, text in enumerate(texts):
            if text is None:
                continue
            if (token := tokens[i]) < 0:
                why = ended[i]
                active[i], out.stopped_by[i] = False, Stop.EXHAUSTED if why is None else why
            else:
                out.tokens[i].append(token)
                text.append(token)
        if asks and out.shown and active.any():
            stop = active & ~control.keep_going(out.lengths, out.signals)
            if stop.any():
                out.stopped_by[stop] = Stop.CONFIDENCE
                active &= ~stop
                # Dropping is decided before anyone looks at which token it is: keeping back only
                # some tokens would bias what is sampled.
                if control.any_drops:
                    for at in np.flatnonzero(stop & control.drops_last).tolist():
                        out.tokens[at].pop()
        for at, (row, drafted) in enumerate(zip(rows, out.tokens, strict=True)):
            # A row that stopped earlier cannot end in end-of-text: that would have been why.
            if drafted and drafted[-1] in row.eos:
                active[at], out.stopped_by[at] = False, Stop.END_OF_TEXT
            elif len(drafted) >= most[at]:
                active[at] = False
            if not active[at]:
                texts[at] = None
    return out


def _next(
    rows: Sequence[Row],
    texts: Sequence[list[int] | None],
    drafter: Drafter,
    wanted: Wanted,
    sampler: Sampler,
    out: Drafted,
    active: BoolArray,
) -> tuple[list[int], list[Stop | None]]:
    """One more token per row, -1 if it has none, and why the drafter ended it, if it says so.

    Both are meaningless in rows that are not active.
    """
    proposal = drafter.step(texts)
    ended: list[Stop | None] = [None] * len(rows)
    if proposal.ended is not None:
        ended = list(proposal.ended)
        # A row that ends here draws nothing: neither a token nor a coin.
        active = active & np.array([why is None for why in ended])
        if not active.any():
            return [-1] * len(rows), ended
    if proposal.logits is None:
        assert proposal.tokens is not None, "a proposal is logits or tokens"
        return [t if on else -1 for t, on in zip(proposal.tokens, active, strict=True)], ended
    picked, shaped, processed, sound = _pick(rows, proposal.logits, sampler, out, active)
    # Where the drafter says no numbers, it has nothing to say, whatever would have been drawn.
    active = active & sound.cpu().numpy()
    if not active.any():
        return [-1] * len(rows), ended
    # Controllers go by what the request draws from, rules by what both models say of themselves.
    if shaped is proposal.logits:
        told = measured = measure(proposal.logits, picked, wanted.control | wanted.rule)
    else:
        told = measure(shaped, picked, wanted.control)
        measured = measure(proposal.logits, picked, wanted.rule)
    # Rows that no longer draft have no logits: what they say is 0, not whatever stands there.
    some = not active.all()
    for name in wanted.control:
        values = told[name].cpu().numpy()
        out.seen[name][:, out.shown] = np.where(active, values, 0.0) if some else values
    out.shown += 1
    out.measured.append({k: measured[k] for k in wanted.rule})
    if wanted.ranks:
        ranks = min(wanted.ranks, proposal.logits.shape[-1])
        out.ranked.append(proposal.logits.topk(ranks, dim=-1).indices)
    if processed is not None:
        out.logits.append(processed)
    return [t if on else -1 for t, on in zip(picked.tolist(), active, strict=True)], ended


def _pick(
    rows: Sequence[Row], logits: torch.Tensor, sampler: Sampler, out: Drafted, active: BoolArray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Choose each row's token; also the logits with penalties and biases, with all of the
    transform where the token is not certain, and `(rows,)` whether they are of a distribution."""
    if sampler.trivial:
        best = logits.argmax(-1)
        return best, logits, None, _finite(logits, best)
    done, wide = max(map(len, out.tokens)), logits.unsqueeze(1)
    changed = sampler.shape(wide, rows, out.tokens, done)
    shaped = logits if changed is wide else changed[:, 0]
    processed = sampler.sharpen(changed)[:, 0]
    best = processed.argmax(-1)
    sound = _finite(processed, best)
    if sampler.all_greedy:
        return best, shaped, None, sound
    greedy = sampler.greedy.to(logits.device)
    one_hot = torch.full_like(processed, -torch.inf).scatter_(-1, best.unsqueeze(-1), 0.0)
    processed = torch.where(greedy.unsqueeze(-1), one_hot, processed)
    coins = [
        row.random.random() if on and not row.sampling.greedy else 0.0
        for row, on in zip(rows, active, strict=True)
    ]
    uniforms = torch.tensor(coins, dtype=torch.float64, device=logits.device)
    picked = torch.where(greedy, best, sample(processed.softmax(-1), uniforms))
    return picked, shaped, processed, sound


def _finite(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`(rows,)` bool: with the arg-max, whether there is no NaN, no +inf, and not only −inf."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()
