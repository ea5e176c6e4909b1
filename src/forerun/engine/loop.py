"""The engine: rounds of draft, verify, judge, commit, observe over rows that come and go."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import add, eq, sub
from typing import Any

from forerun.controllers.base import Controller
from forerun.costs import Costs
from forerun.drafters.base import Drafter, Proposal
from forerun.engine.constraint import bans, sit_out, split_stops
from forerun.engine.drafting import RoundContext
from forerun.engine.endings import draft_limit, reading
from forerun.engine.judging import (
    Judgements,
    RowVerdict,
    bound_scored,
    compare,
    judge,
    note_scored,
    overrule,
    read_scored,
)
from forerun.engine.leaves import attached, follow, follow_shaped, path_of
from forerun.engine.lengths import Lengths, Memory
from forerun.engine.meter import Meter
from forerun.engine.prefixes import Prefixes, Reuse
from forerun.engine.reporting import NOTHING, Pass, event, lap_of, round_of
from forerun.engine.results import Completion, Event, FinishReason
from forerun.engine.row import Row
from forerun.engine.sampling import Sampler
from forerun.errors import SettingError, require
from forerun.governors.base import SLOPE, Governor, Outcome, Seat
from forerun.lazy import torch
from forerun.requests import Request, Sampling
from forerun.rules.base import AcceptanceRule
from forerun.runtime.base import (
    CHUNK,
    LOGITS,
    Executor,
    OneThread,
    Pieces,
    Rows,
    best_of,
    logits_of,
)
from forerun.types import CENSORING, RoundOutcome

NO_SIGNALS: frozenset[str] = frozenset()
Committed = dict[int, tuple[int, FinishReason | None]]
"""Per row that got on how many tokens it got, and why it ends, if it does."""
Waiting = OrderedDict[int, Row]
"""Requests without a row by their ids, those that write and those that are scored apart: each is
taken, and found when it is cancelled, without a look at the others."""


class Engine:
    """Generates for many requests at once, each with its own sampling, controller and rule.

    Args:
        target: the model whose text it is.
        drafter: who runs ahead.
        tokenizer: for text and stop strings; None works on token ids alone.
        eos: the model's end-of-text ids.
        max_rows: requests decoded together; more wait their turn. One more that is only scored has
            a row of its own, so that neither waits for the other.
        memory: what controllers carry from request to request, to share it among engines.
        meter: what rounds cost, and the clock, likewise.
        prefixes: texts read before, likewise; None reads every text.

    Raises:
        SettingError: a drafter of another target, or executors that keep no prefixes.
    """

    fits: Callable[[Sequence[Request], Request], bool] = staticmethod(lambda running, request: True)
    """Whether a request may run beside those that do; the next one waits until it may."""

    def __init__(
        self, target: Rows | Executor, drafter: Drafter, tokenizer: Any = None,
        eos: frozenset[int] = frozenset(), max_rows: int = 16, memory: Memory | None = None,
        meter: Meter | None = None, prefixes: Prefixes | None = None,
    ) -> None:  # fmt: skip
        require(max_rows >= 1, "batch size", max_rows, "≥ 1")
        self.target = target if isinstance(target, Rows) else Rows(target)
        if drafter.target not in (None, self.target):
            raise SettingError(
                "this drafter runs layers of a target of its own; verify with that one: "
                "Engine(drafter.target, drafter)"
            )
        self.drafter, self.tokenizer = drafter, tokenizer
        self._eos, self._max_rows = eos, max_rows
        self._rows: list[Row] = []
        self._waiting: tuple[Waiting, Waiting] = OrderedDict(), OrderedDict()
        self._memory: Memory = {} if memory is None else memory
        self._meter = Meter.of(self.target, drafter) if meter is None else meter
        self._ids, self._clock = itertools.count(), self._meter.clock
        self._lengths = Lengths(self._memory, self.drafter.blind)
        caches = self.target, *drafter.caches
        self._reuse = Reuse(prefixes, caches)
        alone = all(rows.executor.own_threads for rows in caches)
        self._threads: AbstractContextManager[Any] = OneThread() if alone else nullcontext()
        self._beside = ThreadPoolExecutor(1, "forerun-masks")  # starts nothing before it is used
        self._refresh()

    def submit(
        self, request: Request | Sequence[int], sampling: Sampling | None = None,
        controller: Controller | None = None, rule: AcceptanceRule | None = None,
        since: float | None = None,
    ) -> int:  # fmt: skip
        """Queue a request; it joins between rounds. Returns its id.

        Takes a `Request`, or its first four fields; `since` is when it was asked for, if not now.

        Raises:
            PromptError, SettingError: it cannot be served; see `Request.check`.
        """
        if not isinstance(request, Request):
            assert sampling is not None, "a prompt comes with sampling, controller and rule"
            assert controller is not None
            assert rule is not None
            request = Request(request, sampling, controller, rule)
        self.check(request)
        # A target that drafts has read the prompt only after its first pass. Without a bonus every
        # token shall be judged, the first one, too.
        soon = request.stream and request.rule.has_bonus
        row = Row(
            next(self._ids), request, self.tokenizer, self._eos, self.target.vocab_size,
            self.target.limit, rests_first=soon or self.drafter.target is self.target,
            submitted=self._clock() if since is None else since,
        )  # fmt: skip
        self._waiting[request.scores is not None][row.id] = row
        return row.id

    @property
    def running(self) -> dict[int, Request]:
        """Requests that have a row, by their ids."""
        return {row.id: row.request for row in self._rows}

    def check(self, request: Request) -> None:
        """Refuse what cannot be served, as `submit` would and `Request.check` says, without
        queueing it."""
        request.check(
            self.target.vocab_size, self.target.limit, self.tokenizer is not None,
            self.drafter.has_distribution, self.target.facts.source_limit,
        )  # fmt: skip
        split_stops(request.sampling.stop, self.tokenizer)
        bans(request.sampling.bad_words, self.tokenizer, self.target.vocab_size)

    def run(self) -> Iterator[Event]:
        """Round after round until every request is done: the one loop that everything consumes. A
        consumer that walks away cancels what is left; the engine stays usable."""
        try:
            while self._rows or any(self._waiting):
                yield from self.step()
        finally:
            self.clear()

    def cancel(self, request: int) -> Completion | None:
        """Stop a request now; None if it is not running or waiting."""
        for queue in self._waiting:
            if (row := queue.pop(request, None)) is not None:
                return self._complete(row, "cancelled")
        for i, row in enumerate(self._rows):
            if row.id == request:
                self._reuse.leave(row, i)
                self.drafter.learn(row.context, row.prompt)
                self._keep([other is not row for other in self._rows])
                return self._complete(row, "cancelled")
        return None

    def clear(self) -> None:
        """Drop everything, also what an error in the middle of a round left behind."""
        for queue in self._waiting:
            queue.clear()
        self._drop_rows()

    def step(self) -> list[Event]:
        """One round for every row: draft, verify, judge, commit, observe."""
        with self._threads, self._inference:
            try:
                self._admit()
                if not self._rows:
                    return []
                passed = self._schedule()
                proposal = self._draft(passed)
                judged = self._verify(passed, proposal)
                committed = self._commit(proposal, judged)
                self._observe(passed, proposal, judged)
                return self._report(passed, proposal, judged, committed)
            except Exception as error:  # of a model: what shared the pass ends with it
                return self._abandon(error)

    def _draft(self, passed: Pass) -> Proposal:
        """What is known ahead, then the drafter's tokens, as far as policies and governors go."""
        guide = self._guide
        rooms = guide.begin(passed.ready, self.drafter)
        asked = [0] * len(rooms)
        if not (rests := self._lengths.resting(passed.costs)):
            seats = [self._seat(i) if room else None for i, room in enumerate(rooms)]
            for i, text in enumerate(guide.texts(rooms)):
                if text is not None and self._lengths.governs(i) and not self.drafter.able(i, text):
                    seats[i] = None
            asked = self._lengths.limits(passed.costs, seats)
        limits = list(map(draft_limit, asked, rooms))
        most, proposal = [limit for limit, _ in limits], Proposal.none(len(rooms))
        if any(most):
            passed.unread = [self._unread(i) if n else 0 for i, n in enumerate(most)]
            proposal = self.drafter.propose(guide.texts(most), most, guide)
        guide.end(proposal, limits)
        if not rests and not all(passed.ready):
            self._read_along(passed)
        passed.drafting = self._clock() - passed.began
        return proposal

    def _admit(self) -> None:
        """Let waiting requests join, as rows that have read nothing yet."""
        joining: list[Row] = []
        while (row := self._next(joining)) is not None:
            joining.append(row)
            del self._waiting[row.request.scores is not None][row.id]
            row.queued = self._clock() - row.submitted
        if not joining:
            return
        governed = any(isinstance(row.request.controller, Governor) for row in joining)
        first, self._rows = not self._rows, [*self._rows, *joining]
        if first and governed:
            self._meter.expect(len(joining))
        longest = max(row.sampling.max_new_tokens for row in joining)
        room, began = longest + max(row.prompt for row in joining), self._clock()
        sources = [row.request.source for row in joining if row.request.source is not None]
        read = {"sources": sources} if sources else {}
        self.target.join(len(joining), room, **read)
        self.drafter.join([row.context for row in joining], longest, **read)
        took = self._clock() - began
        for row in joining:
            row.encode, given, request = took, row.request.costs, row.request
            changing = not row.certain or not request.rule.lossless
            if given is None and row.sampling.seed is not None and changing:
                # The same seed, the same text: neither the clock nor neighbours have a say.
                given = Costs.synthetic(self.drafter.ratio(self.target), SLOPE)
            self._lengths.join(request.controller, row.certain, given)
        self._reuse.join(self._rows, len(joining))
        for i, row in enumerate(joining, len(self._rows) - len(joining)):
            if row.request.read is not None and not self.target.lengths[i]:
                self.target.extend(i, row.request.read)
                row.cached = self.target.lengths[i]
        self._refresh()

    def _next(self, joining: Sequence[Row]) -> Row | None:
        """First come, first served. Texts are scored one after the other, as a pass takes a part of
        one, and in a row more than there are for who writes."""
        rows = [*self._rows, *joining]
        scoring = any(row.request.scores is not None for row in rows)
        full = len(rows) - scoring >= self._max_rows, scoring
        free = (q for q, waits in zip(self._waiting, full, strict=True) if q and not waits)
        pick = min((next(iter(q.values())) for q in free), key=lambda row: row.id, default=None)
        fits = pick is None or self.fits([row.request for row in rows], pick.request)
        return pick if fits else None

    def _keep(self, staying: Sequence[bool]) -> None:
        """Let all other rows leave."""
        if all(staying):
            return
        rows = [row for row, stays in enumerate(staying) if stays]
        self.target.keep(rows)
        self.drafter.keep(rows)
        self._lengths.keep(rows)
        self._rows = [self._rows[row] for row in rows]
        if not rows:
            self._meter.keep()
        self._refresh()

    def _drop_rows(self) -> None:
        self._rows = []
        self._lengths = Lengths(self._memory, self.drafter.blind)
        self.target.keep([])
        self.drafter.keep([])
        self._refresh()

    def _refresh(self) -> None:
        """What is constant while the same rows run."""
        rows = self._rows
        self._sampler = Sampler(
            [row.sampling for row in rows], [row.eos for row in rows], [row.noise for row in rows]
        )
        executors = [own.executor for own in (self.target, *self.drafter.caches)]
        by_torch = any(own.on_torch for own in executors) or not self._sampler.trivial
        # Made once: a round is short.
        self._inference: AbstractContextManager[Any]
        self._inference = torch.inference_mode() if by_torch else nullcontext()
        trees = self.target.executor.trees
        self._guide = RoundContext(rows, self._lengths, self._sampler, self._clock, trees)
        self._may_exclude = any(row.sampling.excludes for row in rows)
        self._constrained = any(row.place is not None for row in rows)
        requests = [row.request for row in rows]
        self._scores = any(one.logprobs is not None or one.keep_logits for one in requests)
        self._scoring = any(one.scores is not None for one in requests)
        self._compares = self._sampler.all_certain and not self._scores
        self._only_compares = all(one.rule.matches_greedy for one in requests)

    def _schedule(self) -> Pass:
        """How far each row reads this round: prompts in chunks, under one budget for all."""
        waiting = self._reuse.fork(self._rows)
        if self._constrained:
            waiting |= sit_out([row.place for row in self._rows])
        lengths, texts = self.target.lengths, [len(row.context) for row in self._rows]
        unread = list(map(sub, texts, lengths))
        for row in waiting:
            unread[row] = 0
        if self._scoring:
            bound_scored(self._rows, unread, self.target.vocab_size)
        upto = list(map(add, lengths, reading(unread, CHUNK)))
        counters = [dict(self.drafter.counters(r)) for r in range(len(self._rows))]
        ready = list(map(eq, upto, texts))
        read, costs = sum(upto) - sum(lengths) - sum(ready), self._meter.costs(len(self._rows))
        before = self.drafter.seconds, self.target.seconds, self._graphs(), counters
        return Pass(self._clock(), upto, ready, read, *before, costs)

    def _graphs(self) -> int:
        return sum(rows.executor.graphs for rows in (self.target, *self.drafter.caches))

    def _seat(self, i: int) -> Seat:
        """What a governor needs to know of a row that may draft."""
        row = self._rows[i]
        return Seat(rides=not row.rounds, unread=self._unread(i), left=row.left)

    def _unread(self, i: int) -> int:
        return self.drafter.unread(i, self._rows[i].context)

    def _read_along(self, passed: Pass) -> None:
        """Let the drafter read what the target reads of long prompts, where that may pay."""
        began, costs, rows = self._clock(), passed.costs, range(len(self._rows))
        texts: list[list[int] | None] = [None for _ in rows]
        for i, row in enumerate(self._rows):
            reads = not passed.ready[i] and row.request.scores is None
            if reads and self._lengths.reads(i, costs, self._seat(i)):
                texts[i] = row.context[: passed.upto[i]]
        before = sum(map(self._unread, rows))
        self.drafter.follow(texts)
        passed.along = self._clock() - began, before - sum(map(self._unread, rows))

    def _verify(self, passed: Pass, proposal: Proposal) -> Judgements:
        """One pass of the target over what each row reads, then its rule's word on the draft."""
        covered, pieces, wanted = self.target.lengths, list[list[int]](), list[int]()
        for i, (row, tokens) in enumerate(zip(self._rows, proposal.tokens, strict=True)):
            fed = tokens if self._has_bonus(i, proposal) else tokens[:-1]
            pieces.append([*row.context[covered[i] : passed.upto[i]], *fed])
            wanted.append(len(fed) + 1 if passed.ready[i] else 0)
        began = self._clock()
        judged = self._judge(proposal, pieces, wanted)
        passed.verifying = self._clock() - began
        return judged

    def _has_bonus(self, i: int, proposal: Proposal) -> bool:
        """Whether a row gets a token of the target's own if its draft is accepted whole."""
        if not proposal.tokens[i] or i in proposal.predicted:
            return True
        decoded = self.drafter.bonus or proposal.stopped_by[i] not in CENSORING
        return decoded and self._rows[i].request.rule.has_bonus

    def _judge(self, proposal: Proposal, pieces: Pieces, wanted: Sequence[int]) -> Judgements:
        """Feed the target, and judge the drafts of rows whose logits are wanted."""
        rows, nodes = self._rows, proposal.nodes
        grown, counts, parents = (
            attached(pieces, wanted, proposal) if nodes else (pieces, wanted, ())
        )
        if self._scoring:  # of a text to score, those after all its tokens, too
            pairs = zip(rows, grown, counts, strict=True)
            counts = [n if row.request.scores is None else len(own) for row, own, n in pairs]
        elif self._compares and self._sampler.trivial:
            signals = NO_SIGNALS if self._only_compares else frozenset({LOGITS})
            best = self.target.best(grown, counts, signals, parents)
            self._tell(best.tokens, pieces, wanted)
            out = compare(rows, proposal.tokens, best, wanted)
            if not self._only_compares:
                shaped, raw = best.signals[LOGITS], partial(logits_of, best)
                overrule(out, rows, proposal, best, shaped, raw, self._sampler, wanted)
            follow(out, proposal, best, wanted)
            return out
        masks = self._masks(proposal, wanted) if self._constrained else None
        logits = self.target.feed(grown, counts, parents)
        if self._scoring:
            read_scored(rows, grown, logits)
        if masks is not None:
            masks.result()
        if not any(wanted):
            return {}
        tails = {i: logits[i, wanted[i] : counts[i]].clone() for i in nodes}
        logits = logits[:, : max(wanted)]
        out = self._judge_logits(proposal, logits, pieces, wanted)
        if nodes:
            follow_shaped(out, proposal, rows, tails, self._sampler)
        return out

    def _judge_logits(
        self, proposal: Proposal, logits: torch.Tensor, pieces: Pieces, wanted: Sequence[int]
    ) -> Judgements:
        """Judge the drafts by `(rows, max(wanted), V)` logits, which may be changed."""
        rows = self._rows
        if self.drafter.hears:
            self._tell(logits.argmax(-1).tolist(), pieces, wanted)
        if self._compares:
            raw = logits if self._may_exclude or not self._only_compares else None
            shaped = self._sampler.shape(logits, rows, proposal.tokens, own=raw is None)
            best = best_of(shaped, NO_SIGNALS)
            out = compare(rows, proposal.tokens, best, wanted, raw)
            if not self._only_compares:
                own = self._sampler
                overrule(out, rows, proposal, best, shaped, lambda: logits, own, wanted)
            return out
        out = judge(rows, proposal, logits, self._sampler, wanted)
        if self._scores:
            note_scored(rows, proposal, logits, out)
        return out

    def _masks(self, proposal: Proposal, wanted: Sequence[int]) -> Future[None]:
        """What constraints allow behind the drafts, computed beside the pass."""
        held = [
            (row.place, row.context[row.prompt :], tokens)
            for row, tokens, n in zip(self._rows, proposal.tokens, wanted, strict=True)
            if row.place is not None and n
        ]

        def prepare() -> None:
            for place, output, tokens in held:
                place.prepare(output, tokens)

        return self._beside.submit(prepare)

    def _tell(self, best: Sequence[Sequence[int]], pieces: Pieces, wanted: Sequence[int]) -> None:
        """Tell the drafter what the target said, if it hears it."""
        if self.drafter.hears:
            self.drafter.hear(
                [row.context for row in self._rows],
                [p[len(p) - n + 1 :] if n else [] for p, n in zip(pieces, wanted, strict=True)],
                [tokens[:n] for tokens, n in zip(best, wanted, strict=True)],
            )

    def _commit(self, proposal: Proposal, judged: Judgements) -> Committed:
        """Extend every row by what was kept and roll both caches back to it."""
        out: Committed = {}
        for i, kept in list(judged.items()):
            row, before = self._rows[i], self._rows[i].produced
            try:
                if isinstance(kept, Exception):
                    raise kept
                # Its newest token is what the next round feeds the drafter.
                old = kept.accepted if kept.following is not None else kept.accepted - 1
                self.drafter.rollback(i, len(row.context) + max(old, 0))
                forced, accepted = proposal.forced.get(i, 0), kept.accepted
                tokens = proposal.tokens[i]
                if kept.path:
                    tokens = path_of(kept, proposal, i)
                    first = self.target.lengths[i] - len(proposal.nodes[i])
                    for place, n in enumerate(kept.path, len(row.context) + accepted):
                        self.target.move(i, first + n, place)
                    accepted = len(tokens)
                count, reason = row.commit(tokens, accepted, kept.following, forced)
                out[i] = count, reason or ("error" if kept.error else None)
                self.target.rollback(i, len(row.context) - 1)
                if row.request.stream:
                    row.pieces(row.produced)
            except Exception as error:  # its rule, its stop strings, its tokenizer
                judged[i] = error
                out[i] = (0, "error")
                row.cut(before)
        if self._scoring:
            out |= {i: (0, "length") for i, row in enumerate(self._rows) if row.scored}
        return out

    def _observe(self, passed: Pass, proposal: Proposal, judged: Judgements) -> None:
        """Tell policies and governors what became of their rows, and the meter what it took."""
        seen: list[RoundOutcome | None] = [None] * len(self._rows)
        decoded = {i: kept for i, kept in judged.items() if isinstance(kept, RowVerdict)}
        for i, kept in decoded.items():
            prediction = self._rows[i].prediction
            if prediction is not None and i in proposal.predicted:  # says nothing of the drafter
                prediction.observe(len(proposal.tokens[i]), kept.accepted)
            elif kept.accepted >= (forced := proposal.forced.get(i, 0)):  # these say nothing either
                seen[i] = RoundOutcome(
                    len(proposal.tokens[i]) - forced, kept.accepted - forced,
                    kept.accept_prob[forced:], proposal.stopped_by[i], proposal.shown[i],
                )  # fmt: skip
        lap = lap_of(passed, proposal, self._clock(), self._graphs())
        # A pass that scores takes what no other does, and so does one that a row sits out.
        timed = not self._scoring and (passed.read_tokens > 0 or all(passed.ready))
        outcome = Outcome(
            {i: kept.committed for i, kept in decoded.items()},
            {i: len(proposal.tokens[i]) for i in decoded},
            proposal.steps,
            *(self._meter.booked(lap) if timed else (None, 0.0)),
            {i: len(own) for i, own in proposal.nodes.items()},
        )
        self._lengths.observe(passed.costs, seen, outcome, proposal.free)
        if timed:
            self._meter.add(lap)

    def _report(
        self, passed: Pass, proposal: Proposal, judged: Judgements, committed: Committed
    ) -> list[Event]:
        """Let finished rows leave; one event per row that got on."""
        drafting = self.drafter.seconds - passed.drafter_before
        verifying = self.target.seconds - passed.target_before
        now = self._clock()
        seconds = drafting, verifying, now - passed.began - drafting - verifying
        events, staying = [], [True] * len(self._rows)
        for i, row in enumerate(self._rows):
            # A pass that reads a row's prompt is that row's prefill.
            reads = not row.rounds
            row.prefill += verifying * reads
            if i not in committed:
                continue
            (count, reason), kept, before = committed[i], judged.get(i), len(row.origins)
            if isinstance(kept, RowVerdict):
                counted = self.drafter.counters(i)
                row.rounds.append(round_of(row, i, passed, proposal, kept, count, seconds, counted))
                row.first_token = row.first_token or now - row.submitted
            done = None
            if (error := self._lengths.failed.get(i)) is not None and not reason:
                reason, kept = "error", error
            if reason:
                staying[i] = False
                if row.request.keep_cache and reason != "error":
                    row.columns = self.target.copy_out(i, 0, self.target.lengths[i])
                done = self._complete(row, reason, kept)
                if reason != "error":
                    self._reuse.leave(row, i)
                    self.drafter.learn(row.context, row.prompt)
            events.append(event(row, proposal.tokens[i], before - count, before, done))
        self._keep(staying)
        return events

    def _complete(
        self, row: Row, reason: FinishReason, kept: RowVerdict | Exception | None = None
    ) -> Completion:
        try:
            error = kept.error if isinstance(kept, RowVerdict) else kept
            return row.complete(reason, error if reason == "error" else None)
        except Exception as error:  # its tokenizer
            return row.complete("error", error)

    def _abandon(self, error: Exception) -> list[Event]:
        """End all rows with what a model raised; requests that wait are served yet."""
        rows = self._rows
        self._drop_rows()
        for row in rows:
            row.cut(sum(r.committed for r in row.rounds))
        return [Event(row.id, [], NOTHING, list, row.complete("error", error)) for row in rows]
