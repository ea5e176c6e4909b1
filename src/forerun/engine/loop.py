"""The engine: rounds of draft, verify, judge, commit, observe over rows that come and go."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from forerun.controllers.base import LengthController
from forerun.drafters.base import Drafter
from forerun.engine.control import Control, Memory
from forerun.engine.drafting import Drafted, draft
from forerun.engine.judging import errors, judge
from forerun.engine.results import Completion, Event, FinishReason, Piece, Round
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler, Sampling
from forerun.engine.text import Detokenizer, StopStrings
from forerun.errors import PromptError, SettingError, require
from forerun.rules import RULES, AcceptanceRule
from forerun.runtime.base import Runtime
from forerun.types import RoundOutcome, Stop, Verdict

Committed = list[tuple[list[Piece], FinishReason | None]]


class Engine:
    """Generates for many requests at once, each with its own sampling, controller and rule.

    Args:
        target: the model whose text it is.
        drafter: who runs ahead.
        tokenizer: for text and stop strings; None works on token ids alone.
        eos: the model's end-of-text ids.
        max_rows: requests decoded together; more wait their turn.
        memory: what controllers carry from request to request, to share it among engines.
    """

    def __init__(
        self,
        target: Runtime,
        drafter: Drafter,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        max_rows: int = 16,
        memory: Memory | None = None,
    ) -> None:
        require(max_rows >= 1, "batch size", max_rows, "≥ 1")
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self._eos, self._max_rows = eos, max_rows
        self._rows: list[Row] = []
        self._waiting: list[Row] = []
        self._memory: Memory = {} if memory is None else memory
        self._control = Control(self._memory)
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
        for token in (*sampling.logit_bias, *(sampling.eos or ())):
            if not 0 <= token < vocab:
                raise SettingError(
                    f"token id {token} in logit_bias or eos is outside the vocabulary of {vocab}"
                )
        if sampling.stop and self.tokenizer is None:
            raise SettingError("stop strings need a tokenizer")
        if rule.greedy_only and not sampling.greedy:
            raise SettingError(
                f"rule {RULES.text(rule)!r} needs temperature 0, got {sampling.temperature}; "
                "use rule 'standard'"
            )
        if (rule.signals or rule.ranks) and not self.drafter.has_distribution:
            raise SettingError(
                f"rule {RULES.text(rule)!r} reads the draft's distribution and this drafter has "
                "none; use a draft model, or rule 'standard'"
            )
        if sampling.seed is not None and not sampling.greedy:  # the same seed, the same text
            controller = controller.timeless(self.drafter.ratio(self.target))
        seed = np.random.SeedSequence().entropy if sampling.seed is None else sampling.seed
        assert isinstance(seed, int)
        seed %= 1 << 63
        eos = self._eos if sampling.eos is None else frozenset(sampling.eos)
        row = Row(
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
            limit=self.target.limit,
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
            self.clear()

    def cancel(self, request: int) -> Completion | None:
        """Stop a request now; None if it is not running or waiting."""
        for row in (*self._rows, *self._waiting):
            if row.id == request:
                self._waiting = [w for w in self._waiting if w is not row]
                self._keep([i for i, r in enumerate(self._rows) if r is not row])
                return row.complete("cancelled")
        return None

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round for every row: draft, verify, judge, commit, observe."""
        self._admit()
        if not self._rows:
            return []
        began, target_before = time.perf_counter(), self.target.seconds
        drafter_before = self.drafter.seconds
        counts_before = list(self.drafter.counts or ())

        # A target that drafts reads a prompt first: the first token comes as soon as plainly. Not
        # only where it is alone, or what is sampled would depend on that.
        own = self.drafter.target is self.target
        drafted = draft(self._rows, self.drafter, self._control, self._sampler, rest_first=own)
        drafting = time.perf_counter() - began
        logits, reads_prompt = self._verify(drafted)
        verdict = judge(self._rows, drafted, logits, self._sampler)
        accepted: list[int] = verdict.accepted.tolist()
        failed = errors(self._rows, verdict, logits)
        committed = self._commit(drafted, accepted, verdict.next_token.tolist(), failed)
        drift = self._drift(verdict, drafted, committed)
        counts = [
            (passes - before, exits - asked)
            for (passes, exits), (before, asked) in zip(
                self.drafter.counts or (), counts_before, strict=True
            )
        ]

        outcome = RoundOutcome(
            drafted=drafted.lengths,
            accepted=np.array(accepted),
            accept_prob=verdict.accept_prob.double().cpu().numpy(),
            stopped_by=drafted.stopped_by,
            signals=drafted.signals,
            draft_seconds=drafting - drafted.prepared if drafted.steps else 0.0,
            # A pass that also read the prompt says nothing about what judging costs.
            verify_seconds=0.0 if reads_prompt else time.perf_counter() - began - drafting,
            draft_steps=drafted.steps,
            first_step_seconds=drafted.first,
            catch_up_seconds=drafted.prepared,
        )
        self._control.observe(outcome)
        forward = self.drafter.seconds - drafter_before, self.target.seconds - target_before
        if reads_prompt:  # then that is what the pass counts as
            self._rows[0].prefill += forward[1]
            forward, began = (forward[0], 0.0), began + forward[1]
        return self._report(drafted, outcome, committed, drift, counts, forward, began)

    def _admit(self) -> None:
        """Let waiting requests join. The first verification reads the end of a lone prompt."""
        joining = self._waiting[: self._max_rows - len(self._rows)]
        if not joining:
            return
        del self._waiting[: len(joining)]
        began = time.perf_counter()
        prompts = [row.context for row in joining]
        room = max(row.sampling.max_new_tokens for row in joining)
        self.target.join(prompts, room, leave_end=len(prompts) == 1 and not self._rows)
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

    def clear(self) -> None:
        """Drop everything, also what an error in the middle of a round or a join left behind."""
        self._waiting.clear()
        self._rows, self._control = [], Control(self._memory)
        self.target.keep([])
        self.drafter.keep([])
        self._refresh()

    def _refresh(self) -> None:
        self._sampler = Sampler([r.sampling for r in self._rows], [r.eos for r in self._rows])

    def _verify(self, drafted: Drafted) -> tuple[torch.Tensor, bool]:
        """The target's logits after the context and each drafted token; did it read a prompt?"""
        pieces = [
            [*row.context[n:], *tokens]
            for row, n, tokens in zip(self._rows, self.target.lengths, drafted.tokens, strict=True)
        ]
        unread = {len(p) - len(t) - 1 for p, t in zip(pieces, drafted.tokens, strict=True)}
        assert unread == {0} or len(pieces) == 1, "only a lone row may have more to read"
        return self.target.feed(pieces, skip=max(unread)), unread != {0}

    def _commit(
        self,
        drafted: Drafted,
        accepted: list[int],
        following: list[int],
        failed: list[str | None],
    ) -> Committed:
        """Extend every row by what was kept and roll both caches back to it."""
        out: Committed = []
        for i, row in enumerate(self._rows):
            self.drafter.rollback(i, len(row.context) + accepted[i])
            out.append(row.commit(drafted.tokens[i], accepted[i], following[i], failed[i]))
            self.target.rollback(i, len(row.context) - 1)
        return out

    def _drift(
        self, verdict: Verdict, drafted: Drafted, committed: Committed
    ) -> list[list[float] | None]:
        """Per row the drift of its judged positions: what was accepted, and the first rejection.

        Bonus and plain tokens are the target's own, they add none.
        """
        if verdict.drift is None:
            return [None] * len(self._rows)
        out: list[list[float] | None] = []
        everything = verdict.drift.double().cpu().tolist()
        for i, (row, (pieces, _)) in enumerate(zip(self._rows, committed, strict=True)):
            judged = min(len(drafted.tokens[i]), len(pieces))
            some = None if row.rule.lossless else everything[i][:judged]
            out.append(some)
            if some is not None:
                row.drift = (row.drift or 0.0) + sum(some)
        return out

    def _report(
        self,
        drafted: Drafted,
        outcome: RoundOutcome,
        committed: Committed,
        drift: list[list[float] | None],
        counts: list[tuple[int, int]],
        forward: tuple[float, float],
        began: float,
    ) -> list[Event]:
        """Let finished rows leave; one event per row."""
        rows, events = self._rows, []
        self._keep([i for i, (_, reason) in enumerate(committed) if reason is None])
        now = time.perf_counter()
        other = now - began - sum(forward)
        for i, (row, (pieces, reason)) in enumerate(zip(rows, committed, strict=True)):
            round_ = Round(
                drafted=int(outcome.drafted[i]),
                accepted=int(outcome.accepted[i]),
                committed=len(pieces),
                stopped_by=Stop(int(outcome.stopped_by[i])),
                draft_seconds=forward[0],
                verify_seconds=forward[1],
                other_seconds=other,
                drift=drift[i],
                layer_passes=counts[i][0] if counts else None,
                exit_projections=counts[i][1] if counts else None,
            )
            row.first_token = row.first_token or now - row.submitted
            row.rounds.append(round_)
            done = row.complete(reason) if reason else None
            events.append(Event(row.id, pieces, drafted.tokens[i], round_, done))
        return events
