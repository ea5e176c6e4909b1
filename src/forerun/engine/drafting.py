"""The first step of a round: let the drafter run ahead as far as each row's controller wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.controllers.fixed import FixedLength
from forerun.drafters.base import Drafter, Proposal, Step, Texts
from forerun.engine.crew import Crew
from forerun.engine.endings import draft_limit, draft_stop, proposal_stop
from forerun.engine.prediction import insert, prepend
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.rules.base import sample
from forerun.runtime.base import Best, best_of
from forerun.signals import measure
from forerun.types import Stop, Token


class Guide:
    """Sampling and the controllers' decisions, for the rows as they are; see `drafters.Guide`."""

    def __init__(self, rows: Sequence[Row], crew: Crew, sampler: Sampler) -> None:
        self._rows, self._crew, self._sampler = rows, crew, sampler
        rules = [row.request.rule for row in rows]
        self._rule_signals = frozenset().union(*(rule.signals for rule in rules))
        self._ranks = max((rule.ranks for rule in rules), default=0)
        self.reads = bool(self._rule_signals or self._ranks)
        """Whether a rule reads more of the draft's distribution than its probabilities."""
        self.greedy = crew.signals if sampler.trivial and not self.reads else None
        self.foresees = not self.reads and any(row.place or row.prediction for row in rows)
        """Whether a request may know tokens ahead of the drafter: forced or predicted ones."""
        self.forced: dict[int, list[int]] = {}
        """Per row what its constraint forces, ahead of the drafter's tokens this round."""
        self.certain = sampler.all_certain
        """Whether every token is the arg-max of something."""

    def choose(
        self, step: Step, texts: Texts, active: Sequence[int], proposal: Proposal
    ) -> list[int]:
        """Draw a token for every active row and note in `proposal` what the draft says of it.

        Rows for which the draft says no numbers are left out: it has nothing to say.
        """
        best, logits = step.best, step.logits
        if logits is not None and self.certain and not self.reads:
            best = best_of(self._shaped(logits, proposal, own=True), self._crew.signals)
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
            before = text[-1] if len(text) > self._rows[row].prompt else -1
            signals = {name: values[row][0] for name, values in best.signals.items()}
            proposal.shown[row].append(Token(token, before, **signals))
            proposal.tokens[row].append(token)
            text.append(token)
            drawn.append(row)
        return drawn

    def _draw(
        self, logits: torch.Tensor, texts: Texts, active: Sequence[int], proposal: Proposal
    ) -> Best:
        """Per row a token under its sampling, and what controllers read of it; meaningless where a
        row is not active."""
        sampler, rows = self._sampler, self._rows
        changed = self._shaped(logits, proposal)
        processed = sampler.sharpen(changed)[:, 0]
        top, picked = processed.max(-1)
        if not sampler.all_certain:
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
        # Controllers go by what the request draws from, rules by what both models say themselves.
        measured = measure(changed[:, 0], picked, self._crew.signals)
        proposal.measured.append(measure(logits, picked, self._rule_signals))
        if self._ranks:
            ranks = min(self._ranks, logits.shape[-1])
            proposal.ranked.append(logits.topk(ranks, dim=-1).indices)
        signals = {name: values.unsqueeze(-1).tolist() for name, values in measured.items()}
        return Best(picked.unsqueeze(-1).tolist(), signals, top.isfinite().unsqueeze(-1).tolist())

    def _shaped(self, logits: torch.Tensor, proposal: Proposal, own: bool = False) -> torch.Tensor:
        """`(rows, 1, V)` logits under each row's penalties, biases and constraint."""
        drafted: Sequence[Sequence[int]] = proposal.tokens
        if self.forced:
            drafted = [[*self.forced.get(i, ()), *own] for i, own in enumerate(drafted)]
        return self._sampler.shape(logits.unsqueeze(1), self._rows, drafted, None, own)

    def settle(self, active: list[int], most: Sequence[int], proposal: Proposal) -> list[int]:
        """Rows that draft on after their newest token; those that stop are told why."""
        crew, going = self._crew, []
        asked = crew.asks and bool(active)
        if asked:
            newest: list[Token | None] = [None] * len(self._rows)
            for row in active:
                newest[row] = proposal.shown[row][-1]
            go_on = crew.go(newest)
        for row in active:
            tokens, goes_on = proposal.tokens[row], not asked or go_on[row]
            ends = tokens[-1] in self._rows[row].eos
            length, why = draft_stop(len(tokens), goes_on, crew.left_out[row], ends)
            if why is not None:
                proposal.stopped_by[row] = why
                del tokens[length:]
            elif length < most[row]:
                going.append(row)
        return going


def draft(
    rows: Sequence[Row],
    ready: Sequence[bool],
    drafter: Drafter,
    crew: Crew,
    guide: Guide,
    timed: bool,
) -> Proposal:
    """Draft for every row that is `ready`, as far as its room, controller and drafter let it.

    Every row's `stopped_by` is set. `timed`: whether the meter will be told of the round.
    """
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
    wanted = crew.limits([room > 0 for room in rooms], timed)
    limits = [draft_limit(*pair) for pair in zip(wanted, rooms, strict=True)]
    out = _draft(rows, limits, drafter, crew, guide)
    insert(out, predicted)
    prepend(out, forced)
    _cut_disallowed(out, rows)
    return out


def _forced(rows: Sequence[Row], ready: Sequence[bool]) -> dict[int, list[int]]:
    """Tokens that constraints force next, by row; a request that is to run plainly has none."""
    out = {}
    for i, (row, on) in enumerate(zip(rows, ready, strict=True)):
        if row.place is None or not on or row.request.controller == FixedLength(0):
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


def _draft(
    rows: Sequence[Row],
    limits: list[tuple[int, Stop]],
    drafter: Drafter,
    crew: Crew,
    guide: Guide,
) -> Proposal:
    if not any(crew.previews):
        return _propose(rows, limits, drafter, guide)
    # A certain preview is the draft; one by coins only says how long the draft shall be.
    keep = guide.certain
    first = [
        pair if keep or looks else (0, pair[1])
        for pair, looks in zip(limits, crew.previews, strict=True)
    ]
    out = _propose(rows, first, drafter, guide)
    planned = crew.plan(out.shown)
    for row, looks in enumerate(crew.previews):
        # A draft that says nothing of its tokens is taken for sure, as by other controllers.
        if not looks or (out.tokens[row] and not out.shown[row]):
            continue
        shorter = planned[row] < len(out.tokens[row])
        why = Stop.CONFIDENCE if shorter else out.stopped_by[row] or Stop.LIMIT
        limits[row] = min(planned[row], limits[row][0]), why
        if keep:
            del out.tokens[row][planned[row] :]
            out.stopped_by[row] = why
        else:
            drafter.rollback(row, len(rows[row].context) - 1)  # the next step feeds the last token
    if keep:
        return out
    anew = _propose(rows, limits, drafter, guide)
    anew.steps, anew.first_seconds = anew.steps + out.steps, out.first_seconds
    anew.catch_up_seconds += out.catch_up_seconds
    anew.catch_up_tokens += out.catch_up_tokens
    return anew


def _propose(
    rows: Sequence[Row], limits: Sequence[tuple[int, Stop]], drafter: Drafter, guide: Guide
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
        if not out.steps and not out.catch_up_seconds:  # it has no model
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
