"""Replay whole batches: the live engine itself, over a target and a drafter that read a trace.

Who joins and leaves when, how far the rows draft together and where they rest is decided by
`engine.Engine`, its crew and its meter, as in a live run; only the models' outputs are looked up.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from forerun.checks import whole
from forerun.controllers import CONTROLLERS, Controller
from forerun.costs import Costs
from forerun.drafters.base import Drafter, Prompts, Proposal, Step, StepContext, Texts
from forerun.drafters.stepping import step_by_step
from forerun.engine.judging import Judgements, RowVerdict
from forerun.engine.leaves import attached, next_nodes
from forerun.engine.loop import Engine
from forerun.engine.meter import Meter
from forerun.engine.results import Completion, Event, FinishReason
from forerun.engine.row import Row
from forerun.errors import SettingError
from forerun.lab.traces.results import (
    COUNTED,
    AsRecorded,
    Replay,
    Rounds,
    Watch,
    costs_for,
    takes_leaves,
)  # fmt: skip
from forerun.lab.traces.rules import RecordedRule
from forerun.lab.traces.trace import Trace
from forerun.requests import Request, Sampling
from forerun.rules import RULES
from forerun.runtime.attention import Parents
from forerun.runtime.base import Best, Executor, Facts, Pieces
from forerun.types import SIGNALS, FloatArray, IntArray, Stop

UNLIMITED = 1 << 30  # a context limit beyond every text of a trace


def replay_batches(
    trace: Trace,
    controller: str | Controller,
    costs: Costs | Callable[[int], Costs],
    rows: int,
    plain_seconds: FloatArray | None = None,
    watch: Watch | None = None,
    rule: RecordedRule | None = None,
) -> Replay:
    """The prompts in the trace's order as requests to an engine that decodes `rows` together.

    A prompt joins when another one leaves, and starts from what its controller carries over, as
    live. Sampled texts are replayed as requests without a seed.

    Args, else and errors as for `replay`:
        costs: of a round of the whole batch, or a function of the rows that are in it.
        rows: how many texts are decoded together, ≥ 1.
        plain_seconds: those of `fixed(0)`, if they are known; else that is replayed first.

    Returns:
        Counts per prompt. A round's seconds are shared among the rows that decode in it, so that
        those of all prompts add up to the time of all; `plain_seconds` are those of plain decoding
        in batches. Reading prompts takes rounds, as live, but no seconds.
    """
    whole("rows", rows, 1)
    made, order = CONTROLLERS.make(controller), np.arange(trace.prompts)
    if plain_seconds is None:
        plain = Replayed(trace, CONTROLLERS.make("fixed(0)"), Meter.given(costs), rows)
        plain_seconds = plain.serve(order).seconds
    meter = Meter.given(
        lambda size: costs_for(made, costs if isinstance(costs, Costs) else costs(size))
    )
    done = Replayed(trace, made, meter, rows, watch, rule=rule).serve(order)
    return replace(done, plain_seconds=plain_seconds)


def serve_alone(
    trace: Trace,
    controller: Controller,
    cell: Costs,
    order: IntArray,
    watch: Watch | None = None,
    rule: RecordedRule | None = None,
) -> Replay:
    """Streams of requests that are served one at a time; `order` and results `(streams, n)`."""
    streams = []
    for prompts in order:
        meter = Meter.given(costs_for(controller, cell))
        streams.append(Replayed(trace, controller, meter, 1, watch, rule=rule).serve(prompts))
    plain = cell.plain * trace.sizes[order].astype(np.float64)
    both = {f.name: np.stack([getattr(one, f.name) for one in streams]) for f in fields(Replay)}
    return Replay(**{**both, "plain_seconds": plain})


def _check_seconds(trace: Trace) -> None:
    """Raise `SettingError` unless second choices of the draft can be replayed."""
    if not trace.knows("rank"):
        raise SettingError(
            "second choices (leaves) cannot be replayed: this trace does not say which of them the "
            "texts go on with; record it by forerun record"
        )
    if trace.tossed.any():
        raise SettingError(
            "second choices (leaves) cannot be replayed on texts judged by coins, which would draw "
            "them anew; record by the rule gumbel"
        )


class NoModel(Executor):
    """A model without logits: rows only count the tokens it would have read."""

    facts = Facts(vocab_size=1, limit=UNLIMITED)
    device = torch.device("cpu")
    trees = True

    def move(self, row: int, source: int, place: int) -> None:
        """Nothing to do."""

    def reserve(self, rows: int, columns: int) -> None:
        """Nothing to do."""

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing to do."""

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        return torch.empty((len(pieces), 0, 1))


class Recorded(Drafter):
    """Drafts the recorded tokens. Rows join in the order of `prompts`."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.blind = trace, bool(trace.about.get("blind"))
        self._shown = frozenset(name for name in SIGNALS if trace.knows(name))
        self._second_kept = trace.second_kept
        self.prompts: list[int] = []
        self.places: list[int] = []  # per row its place in the order
        self._begins: list[int] = []
        self.steps = np.zeros(0, np.int64)  # `(places,)` steps so far

    def serve(self, prompts: Sequence[int]) -> None:
        """Numbers of the prompts to come."""
        self.prompts, self._next = list(prompts), itertools.count()
        self.steps = np.zeros(len(self.prompts), np.int64)

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        self.places.extend(next(self._next) for _ in prompts)

    def keep(self, rows: Sequence[int]) -> None:
        self.places = [self.places[row] for row in rows]

    def able(self, row: int, text: list[int]) -> bool:
        return not self.blind or bool(self._run(row, len(text)))

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        self.begin(texts)
        if self.blind and not self._shown:  # all at once, as nothing is said of the tokens
            out = Proposal.none(len(texts))
            for row, text in enumerate(texts):
                if text is not None:
                    out.tokens[row] = self._run(row, len(text))[: most[row]]
                    self.steps[self.places[row]] += len(out.tokens[row])
            return out
        depth = self.trace.depth  # beyond it there is nothing to propose
        return step_by_step(self.step, texts, [min(n, depth) for n in most], guide)

    def _run(self, row: int, length: int) -> list[int]:
        """What was drafted behind a row's text of so many tokens."""
        trace, prompt = self.trace, self.prompts[self.places[row]]
        at = length - int(trace.prompt_tokens[prompt])
        drafted: list[int] = trace.draft_tokens[prompt, at, : trace.lengths[prompt, at]].tolist()
        return drafted

    def begin(self, texts: Texts) -> None:
        """Where each row's draft begins."""
        self._begins = [len(text or ()) for text in texts]

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """The recorded tokens; those of rows without a text are fillers."""
        trace = self.trace
        wanted = greedy or frozenset()
        names = sorted(wanted & self._shown)
        tokens: list[list[int]] = [[0]] * len(texts)
        ended: list[Stop | None] = [None] * len(texts)
        signals: dict[str, list[list[Any]]] = {name: [[0.0]] * len(texts) for name in names}
        if "second" in wanted:
            signals["second"] = [[None]] * len(texts)
        for row, text in enumerate(texts):
            if text is None:
                continue
            place, begin = self.places[row], self._begins[row]
            prompt = self.prompts[place]
            position = prompt, begin - int(trace.prompt_tokens[prompt]), len(text) - begin
            if position[2] >= trace.lengths[position[:2]]:
                ended[row] = Stop(int(trace.stops[position[:2]]))
                continue
            tokens[row] = [int(trace.draft_tokens[position])]
            for name in names:
                signals[name][row] = [float(trace.signals[name][position])]
            if "second" in wanted:
                signals["second"][row] = [self._second(position)]
            self.steps[place] += 1
        ran = any(text is not None and why is None for text, why in zip(texts, ended, strict=True))
        return Step(best=Best(tokens, signals, [[True]] * len(texts)), ended=ended, ran=ran)

    def _second(self, position: tuple[int, int, int]) -> int | None:
        """The draft's second choice at a depth of a run: the text's token, or another."""
        trace, (prompt, at, depth) = self.trace, position
        if np.isnan(trace.judged["target_rank"][position]):
            return None
        right = depth == trace.matches[prompt, at] and self._second_kept[prompt, at]
        return int(trace.tokens[prompt, at + depth]) if right else -1


@dataclass(eq=False)
class _TraceRow(Row):
    """A row whose text ends where the recorded one did."""

    size: int = 0
    sampled: bool = False

    @property
    def certain(self) -> bool:
        return not self.sampled

    def _finished(self, token: int) -> FinishReason | None:
        return "eos" if self.produced >= self.size else None


class Replayed(Engine):
    """An engine whose models are a trace; a request's id is its place in the order."""

    drafter: Recorded

    def __init__(
        self, trace: Trace, controller: Controller, meter: Meter, rows: int,
        watch: Watch | None = None, models: tuple[NoModel, Recorded] | None = None,
        rule: RecordedRule | None = None,
    ) -> None:  # fmt: skip
        if takes_leaves(controller):
            _check_seconds(trace)
        self._trace, self._controller, self._watch = trace, controller, watch
        self._rule, self._tossed = rule or AsRecorded(trace), trace.tossed
        target, drafter = models or (NoModel(), Recorded(trace))
        target.trees = bool(trace.about.get("trees", True))
        if rule is not None:
            target.trees &= rule.rule.takes_leaves and rule.has_bonus
        super().__init__(target, drafter, max_rows=rows, meter=meter)

    def serve(self, order: Sequence[int] | IntArray) -> Replay:
        """Run the prompts until all requests are done; `plain_seconds` stay 0."""
        for _ in self.requests(order):
            pass
        return self._sums

    def requests(self, order: Sequence[int] | IntArray) -> Iterator[Event]:
        """The events of all requests, whose ids are their places."""
        prompts = [int(prompt) for prompt in order]
        self.drafter.serve(prompts)
        counts = {name: np.zeros(len(prompts), np.int64) for name in COUNTED}
        seconds, plain, drift = np.zeros((3, len(prompts)))
        self._sums = Replay(
            committed=self._trace.sizes[prompts], seconds=seconds, plain_seconds=plain,
            drift=drift, **counts,
        )  # fmt: skip
        writing, _ = self._waiting
        writing.update((place, self._text(place, prompt)) for place, prompt in enumerate(prompts))
        return self.run()

    def _text(self, place: int, prompt: int) -> Row:
        trace = self._trace
        context = [0] * int(trace.prompt_tokens[prompt])  # a trace does not hold them
        ends: IntArray = trace.ends[prompt, : int(trace.sizes[prompt])]
        positions = np.flatnonzero(ends <= trace.depth)
        eos = trace.draft_tokens[prompt, positions, ends[positions] - 1]
        sampling = Sampling(max_new_tokens=int(trace.budgets[prompt]))
        return _TraceRow(
            id=place,
            request=Request(context, sampling, self._controller, RULES.make("standard")),
            tokenizer=None,
            model_eos=frozenset(eos.tolist()),
            vocab_size=1,
            limit=UNLIMITED,
            rests_first=False,
            submitted=0.0,
            size=int(trace.sizes[prompt]),
            sampled=bool(self._tossed[prompt]),
        )

    def _judge(self, proposal: Proposal, pieces: Pieces, wanted: Sequence[int]) -> Judgements:
        if proposal.nodes:
            self.target.feed(*attached(pieces, wanted, proposal))
        else:
            self.target.feed(pieces, wanted)
        trace, out = self._trace, dict[int, RowVerdict]()
        end = trace.tokens.shape[1] - 1  # beyond the end of a text it is not read
        for i, row in enumerate(self._rows):
            if not wanted[i]:
                continue
            prompt = self.drafter.prompts[row.id]
            at, drafted = row.produced, len(proposal.tokens[i])
            here = np.array([prompt * trace.tokens.shape[1] + at])
            spent = np.array([[self._sums.drift[row.id], at]], dtype=float)
            kept = self._rule.judge(here, np.array([drafted]), spent)
            accepted = int(kept.accepted[0])
            self._sums.drift[row.id] += float(np.sum(kept.drift))
            whole = accepted == wanted[i]  # no token of the target's own
            following = None if whole else int(trace.tokens[prompt, min(at + accepted, end)])
            chances = [float(kept.chance(depth)[0]) for depth in range(drafted)]
            out[i] = RowVerdict(accepted, following, chances)
        for i, n in next_nodes(out, proposal, proposal.nodes).items():
            row = self._rows[i]
            at = min(row.produced + out[i].accepted + 1, end)
            out[i].path = [n]
            out[i].following = int(trace.tokens[self.drafter.prompts[row.id], at])
        self._add(proposal, out)
        return dict(out)

    def _has_bonus(self, i: int, proposal: Proposal) -> bool:
        return not proposal.tokens[i] or self._rule.has_bonus

    def _add(self, proposal: Proposal, judged: dict[int, RowVerdict]) -> None:
        """Count a round, and share its seconds."""
        rows, sums = [self._rows[i] for i in judged], self._sums
        place = np.array([row.id for row in rows], dtype=np.int64)
        drafted = np.array([len(proposal.tokens[i]) for i in judged], dtype=np.int64)
        accepted = np.array([judged[i].accepted for i in judged], dtype=np.int64)
        stopped = np.array([int(proposal.stopped_by[i] or 0) for i in judged], dtype=np.int64)
        leaves = np.array([len(proposal.nodes.get(i, ())) for i in judged], dtype=np.int64)
        leaf = np.array([len(one.path) for one in judged.values()], dtype=np.int64)
        costs = self._meter.costs(len(self._rows))
        width = costs.width(proposal.widths, len(self._rows))
        took = costs.round_seconds(proposal.steps, width, bool(proposal.nodes))
        seconds = np.full(len(rows), took / max(len(rows), 1))
        steps = self.drafter.steps[place] - sums.steps[place]
        for total, value in (
            (sums.rounds, 1),
            (sums.drafted, drafted),
            (sums.accepted, accepted),
            (sums.steps, steps),
            (sums.capped, stopped == Stop.EXHAUSTED),
            (sums.leaves, leaves),
            (sums.leaves_kept, leaf),
            (sums.seconds, seconds),
        ):
            total[place] += value
        if self._watch is not None and rows:
            at = np.array([row.produced for row in rows], dtype=np.int64)
            prompt = np.array(self.drafter.prompts, dtype=np.int64)[place]
            self._watch(Rounds(prompt, at, drafted, accepted, steps, stopped, seconds, leaf))

    def _complete(
        self, row: Row, reason: FinishReason, kept: RowVerdict | Exception | None = None
    ) -> Completion:
        if isinstance(kept, Exception):
            raise kept
        return super()._complete(row, reason, kept)

    def _abandon(self, error: Exception) -> list[Event]:
        raise error
