"""The engine: rounds of draft, verify, judge, commit, observe over rows that come and go."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forerun import signals as signal_functions
from forerun.controllers.base import LengthController
from forerun.drafters.base import Drafter
from forerun.engine.control import Control
from forerun.engine.results import Completion, Event, FinishReason, Origin, Piece, Round, Stats
from forerun.engine.sampling import Sampler, Sampling
from forerun.engine.text import Detokenizer, StopStrings
from forerun.errors import PromptError, SettingError, require
from forerun.rules.base import AcceptanceRule, sample
from forerun.runtime.base import Runtime
from forerun.types import Draft, IntArray, RoundOutcome, Signals, Stop, Target, Verdict


@dataclass
class _Row:
    """One request while it runs."""

    id: int
    context: list[int]
    prompt: int
    sampling: Sampling
    controller: LengthController
    rule: AcceptanceRule
    eos: frozenset[int]
    seed: int
    random: np.random.Generator
    text: Detokenizer
    stops: StopStrings
    submitted: float
    prefill: float = 0.0
    first_token: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def produced(self) -> int:
        return len(self.context) - self.prompt


@dataclass
class _Drafted:
    """What the draft phase of a round made."""

    tokens: list[list[int]]
    stopped_by: IntArray
    signals: Signals
    logits: list[torch.Tensor]


class Engine:
    """Generates for many requests at once, each with its own sampling, controller and rule.

    Args:
        target: the model whose text it is.
        drafter: who runs ahead.
        tokenizer: for text and stop strings; None works on token ids alone.
        eos: the model's end-of-text ids.
        max_rows: requests decoded together; more wait their turn.
    """

    def __init__(
        self,
        target: Runtime,
        drafter: Drafter,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        max_rows: int = 16,
    ) -> None:
        require(max_rows >= 1, "batch size", max_rows, "≥ 1")
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self._eos, self._max_rows = eos, max_rows
        self._rows: list[_Row] = []
        self._waiting: list[_Row] = []
        self._control = Control()
        self._sampler = Sampler([], [])
        self._ids = itertools.count()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        controller: LengthController,
        rule: AcceptanceRule,
    ) -> int:
        """Queue a request; it joins between rounds. Returns its id.

        Raises:
            PromptError: the prompt is empty or leaves no room in the context.
            SettingError: stop strings without a tokenizer, or an unusable token id.
        """
        if not prompt:
            raise PromptError("the prompt is empty; give at least one token of text")
        if len(prompt) >= self.target.limit:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.target.limit}; "
                "shorten the prompt"
            )
        vocab = self.target.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise PromptError(f"the prompt holds token ids outside the vocabulary of {vocab}")
        if sampling.stop and self.tokenizer is None:
            raise SettingError("stop strings need a tokenizer")
        seed = np.random.SeedSequence().entropy if sampling.seed is None else sampling.seed
        assert isinstance(seed, int)
        seed %= 1 << 63
        eos = self._eos if sampling.eos is None else frozenset(sampling.eos)
        row = _Row(
            id=next(self._ids),
            context=list(prompt),
            prompt=len(prompt),
            sampling=sampling,
            controller=controller,
            rule=rule,
            eos=frozenset() if sampling.ignore_eos else eos,
            seed=seed,
            random=np.random.default_rng(seed),
            text=Detokenizer(self.tokenizer, list(prompt)),
            stops=StopStrings(sampling.stop),
            submitted=time.perf_counter(),
        )
        self._waiting.append(row)
        return row.id

    def run(self) -> Iterator[Event]:
        """Round after round until every request is done: the one loop that everything consumes.

        A consumer that walks away cancels what is left; the engine stays usable.
        """
        try:
            while self._rows or self._waiting:
                yield from self.step()
        finally:
            self._waiting.clear()
            self._keep([])

    def cancel(self, request: int) -> Completion | None:
        """Stop a request now; None if it is not running or waiting."""
        for row in (*self._rows, *self._waiting):
            if row.id == request:
                self._waiting = [w for w in self._waiting if w is not row]
                self._keep([i for i, r in enumerate(self._rows) if r is not row])
                return self._complete(row, "cancelled")
        return None

    def step(self) -> list[Event]:
        """One round for every row: draft, verify, judge, commit, observe."""
        self._admit()
        if not self._rows:
            return []
        began, target_before = time.perf_counter(), self.target.seconds
        drafter_before = self.drafter.seconds

        drafted = self._draft()
        logits = self._verify(drafted)
        verdict = self._judge(drafted, logits)
        accepted: list[int] = verdict.accepted.tolist()
        committed = self._commit(drafted, accepted, verdict.next_token.tolist())

        outcome = RoundOutcome(
            drafted=np.array([len(d) for d in drafted.tokens]),
            accepted=np.array(accepted),
            accept_prob=verdict.accept_prob.double().cpu().numpy(),
            stopped_by=drafted.stopped_by,
            signals=drafted.signals,
            draft_seconds=self.drafter.seconds - drafter_before,
            verify_seconds=self.target.seconds - target_before,
        )
        self._control.observe(outcome)
        return self._report(outcome, committed, began)

    def _admit(self) -> None:
        """Let waiting requests join: prefill both models up to the last prompt token."""
        joining = self._waiting[: self._max_rows - len(self._rows)]
        if not joining:
            return
        del self._waiting[: len(joining)]
        began = time.perf_counter()
        prompts = [row.context for row in joining]
        room = max(row.sampling.max_new_tokens for row in joining)
        self.target.join(prompts, room)
        self.drafter.join(prompts, room)
        self._rows.extend(joining)
        for row in joining:
            self._control.join(row.controller)
            row.prefill = time.perf_counter() - began
        self._refresh()

    def _keep(self, rows: list[int]) -> None:
        """Let all other rows leave."""
        if len(rows) == len(self._rows):
            return
        self.target.keep(rows)
        self.drafter.keep(rows)
        self._control.keep(rows)
        self._rows = [self._rows[r] for r in rows]
        self._refresh()

    def _refresh(self) -> None:
        self._sampler = Sampler([r.sampling for r in self._rows], [r.eos for r in self._rows])

    def _room(self, row: _Row) -> int:
        """Most tokens worth drafting: one more is always committed, all must fit everywhere."""
        budget = row.sampling.max_new_tokens - row.produced - 1
        context = min(self.target.limit - 1, self.drafter.limit) - len(row.context)
        return max(0, min(budget, context))

    def _draft(self) -> _Drafted:
        rows, control = self._rows, self._control
        wanted = control.limit()
        room = np.array([self._room(row) for row in rows])
        limits = np.minimum(wanted, room)
        out = _Drafted(
            [[] for _ in rows], np.where(room < wanted, Stop.BUDGET, Stop.LIMIT), Signals(), []
        )
        active, columns = limits > 0, []
        while active.any():
            contexts = [
                row.context + tokens if on else None
                for row, tokens, on in zip(rows, out.tokens, active, strict=True)
            ]
            proposal = self.drafter.step(contexts)
            if proposal.logits is None:
                assert proposal.tokens is not None
                tokens = list(proposal.tokens)
            else:
                picked, processed = self._pick(proposal.logits, out, active)
                columns.append(signal_functions.measure(proposal.logits, picked, control.signals))
                if processed is not None:
                    out.logits.append(processed)
                tokens = picked.tolist()
            for i in np.flatnonzero(active):
                if tokens[i] < 0:
                    active[i], out.stopped_by[i] = False, Stop.EXHAUSTED
                    continue
                out.tokens[i].append(tokens[i])
            if control.asks and active.any() and columns:
                out.signals = signal_functions.stack(columns)
                drafted = np.array([len(t) for t in out.tokens])
                stop = active & ~control.keep_going(drafted, out.signals)
                out.stopped_by[stop] = Stop.CONFIDENCE
                active &= ~stop
                # Dropping is decided before anyone looks at which token it is: keeping back only
                # some tokens would bias what is sampled.
                for i in np.flatnonzero(stop & control.drops_last):
                    out.tokens[i].pop()
            for i, row in enumerate(rows):
                # Rows that had stopped before cannot end in end-of-text: it would have been why.
                if out.tokens[i] and out.tokens[i][-1] in row.eos:
                    active[i], out.stopped_by[i] = False, Stop.END_OF_TEXT
                elif len(out.tokens[i]) >= limits[i]:
                    active[i] = False
        out.signals = signal_functions.stack(columns)
        return out

    def _pick(
        self, logits: torch.Tensor, out: _Drafted, active: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose each row's next draft token; also its distribution, where it is not certain."""
        if self._sampler.trivial:
            return logits.argmax(-1), None
        done = int(max(len(t) for t, on in zip(out.tokens, active, strict=True) if on))
        processed = self._process(logits.unsqueeze(1), out.tokens, done)[:, 0]
        best = processed.argmax(-1)
        if self._sampler.all_greedy:
            return best, None
        greedy = self._sampler.greedy.to(logits.device)
        one_hot = torch.full_like(processed, -torch.inf).scatter_(-1, best.unsqueeze(-1), 0.0)
        processed = torch.where(greedy.unsqueeze(-1), one_hot, processed)
        coins = [
            row.random.random() if on and not row.sampling.greedy else 0.0
            for row, on in zip(self._rows, active, strict=True)
        ]
        drawn = sample(processed.softmax(-1), torch.tensor(coins, device=logits.device).double())
        return torch.where(greedy, best, drawn), processed

    def _process(
        self, logits: torch.Tensor, drafted: list[list[int]], first: int = 0
    ) -> torch.Tensor:
        contexts = [row.context for row in self._rows]
        prompts = [row.prompt for row in self._rows]
        return self._sampler.process(logits, contexts, prompts, drafted, first)

    def _verify(self, drafted: _Drafted) -> torch.Tensor:
        """The target's logits after the context and after each drafted token."""
        pieces = [
            [*row.context[n:], *tokens]
            for row, n, tokens in zip(self._rows, self.target.lengths, drafted.tokens, strict=True)
        ]
        assert all(len(p) == len(d) + 1 for p, d in zip(pieces, drafted.tokens, strict=True))
        return self.target.feed(pieces)

    def _judge(self, drafted: _Drafted, logits: torch.Tensor) -> Verdict:
        device, lengths = logits.device, [len(t) for t in drafted.tokens]
        width = logits.shape[1] - 1
        target = Target(self._process(logits, drafted.tokens), self._sampler.greedy)
        tokens = [[*t, *[0] * (width - len(t))] for t in drafted.tokens]
        draft_logits = None
        if drafted.logits and width:
            draft_logits = torch.stack(drafted.logits[:width], dim=1)
        draft = Draft(
            torch.tensor(tokens, device=device, dtype=torch.long).view(len(tokens), width),
            torch.tensor(lengths, device=device),
            draft_logits,
        )
        uniforms = np.zeros((len(lengths), width + 1))
        for i, row in enumerate(self._rows):
            if not row.sampling.greedy:
                # As many coins as this row needs, so that neighbours cannot shift its stream.
                *coins, last = row.random.random(lengths[i] + 1)
                uniforms[i, : lengths[i]], uniforms[i, width] = coins, last
        coins_tensor = torch.from_numpy(uniforms).to(device)
        groups: dict[AcceptanceRule, list[int]] = {}
        for i, row in enumerate(self._rows):
            groups.setdefault(row.rule, []).append(i)
        if len(groups) == 1:
            return next(iter(groups)).judge(draft, target, coins_tensor)
        accepted = torch.empty(len(tokens), dtype=torch.long, device=device)
        following, prob = accepted.clone(), torch.zeros(draft.tokens.shape, device=device)
        for rule, rows in groups.items():
            verdict = rule.judge(
                Draft(
                    draft.tokens[rows],
                    draft.lengths[rows],
                    None if draft_logits is None else draft_logits[rows],
                ),
                Target(target.logits[rows], target.greedy[rows]),
                coins_tensor[rows],
            )
            accepted[rows], following[rows] = verdict.accepted, verdict.next_token
            prob[rows] = verdict.accept_prob.to(prob)
        return Verdict(accepted, following, prob)

    def _commit(
        self, drafted: _Drafted, accepted: list[int], following: list[int]
    ) -> list[tuple[list[Piece], FinishReason | None]]:
        """Extend every context by what was kept, up to a stop; roll both caches back to it."""
        out = []
        for i, row in enumerate(self._rows):
            kept, draft = accepted[i], drafted.tokens[i]
            before = len(row.context)
            last = (
                Origin.PLAIN
                if not draft
                else Origin.BONUS
                if kept == len(draft)
                else Origin.CORRECTION
            )
            pieces: list[Piece] = []
            reason: FinishReason | None = None
            for place, token in enumerate([*draft[:kept], following[i]]):
                row.context.append(token)
                text, stopped = row.stops.push(row.text.push(token))
                reason = self._finished(row, token, stopped)
                if reason not in (None, "stop"):
                    text += row.stops.flush(row.text.flush())
                pieces.append(Piece(token, text, Origin.DRAFT if place < kept else last))
                if reason:
                    break
            self.target.rollback(i, len(row.context) - 1)
            self.drafter.rollback(i, before + kept)
            out.append((pieces, reason))
        return out

    def _finished(self, row: _Row, token: int, stopped: bool) -> FinishReason | None:
        if token in row.eos:
            return "eos"
        if stopped:
            return "stop"
        if row.produced >= row.sampling.max_new_tokens:
            return "length"
        return "context" if len(row.context) >= self.target.limit else None

    def _report(
        self,
        outcome: RoundOutcome,
        committed: list[tuple[list[Piece], FinishReason | None]],
        began: float,
    ) -> list[Event]:
        rows, events = self._rows, []
        stay = [i for i, (_, reason) in enumerate(committed) if reason is None]
        self._keep(stay)
        now = time.perf_counter()
        other = now - began - outcome.draft_seconds - outcome.verify_seconds
        for i, (row, (pieces, reason)) in enumerate(zip(rows, committed, strict=True)):
            round_ = Round(
                drafted=int(outcome.drafted[i]),
                accepted=int(outcome.accepted[i]),
                committed=len(pieces),
                stopped_by=Stop(int(outcome.stopped_by[i])),
                draft_seconds=outcome.draft_seconds,
                verify_seconds=outcome.verify_seconds,
                other_seconds=other,
            )
            row.first_token = row.first_token or now - row.submitted
            row.rounds.append(round_)
            row.pieces.extend(pieces)
            done = self._complete(row, reason) if reason else None
            events.append(Event(row.id, pieces, round_, done))
        return events

    def _complete(self, row: _Row, reason: FinishReason) -> Completion:
        total = time.perf_counter() - row.submitted
        tokens = row.context[row.prompt :]
        stats = Stats.of(row.rounds, row.prompt, row.prefill, row.first_token, total)
        assert stats.tokens == len(tokens) == len(row.pieces), "committed tokens must add up"
        text = "".join(piece.text for piece in row.pieces)
        return Completion(text, tokens, reason, row.rounds, stats, row.pieces, row.seed)
