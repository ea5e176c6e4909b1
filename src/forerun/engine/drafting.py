"""The first step of a round: let the drafter run ahead as far as each row's controller wants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.drafters.base import Drafter
from forerun.engine.crew import Crew
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.rules.base import sample
from forerun.signals import measure
from forerun.types import SIGNALS, BoolArray, IntArray, Stop, Token


@dataclass(frozen=True)
class Wanted:
    """What the rows' controllers and rules want to know of the draft distributions."""

    control: frozenset[str]
    """Fields of `Token` that controllers read, on the host."""
    rule: frozenset[str]
    """Signals that rules read, on the device."""
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
    shown: list[list[Token]] = field(default_factory=list)
    """Per row the tokens that its controller is shown, a dropped one included."""
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


def draft(
    rows: Sequence[Row],
    drafter: Drafter,
    crew: Crew,
    sampler: Sampler,
    rest_first: bool = False,
) -> Drafted:
    """Draft for every row until its limit, its controller, the drafter or the text says stop.

    With `rest_first`, a row has no room for a draft in its first round.
    """
    wanted = np.array(crew.limits(), dtype=np.int64)
    none = [rest_first and not row.rounds for row in rows]
    room = np.array(
        [0 if rest else row.room(drafter.limit) for row, rest in zip(rows, none, strict=True)]
    )
    limits = np.minimum(wanted, room)
    stopped = np.where(room < wanted, Stop.BUDGET, Stop.LIMIT)
    previews = np.array(crew.previews)
    if not previews.any():
        return _run(rows, drafter, crew, sampler, limits, stopped)
    # A greedy preview is the draft; a sampled one only says how long the draft shall be.
    keep = sampler.all_greedy
    out = _run(rows, drafter, crew, sampler, np.where(previews | keep, limits, 0), stopped)
    planned = np.where(previews, crew.plan(out.shown), limits)
    stopped = np.where(planned < out.lengths, Stop.CONFIDENCE, out.stopped_by)
    if keep:
        for tokens, n in zip(out.tokens, planned, strict=True):
            del tokens[n:]
        out.stopped_by = np.where(previews, stopped, out.stopped_by)
        return out
    for at in np.flatnonzero(previews).tolist():
        drafter.rollback(at, len(rows[at].context) - 1)  # the next step feeds the last token
    anew = _run(rows, drafter, crew, sampler, np.minimum(planned, limits), stopped)
    anew.steps, anew.prepared = anew.steps + out.steps, anew.prepared + out.prepared
    anew.first = out.first
    return anew


def _run(
    rows: Sequence[Row],
    drafter: Drafter,
    crew: Crew,
    sampler: Sampler,
    limits: IntArray,
    stopped_by: IntArray,
) -> Drafted:
    """Draft up to `limits`; rows that reach them were `stopped_by`."""
    out = Drafted([[] for _ in rows], stopped_by.copy(), shown=[[] for _ in rows])
    active = limits > 0
    if not active.any():
        return out
    wanted = Wanted(
        crew.signals,
        frozenset().union(*(row.rule.signals for row in rows)),
        max(row.rule.ranks for row in rows),
    )
    began = time.perf_counter()
    # What each row drafts from, extended in place as it goes; None where it does not (any more).
    texts = [list(row.context) if on else None for row, on in zip(rows, active, strict=True)]
    most: list[int] = limits.tolist()
    catching_up = drafter.prepare(texts)
    out.prepared = time.perf_counter() - began
    took: float | None = None
    while active.any():
        tokens, ended, signals = _next(rows, texts, drafter, wanted, sampler, out, active)
        if took is None:
            took = time.perf_counter() - began
            if catching_up:
                out.prepared = took
            else:
                out.first, out.steps = took - out.prepared, 1
        else:
            out.steps += 1
        newest: list[Token | None] = [None] * len(rows)
        for i, text in enumerate(texts):
            if text is None:
                continue
            if (token := tokens[i]) < 0:
                why = ended[i]
                active[i], out.stopped_by[i] = False, Stop.EXHAUSTED if why is None else why
            else:
                said = {name: values[i] for name, values in signals.items()}
                newest[i] = shown = Token(token, tuple(text[-3:]), **said)
                out.tokens[i].append(token)
                out.shown[i].append(shown)
                text.append(token)
        if crew.asks and active.any():
            stop = active & ~np.array(crew.go(newest))
            if stop.any():
                out.stopped_by[stop] = Stop.CONFIDENCE
                active &= ~stop
                # Dropping is decided before anyone looks at which token it is: keeping back only
                # some tokens would bias what is sampled.
                for at in np.flatnonzero(stop & crew.drops_last).tolist():
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
) -> tuple[list[int], list[Stop | None], dict[str, list[float]]]:
    """One more token per row, -1 if it has none, why the drafter ended it, if it says so, and what
    controllers read.

    All are meaningless in rows that are not active.
    """
    proposal = drafter.step(texts)
    ended: list[Stop | None] = [None] * len(rows)
    if proposal.ended is not None:
        ended = list(proposal.ended)
        # A row that ends here draws nothing: neither a token nor a coin.
        active = active & np.array([why is None for why in ended])
        if not active.any():
            return [-1] * len(rows), ended, {}
    if proposal.logits is None:
        assert proposal.tokens is not None, "a proposal is logits or tokens"
        tokens = [t if on else -1 for t, on in zip(proposal.tokens, active, strict=True)]
        return tokens, ended, {}
    picked, shaped, processed = _pick(rows, proposal.logits, sampler, out, active)
    signals = wanted.control & frozenset(SIGNALS)
    # Controllers go by what the request draws from, rules by what both models say of themselves.
    if shaped is proposal.logits:
        told = measured = measure(proposal.logits, picked, signals | wanted.rule)
    else:
        told = measure(shaped, picked, signals)
        measured = measure(proposal.logits, picked, wanted.rule)
    out.measured.append({k: measured[k] for k in wanted.rule})
    if wanted.ranks:
        ranks = min(wanted.ranks, proposal.logits.shape[-1])
        out.ranked.append(proposal.logits.topk(ranks, dim=-1).indices)
    if processed is not None:
        out.logits.append(processed)
    tokens = [t if on else -1 for t, on in zip(picked.tolist(), active, strict=True)]
    return tokens, ended, {name: told[name].tolist() for name in signals}


def _pick(
    rows: Sequence[Row], logits: torch.Tensor, sampler: Sampler, out: Drafted, active: BoolArray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Choose each row's token; also the logits with penalties and biases, and with all of the
    transform where the token is not certain."""
    if sampler.trivial:
        return logits.argmax(-1), logits, None
    done, wide = max(map(len, out.tokens)), logits.unsqueeze(1)
    changed = sampler.shape(wide, rows, out.tokens, done)
    shaped = logits if changed is wide else changed[:, 0]
    processed = sampler.sharpen(changed)[:, 0]
    best = processed.argmax(-1)
    if sampler.all_greedy:
        return best, shaped, None
    greedy = sampler.greedy.to(logits.device)
    one_hot = torch.full_like(processed, -torch.inf).scatter_(-1, best.unsqueeze(-1), 0.0)
    processed = torch.where(greedy.unsqueeze(-1), one_hot, processed)
    coins = [
        row.random.random() if on and not row.sampling.greedy else 0.0
        for row, on in zip(rows, active, strict=True)
    ]
    uniforms = torch.tensor(coins, dtype=torch.float64, device=logits.device)
    picked = torch.where(greedy, best, sample(processed.softmax(-1), uniforms))
    return picked, shaped, processed
