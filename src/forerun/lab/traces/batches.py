"""Replay whole batches: the live engine itself, over a target and a drafter that read a trace.

Who joins and leaves when, how far the rows draft together and where they rest is decided by
`engine.Engine`, its crew and its meter, as in a live run; only the models' outputs are looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forerun.checks import whole
from forerun.controllers import CONTROLLERS, LengthController
from forerun.costs import Costs
from forerun.drafters.base import Drafter, Guide, Proposal, Step, Texts
from forerun.drafters.stepping import step_by_step
from forerun.engine.judging import Judged, Judgements
from forerun.engine.loop import Engine
from forerun.engine.meter import Meter
from forerun.engine.results import Completion, Event, FinishReason
from forerun.engine.row import Row
from forerun.engine.text import Detokenizer, StopStrings
from forerun.lab.traces.replay import Replay, Rounds, Watch, costs_for
from forerun.lab.traces.trace import Trace
from forerun.requests import Request, Sampling
from forerun.rules import RULES
from forerun.runtime.base import Best, Executor, Facts, Pieces
from forerun.types import SIGNALS, FloatArray, IntArray, Stop

UNLIMITED = 1 << 30
"""A context limit beyond every text of a trace."""


def replay_batches(
    trace: Trace,
    controller: str | LengthController,
    costs: Costs | Callable[[int], Costs],
    rows: int,
    plain_seconds: FloatArray | None = None,
    watch: Watch | None = None,
) -> Replay:
    """The prompts in the trace's order as requests to an engine that decodes `rows` together.

    A prompt joins when another one leaves, and starts with the state its controller carries
    over (`LengthController.carries`), as live.

    Args:
        trace: the texts.
        controller: a spec or an object.
        costs: of a round of the whole batch, or a function of the rows that are in it.
        rows: how many texts are decoded together, ≥ 1.
        plain_seconds: those of `replay_batches(trace, "fixed(0)", costs, rows).seconds`, if they
            are known; else that is replayed first.
        watch: called with every round of the rows that decode.

    Returns:
        Counts per prompt. A round's seconds are shared among the rows that decode in it, so that
        those of all prompts add up to the time of all; `plain_seconds` are those of plain decoding
        in batches. Reading prompts takes rounds, as live, but no seconds.

    Sampled texts are replayed as requests without a seed.

    Raises:
        UnknownNameError, SettingError: as `replay`; rows below 1.
    """
    whole("rows", rows, 1)
    made = CONTROLLERS.make(controller)
    if plain_seconds is None:
        plain_seconds = _Replayed(trace, CONTROLLERS.make("fixed(0)"), costs, rows).serve().seconds
    return replace(_Replayed(trace, made, costs, rows, watch).serve(), plain_seconds=plain_seconds)


class _NoModel(Executor):
    """A model without logits: rows only count the tokens it would have read."""

    facts = Facts(vocab_size=1, limit=UNLIMITED)
    device = torch.device("cpu")

    def reserve(self, rows: int, columns: int) -> None:
        pass

    def keep(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        pass

    def run(self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int]) -> torch.Tensor:
        return torch.empty((len(pieces), 0, 1))


class _Recorded(Drafter):
    """Drafts the recorded tokens. Rows join in the trace's order."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._next = itertools.count()
        self._prompts: list[int] = []
        self._begins: list[int] = []
        self.steps = np.zeros(trace.prompts, np.int64)

    def join(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._prompts.extend(next(self._next) for _ in prompts)

    def keep(self, rows: Sequence[int]) -> None:
        self._prompts = [self._prompts[row] for row in rows]

    def propose(self, texts: Texts, most: Sequence[int], guide: Guide) -> Proposal:
        self._begins = [len(text or ()) for text in texts]
        depth = self._trace.depth  # beyond it there is nothing to propose
        return step_by_step(self, texts, [min(n, depth) for n in most], guide)

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """The recorded tokens; those of rows without a text are fillers."""
        trace, names = self._trace, sorted((greedy or frozenset()) & frozenset(SIGNALS))
        tokens = [[0]] * len(texts)
        signals = {name: [[0.0]] * len(texts) for name in names}
        for row, text in enumerate(texts):
            if text is None:
                continue
            prompt, begin = self._prompts[row], self._begins[row]
            position = prompt, begin - int(trace.prompt_tokens[prompt]), len(text) - begin
            tokens[row] = [int(trace.draft_tokens[position])]
            for name in names:
                signals[name][row] = [float(trace.signals[name][position])]
            self.steps[prompt] += 1
        return Step(best=Best(tokens, signals, [[True]] * len(texts)))


@dataclass(eq=False)
class _Text(Row):
    """A row whose text ends where the recorded one did."""

    size: int = 0
    sampled: bool = False

    @property
    def certain(self) -> bool:
        return not self.sampled

    def _finished(self, token: int) -> FinishReason | None:
        return "eos" if self.produced >= self.size else None


class _Replayed(Engine):
    """An engine whose models are a trace; a request's id is the number of its prompt."""

    drafter: _Recorded

    def __init__(
        self,
        trace: Trace,
        controller: LengthController,
        costs: Costs | Callable[[int], Costs],
        rows: int,
        watch: Watch | None = None,
    ) -> None:
        self._trace, self._watch = trace, watch
        prob = trace.accept_prob
        self._sampled = [bool(np.any((p > 0) & (p < 1))) for p in prob]
        sums, seconds = np.zeros((5, trace.prompts), np.int64), np.zeros((2, trace.prompts))
        rounds, drafted, accepted, steps, capped = sums
        self._sums = Replay(rounds, drafted, accepted, trace.sizes, steps, capped, *seconds)
        of = (lambda _: costs) if isinstance(costs, Costs) else costs
        meter = Meter.given(lambda rows: costs_for(controller, of(rows)))
        super().__init__(_NoModel(), _Recorded(trace), max_rows=rows, meter=meter)
        self._waiting.extend(self._text(prompt, controller) for prompt in range(trace.prompts))

    def serve(self) -> Replay:
        """Run until all requests are done; `plain_seconds` stay 0."""
        for _ in self.run():
            pass
        return self._sums

    def _text(self, prompt: int, controller: LengthController) -> Row:
        trace = self._trace
        context = [0] * int(trace.prompt_tokens[prompt])  # a trace does not hold them
        ends: IntArray = trace.ends[prompt, : int(trace.sizes[prompt])]
        positions = np.flatnonzero(ends <= trace.depth)
        eos = trace.draft_tokens[prompt, positions, ends[positions] - 1]
        sampling = Sampling(max_new_tokens=int(trace.budgets[prompt]))
        return _Text(
            id=prompt,
            request=Request(context, sampling, controller, RULES.make("standard")),
            context=context,
            prompt=len(context),
            eos=frozenset(eos.tolist()),
            seed=0,
            text=Detokenizer(None, context),
            stops=StopStrings(()),
            prediction=None,
            limit=UNLIMITED,
            rests_first=False,
            submitted=0.0,
            size=int(trace.sizes[prompt]),
            sampled=self._sampled[prompt],
        )

    def _refresh(self) -> None:
        super()._refresh()
        # The trace's tokens are looked up like greedy ones, but a sampled preview is drawn anew.
        self._guide.certain = not any(self._sampled[row.id] for row in self._rows)

    def _judge(self, proposal: Proposal, pieces: Pieces, wanted: Sequence[int]) -> Judgements:
        self.target.feed(pieces, wanted)
        trace, out = self._trace, Judgements()
        for i, row in enumerate(self._rows):
            if not wanted[i]:
                continue
            at, drafted = row.produced, len(proposal.tokens[i])
            accepted = min(drafted, int(trace.matches[row.id, at]))
            # Beyond the end of the text it is not read.
            following = int(trace.tokens[row.id, min(at + accepted, trace.tokens.shape[1] - 1)])
            prob = trace.accept_prob[row.id, at, :drafted].tolist()
            out[i] = Judged(accepted, following, prob)
        self._add(proposal, out)
        return out

    def _add(self, proposal: Proposal, judged: Judgements) -> None:
        """Count a round, and share its seconds."""
        rows, sums = [self._rows[i] for i in judged], self._sums
        prompt = np.array([row.id for row in rows], dtype=np.int64)
        drafted = np.array([len(proposal.tokens[i]) for i in judged], dtype=np.int64)
        accepted = np.minimum(drafted, self._trace.matches[prompt, [r.produced for r in rows]])
        stopped = np.array([int(proposal.stopped_by[i] or 0) for i in judged], dtype=np.int64)
        width = max(map(len, proposal.tokens))
        took = self._meter.costs(len(self._rows)).round_seconds(proposal.steps, width + 1)
        seconds = np.full(len(rows), took / max(len(rows), 1))
        steps = self.drafter.steps[prompt] - sums.steps[prompt]
        for total, value in (
            (sums.rounds, 1),
            (sums.drafted, drafted),
            (sums.accepted, accepted),
            (sums.steps, steps),
            (sums.capped, stopped == Stop.EXHAUSTED),
            (sums.seconds, seconds),
        ):
            total[prompt] += value
        if self._watch is not None and rows:
            at = np.array([row.produced for row in rows], dtype=np.int64)
            self._watch(Rounds(prompt, at, drafted, accepted, steps, stopped, seconds))

    def _complete(
        self, row: Row, reason: FinishReason, kept: Judged | Exception | None = None
    ) -> Completion:
        if isinstance(kept, Exception):
            raise kept
        return super()._complete(row, reason, kept)

    def _abandon(self, error: Exception) -> list[Event]:
        raise error
