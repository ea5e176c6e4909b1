"""The first step of a round: what the engine lends to the drafter, and makes of what it drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.arrays import draw, library, on_host, probability_type
from forerun.drafters.base import Drafter, Proposal, Step, Texts
from forerun.engine.endings import draft_stop, proposal_stop
from forerun.engine.leaves import grow, takes_leaves
from forerun.engine.lengths import Lengths
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.lazy import torch
from forerun.runtime.base import LOGITS, Best, best_of
from forerun.signals import measure, read
from forerun.types import LIVE_SIGNALS, SIGNALS, Array, Stop, Token

MEASURED = frozenset((*SIGNALS, *LIVE_SIGNALS))
Clock = Callable[[], float]


class RoundContext:
    """Sampling and the policies' decisions, for the rows as they are; see `StepContext`. A round
    begins by `begin` and ends by `end`; in between a drafter proposes."""

    def __init__(
        self, rows: Sequence[Row], lengths: Lengths, sampler: Sampler, clock: Clock, trees: bool
    ) -> None:
        self._rows, self._lengths, self._sampler, self.clock = rows, lengths, sampler, clock
        rules = [row.request.rule for row in rows]
        self.reads = any(rule.reads_draft for rule in rules)
        """Whether a rule reads more of the draft's distribution than its probabilities."""
        self._raw: list[NDArray[np.float32]] = []
        self._probs: Array | None = None
        self._signals = lengths.signals & MEASURED
        self._ids = bool(lengths.signals - MEASURED)
        self.greedy = None
        if sampler.trivial:
            self.greedy = self._signals | ({LOGITS} if self.reads else frozenset())
        self._constrained = any(row.place for row in rows)
        self._foresees = not self.reads and any(row.place or row.prediction for row in rows)
        self._forced: dict[int, list[int]] = {}
        """By row the tokens known ahead by its constraint; a drafter may go on behind them."""
        self._predicted: dict[int, list[int]] = {}
        """Those of other rows known by their requests, in place of a draft."""
        self.certain = sampler.all_certain  # whether every token is the arg-max of something
        self._asks = lengths.stops_early  # whether policies are shown what is drafted
        takes = [trees and takes_leaves(row) for row in rows]
        self._leafy = [own and "second" in lengths.signals for own in takes]
        self._grows = [
            own and row.certain and row.request.controller.tree > 0
            for own, row in zip(takes, rows, strict=True)
        ]

    def begin(self, ready: Sequence[bool], drafter: Drafter) -> list[int]:
        """Begin a round: per row the most tokens that the drafter may add."""
        pairs = zip(self._rows, ready, strict=True)
        rooms = [row.room(drafter.limit) if on else 0 for row, on in pairs]
        if self._foresees:
            self._foresee(ready)
            for i, tokens in self._forced.items():
                # A target that drafts cannot go on from tokens that it has not verified.
                rooms[i] = max(rooms[i] - len(tokens), 0) if drafter.target is None else 0
            for i in self._predicted:
                rooms[i] = 0
        return rooms

    def _foresee(self, ready: Sequence[bool]) -> None:
        """Note what is known ahead of the drafter, of rows that are ready; a request that is to run
        plainly takes what it predicts only."""
        self._forced, self._predicted = {}, {}
        for i, (row, on) in enumerate(zip(self._rows, ready, strict=True)):
            if not on or not (room := row.room(row.limit)):
                continue
            output = row.context[row.prompt :]
            forced = row.place.forced(output)[:room] if row.place and not row.plain else []
            predicted = row.prediction.propose(output, room) if row.prediction else []
            if forced:
                self._forced[i] = forced
            elif predicted:
                self._predicted[i] = predicted

    def texts(self, most: Sequence[int]) -> Texts:
        """Per row the text to draft from, None where nothing shall be drafted."""
        texts = [row.context if n else None for row, n in zip(self._rows, most, strict=True)]
        for i, tokens in self._forced.items():
            texts[i] = texts[i] and [*self._rows[i].context, *tokens]
        return texts

    def trees(self, limit: int) -> list[int]:
        """As far as draft and target have room, one node more for a draft of other tokens."""
        if not any(self._grows):
            return []
        pairs = zip(self._rows, self._lengths.trees(), strict=True)
        rooms = [min(n, min(row.limit, limit) - len(row.context) - 1) for row, n in pairs]
        return [max(room, 0) * on for room, on in zip(rooms, self._grows, strict=True)]

    def likeliest(
        self, logits: torch.Tensor, paths: Sequence[Sequence[Sequence[int]]], count: int
    ) -> tuple[list[list[list[float]]], list[list[list[int]]]]:
        if not self._sampler.trivial:
            columns = [[own[min(n, len(own) - 1)] for own in paths] for n in range(logits.shape[1])]
            shaped = [
                self._sampler.shape(logits[:, [n]], self._rows, drafted, None)
                for n, drafted in enumerate(columns)
            ]
            logits = torch.cat(shaped, 1)
        best = logits.topk(min(count, logits.shape[-1]), dim=-1)
        chances = (best.values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        return chances.tolist(), best.indices.tolist()

    def choose(
        self, step: Step, texts: Texts, active: Sequence[int], proposal: Proposal
    ) -> list[int]:
        """Draw a token for every active row and note in `proposal` what the draft says of it. Rows
        for which the draft says no numbers are left out: it has nothing to say."""
        best, logits = step.best, step.logits
        if self.reads and not self._sampler.untouched:
            proposal.raw.append(self._raw_of(step, active, len(proposal.raw)))
        if logits is not None and self.certain:
            best = best_of(self._shaped(logits, proposal, own=not self.reads), self._signals)
        elif best is None:
            assert logits is not None, "a step has logits or best tokens"
            best = self._draw(logits, active, proposal)
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

    def _raw_of(self, step: Step, active: Sequence[int], place: int) -> Any:
        """By row the logits of a step, for rules. Those of a pass are overwritten by the next one,
        and these by the next round's: fresh memory takes longer than the copy."""
        if step.best is None:
            return step.logits
        own = step.best.signals.pop(LOGITS)
        if not isinstance(own, list):
            return own[:, 0]
        if place == len(self._raw):
            self._raw.append(np.zeros((len(own), len(own[0][0])), np.float32))
        for row in active:
            self._raw[place][row] = own[row][0]
        return self._raw[place]

    def note(self, row: int, token: int, shown: Token, text: list[int], proposal: Proposal) -> None:
        if self._ids:
            before = text[-1] if len(text) > self._rows[row].prompt else -1
            shown = shown._replace(id=token, previous=before)
        proposal.shown[row].append(shown)
        proposal.tokens[row].append(token)
        text.append(token)

    def _draw(self, logits: torch.Tensor, active: Sequence[int], proposal: Proposal) -> Best:
        """Per row a token under its sampling, and what policies read; where active."""
        sampler, rows, changed = self._sampler, self._rows, logits
        if not sampler.untouched:
            shaped = self._shaped(logits, proposal)
            changed, logits = shaped[:, 0], sampler.sharpen(shaped)[:, 0]
        if sampler.some_certain:
            top, picked = logits.max(-1, keepdim=True)
            # What is no distribution stays none.
            only = torch.full_like(logits, -torch.inf).scatter_(-1, picked, top - top)
            logits = torch.where(sampler.certain.to(logits.device).unsqueeze(-1), only, logits)
        coins = [0.0] * len(rows)
        for row in active:
            if not rows[row].certain:
                coins[row] = next(rows[row].coins)
        place = 0 if proposal.probs is None else proposal.probs.shape[1]
        probs = self._room(place, host := on_host(logits))
        tokens, chosen = draw(host, coins, probs[:, place])
        proposal.probs = probs[:, : place + 1]
        signals = self._measured(changed, tokens, chosen) if self._signals else {}
        sound = [[chance > 0] for chance in chosen]  # a NaN is not
        return Best([[token] for token in tokens], signals, sound)

    def _room(self, place: int, logits: Array) -> Array:
        """`(rows, > place, V)` for probabilities of such logits: fresh memory takes longer."""
        if self._probs is None or place == self._probs.shape[1]:
            lib, kind = library(logits), probability_type(logits)
            steps = [lib.zeros_like(logits, dtype=kind)] * max(place, 8)
            before = [] if self._probs is None else [self._probs]
            self._probs = lib.concatenate([*before, lib.stack(steps, 1)], 1)
        return self._probs

    def _measured(
        self, logits: torch.Tensor, tokens: list[int], chosen: list[float]
    ) -> dict[str, list[list[float]]]:
        """What policies read of tokens drawn from `(rows, V)` logits, with these chances."""
        known = {"chosen": chosen} if self._sampler.untouched else {}
        names = self._signals - known.keys()
        if isinstance(host := on_host(logits), np.ndarray):
            signals = read(host, names, tokens)[2] if names else {}
        else:
            picked = torch.tensor(tokens, device=logits.device)
            signals = {n: of.tolist() for n, of in measure(logits, picked, names).items()}
        signals |= {name: known[name] for name in known.keys() & self._signals}
        return {name: [[value] for value in of] for name, of in signals.items()}

    def _shaped(self, logits: torch.Tensor, proposal: Proposal, own: bool = False) -> torch.Tensor:
        """`(rows, 1, V)` logits under each row's penalties, biases and constraint."""
        drafted: Sequence[Sequence[int]] = proposal.tokens
        if self._forced:
            drafted = [[*self._forced.get(i, ()), *own] for i, own in enumerate(drafted)]
        return self._sampler.shape(logits.unsqueeze(1), self._rows, drafted, None, own)

    def settle(
        self, active: list[int], most: Sequence[int], proposal: Proposal, free: bool = False
    ) -> list[int]:
        going, go_on = [], [True] * len(self._rows)
        if self._asks and active:
            newest = [shown[-1] if i in active else None for i, shown in enumerate(proposal.shown)]
            go_on = self._lengths.go(newest, free)
        for row in active:
            tokens = proposal.tokens[row]
            why = draft_stop(go_on[row], 0, tokens[-1] in self._rows[row].eos)
            if why is not None:
                proposal.stopped_by[row] = why
            elif len(tokens) < most[row]:
                going.append(row)
        return going

    def free(self, drafts: Mapping[int, Sequence[float]], enough: float) -> dict[int, int]:
        return self._lengths.free(drafts, enough)

    def end(self, proposal: Proposal, limits: Sequence[tuple[int, Stop]]) -> None:
        """End a round: a reason for every row's end, tokens known ahead before the drafter's, and
        none that policies leave out or constraints do not allow; then second choices."""
        if not proposal.steps and not proposal.free_steps:
            proposal.steps = max(map(len, proposal.tokens))  # it has no model
        for i, (limit, why) in enumerate(limits):
            assert len(proposal.tokens[i]) <= limit, "no more is proposed than was asked for"
            if proposal.stopped_by[i] is None:
                self._stop(i, limit, why, proposal)
            if self._asks and proposal.shown[i] and (count := self._lengths.trim(i)):
                del proposal.tokens[i][max(len(proposal.tokens[i]) - count, 0) :]
                proposal.stopped_by[i] = Stop.CONFIDENCE
        if self._foresees:
            for i in self._predicted:
                proposal.stopped_by[i] = Stop.LIMIT
            proposal.predicted.update(self._predicted)
            proposal.forced = {i: len(tokens) for i, tokens in self._forced.items()}
            proposal.prepend({**self._predicted, **self._forced})
        if self._constrained:
            self._cut_disallowed(proposal)
        if proposal.trees or any(self._leafy):
            grow(proposal, self._rows, self._leafy, self._lengths)

    def _stop(self, i: int, limit: int, why: Stop, proposal: Proposal) -> None:
        """Why a row's draft ended that neither its policy nor its drafter ended."""
        tokens, eos = proposal.tokens[i], self._rows[i].eos
        proposal.stopped_by[i] = proposal_stop(len(tokens), limit, why)
        if not eos.isdisjoint(tokens):  # a block may go on beyond the end of the text
            del tokens[next(n for n, token in enumerate(tokens, 1) if token in eos) :]
            proposal.stopped_by[i] = Stop.END_OF_TEXT

    def _cut_disallowed(self, proposal: Proposal) -> None:
        """End drafts before the first token that their constraint does not allow."""
        for i, row in enumerate(self._rows):
            if row.place is None or not (tokens := proposal.tokens[i]):
                continue
            good = row.place.valid(row.context[row.prompt :], tokens)
            if good < len(tokens):
                del tokens[good:]
                proposal.stopped_by[i] = Stop.EXHAUSTED
                proposal.forced[i] = min(proposal.forced.get(i, 0), good)
