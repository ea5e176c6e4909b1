"""The first step of a round: let the drafter run ahead as far as each row's policy wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forerun.costs import Costs
from forerun.drafters.base import Drafter, Proposal, Step, Texts
from forerun.engine.endings import draft_limit, draft_stop, proposal_stop
from forerun.engine.lengths import Lengths
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.governors.base import Seat
from forerun.rules.base import sample
from forerun.runtime.base import Best, best_of
from forerun.signals import measure
from forerun.types import LIVE_SIGNALS, SIGNALS, Stop, Token

MEASURED = frozenset((*SIGNALS, *LIVE_SIGNALS))


class RoundContext:
    """Sampling and the policies' decisions, for the rows as they are; see `StepContext`."""

    def __init__(
        self, rows: Sequence[Row], lengths: Lengths, sampler: Sampler, clock: Callable[[], float]
    ) -> None:
        self._rows, self._lengths, self._sampler, self.clock = rows, lengths, sampler, clock
        rules = [row.request.rule for row in rows]
        self.reads = any(rule.reads_draft for rule in rules)
        """Whether a rule reads more of the draft's distribution than its probabilities."""
        self._signals = lengths.signals & MEASURED
        self._ids = bool(lengths.signals - MEASURED)
        self.greedy = self._signals if sampler.trivial and not self.reads else None
        self.foresees = not self.reads and any(row.place or row.prediction for row in rows)
        """Whether a request may know tokens ahead of the drafter: forced or predicted ones."""
        self.forced: dict[int, list[int]] = {}
        """Per row what its constraint forces, ahead of the drafter's tokens this round."""
        self.certain = sampler.all_certain
        """Whether every token is the arg-max of something."""
        self.asks = lengths.stops_early
        """Whether policies are shown what is drafted."""

    def choose(
        self, step: Step, texts: Texts, active: Sequence[int], proposal: Proposal
    ) -> list[int]:
        """Draw a token for every active row and note in `proposal` what the draft says of it.

        Rows for which the draft says no numbers are left out: it has nothing to say.
        """
        best, logits = step.best, step.logits
        if logits is not None and self.reads:
            proposal.raw.append(logits)
        if logits is not None and self.certain:
            best = best_of(self._shaped(logits, proposal, own=not self.reads), self._signals)
        elif best is None:
            assert logits is not None, "a step has logits or best tokens"
            best = self._draw(logits, texts, active, proposal)
        drawn = []
        for row in active:
            if not best.sound[row][0]:
                proposal.stopped_by[row] = Stop.EXHAUSTED
                continue
            text, token = texts[row], best.tokens[row][0]
            assert text is not None
            shown = Token(**{name: values[row][0] for name, values in best.signals.items()})
            self.note(row, token, shown, text, proposal)
            drawn.append(row)
        return drawn

    def note(self, row: int, token: int, shown: Token, text: list[int], proposal: Proposal) -> None:
        if self._ids:
            before = text[-1] if len(text) > self._rows[row].prompt else -1
            shown = shown._replace(id=token, previous=before)
        proposal.shown[row].append(shown)
        proposal.tokens[row].append(token)
        text.append(token)

    def _draw(
        self, logits: torch.Tensor, texts: Texts, active: Sequence[int], proposal: Proposal
    ) -> Best:
        """Per row a token under its sampling, and what policies read of it; meaningless where a row
        is not active."""
        sampler, rows = self._sampler, self._rows
        changed = self._shaped(logits, proposal)
        processed = sampler.sharpen(changed)[:, 0]
        top, picked = processed.max(-1)
        if sampler.some_certain:
            certain = sampler.certain.to(logits.device).unsqueeze(-1)
            only = torch.full_like(processed, -torch.inf)
            only.scatter_(-1, picked.unsqueeze(-1), 0.0)
            processed = torch.where(certain, only, processed)
        coins = [0.0] * len(rows)
        for row in active:
            if not rows[row].certain:
                coins[row] = rows[row].random.random()
        uniforms = torch.tensor(coins, dtype=torch.float64, device=logits.device)
        picked = sample(processed.softmax(-1), uniforms)
        proposal.logits.append(processed)
        measured = measure(changed[:, 0], picked, self._signals)
        signals = {name: values.unsqueeze(-1).tolist() for name, values in measured.items()}
        return Best(picked.unsqueeze(-1).tolist(), signals, top.isfinite().unsqueeze(-1).tolist())

    def _shaped(self, logits: torch.Tensor, proposal: Proposal, own: bool = False) -> torch.Tensor:
        """`(rows, 1, V)` logits under each row's penalties, biases and constraint."""
        drafted: Sequence[Sequence[int]] = proposal.tokens
        if self.forced:
            drafted = [[*self.forced.get(i, ()), *own] for i, own in enumerate(drafted)]
        return self._sampler.shape(logits.unsqueeze(1), self._rows, drafted, None, own)

    def settle(
        self, active: list[int], most: Sequence[int], proposal: Proposal, free: bool = False
    ) -> list[int]:
        going = []
        asked = self.asks and bool(active)
        if asked:
            newest: list[Token | None] = [None] * len(self._rows)
            for row in active:
                newest[row] = proposal.shown[row][-1]
            go_on = self._lengths.go(newest, free)
        for row in active:
            tokens = proposal.tokens[row]
            ends = tokens[-1] in self._rows[row].eos
            why = draft_stop(not asked or go_on[row], 0, ends)
            if why is not None:
                proposal.stopped_by[row] = why
            elif len(tokens) < most[row]:
                going.append(row)
        return going

    def free(self, row: int, kept: Sequence[float], enough: float) -> int | None:
        return self._lengths.free(row, kept, enough)


def draft(
    rows: Sequence[Row],
    seats: Sequence[Seat | None],
    drafter: Drafter,
    lengths: Lengths,
    guide: RoundContext,
    costs: Costs,
) -> Proposal:
    """Draft for every row that has read its prompt, as far as its room, policy and drafter let it.

    Every row's `stopped_by` is set.

    Args:
        rows: of the pass.
        seats: per row what governors need to know; None of rows that decode nothing.
        drafter: who runs ahead.
        lengths: how far.
        guide: for drafters that go token by token.
        costs: of the pass.
    """
    ready = [seat is not None for seat in seats]
    forced = _forced(rows, ready) if guide.foresees else {}
    predicted = _predictions(rows, ready) if guide.foresees else {}
    predicted = {i: tokens for i, tokens in predicted.items() if i not in forced}
    # A target that drafts cannot go on from tokens it has not verified.
    idle = {*predicted, *(forced if drafter.target is not None else ())}
    guide.forced = forced
    rooms = [
        max(row.room(drafter.limit) - len(forced.get(i, ())), 0) if on and i not in idle else 0
        for i, (row, on) in enumerate(zip(rows, ready, strict=True))
    ]
    able = [seat if room else None for seat, room in zip(seats, rooms, strict=True)]
    limits = list(map(draft_limit, lengths.limits(costs, able), rooms))
    out = _propose(rows, limits, drafter, guide)
    if guide.asks:
        _trim(out, lengths)
    for i in predicted:
        out.stopped_by[i] = Stop.LIMIT
    out.predicted.update(predicted)
    out.forced = {i: len(tokens) for i, tokens in forced.items()}
    out.prepend({**predicted, **forced})
    _cut_disallowed(out, rows)
    return out


def _forced(rows: Sequence[Row], ready: Sequence[bool]) -> dict[int, list[int]]:
    """Tokens that constraints force next, by row; a request that is to run plainly has none."""
    out = {}
    for i, (row, on) in enumerate(zip(rows, ready, strict=True)):
        if row.place is None or not on or row.plain:
            continue
        if room := row.room(row.limit):
            out[i] = row.place.forced(row.context[row.prompt :])[:room]
    return {i: tokens for i, tokens in out.items() if tokens}


def _cut_disallowed(out: Proposal, rows: Sequence[Row]) -> None:
    """End drafts before the first token that their constraint does not allow."""
    for i, row in enumerate(rows):
        if row.place is None or not (tokens := out.tokens[i]):
            continue
        good = row.place.valid(row.context[row.prompt :], tokens)
        if good < len(tokens):
            del tokens[good:]
            out.stopped_by[i] = Stop.EXHAUSTED
            out.forced[i] = min(out.forced.get(i, 0), good)


def _predictions(rows: Sequence[Row], ready: Sequence[bool]) -> dict[int, list[int]]:
    """Tokens that requests themselves predict next, by row."""
    out = {}
    for i, (row, on) in enumerate(zip(rows, ready, strict=True)):
        if row.prediction is not None and on and (room := row.room(row.limit)):
            out[i] = row.prediction.propose(row.context[row.prompt :], room)
    return {i: tokens for i, tokens in out.items() if tokens}


def _trim(out: Proposal, lengths: Lengths) -> None:
    """Leave out what policies do not want judged."""
    for i, shown in enumerate(out.shown):
        if shown and (count := lengths.trim(i)):
            del out.tokens[i][max(len(out.tokens[i]) - count, 0) :]
            out.stopped_by[i] = Stop.CONFIDENCE


def _propose(
    rows: Sequence[Row], limits: Sequence[tuple[int, Stop]], drafter: Drafter, guide: RoundContext
) -> Proposal:
    """What the drafter proposes up to these limits, with a reason for every row's end."""
    most = [limit for limit, _ in limits]
    if not any(most):
        out = Proposal.none(len(rows))
    else:
        texts = [row.context if limit else None for row, limit in zip(rows, most, strict=True)]
        for i, tokens in guide.forced.items():
            texts[i] = texts[i] and [*rows[i].context, *tokens]
        out = drafter.propose(texts, most, guide)
        if not out.steps and not out.catch_up_seconds and not out.free_steps:  # it has no model
            out.steps = max(map(len, out.tokens))
    for row, (limit, why) in enumerate(limits):
        tokens = out.tokens[row]
        assert len(tokens) <= limit, "a drafter proposes no more than it was asked for"
        if out.stopped_by[row] is not None:
            continue
        if rows[row].eos.isdisjoint(tokens):
            out.stopped_by[row] = proposal_stop(len(tokens), limit, why)
        else:  # a block may go on beyond the end of the text
            del tokens[next(i for i, t in enumerate(tokens, 1) if t in rows[row].eos) :]
            out.stopped_by[row] = Stop.END_OF_TEXT
    return out
