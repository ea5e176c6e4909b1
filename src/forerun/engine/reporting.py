"""The last step of a round: what is said of it, per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.costs import Costs
from forerun.drafters.base import Proposal
from forerun.engine.judging import RowVerdict
from forerun.engine.meter import Lap
from forerun.engine.results import Completion, Event, Round
from forerun.engine.row import Row
from forerun.types import Stop

BEHIND = 8  # tokens that a step may feed on top of the newest one and still count as a step
NOTHING = Round(0, 0, 0, Stop.LIMIT, 0.0, 0.0, 0.0)  # of a request that ended before its first


@dataclass
class Pass:
    """What one round feeds the target, and what became of it. Lists are per row."""

    began: float
    upto: list[int]  # tokens of each row's context that are covered afterwards, its draft left out
    ready: list[bool]  # whether that is all of it: then something is committed
    read_tokens: int  # tokens of prompts that it reads, but for each row's newest
    drafter_before: float
    target_before: float
    graphs: int  # what models had compiled or captured before; see `Executor.graphs`
    counters: list[dict[str, int]]
    costs: Costs  # what it is expected to cost
    unread: list[int] = field(default_factory=list)  # see `Drafter.unread`; of rows that may draft
    along: tuple[float, int] = 0.0, 0  # seconds in which the drafter read along, and tokens
    drafting: float = 0.0  # seconds until the target's pass, and
    verifying: float = 0.0  # of it


def lap_of(passed: Pass, proposal: Proposal, now: float, graphs: int) -> Lap:
    """The clock of a round that has just ended, with so many graphs."""
    rows, steps, first = len(passed.upto), proposal.steps, proposal.first_seconds
    free, (reading, tokens) = proposal.free_seconds, passed.along
    behind = [n - 1 for i, n in enumerate(passed.unread) if n and i not in proposal.free]
    if steps and max(behind, default=0) > BEHIND:  # what its first step took is no step's
        steps, first, reading, tokens = steps - 1, 0.0, reading + first, tokens + sum(behind)
    drafting = passed.drafting - reading - free if steps else 0.0
    return Lap(
        rows=rows, width=passed.costs.width(proposal.widths, rows), tree=bool(proposal.nodes),
        steps=steps, draft_seconds=drafting, first_step_seconds=first,
        free_steps=proposal.free_steps, free_seconds=free, verify_seconds=passed.verifying,
        other_seconds=now - passed.began - drafting - free - reading - passed.verifying,
        reading_seconds=reading, reading_tokens=tokens,
        read_tokens=passed.read_tokens, compiled=graphs > passed.graphs,
    )  # fmt: skip


def round_of(
    row: Row, i: int, passed: Pass, proposal: Proposal, kept: RowVerdict, committed: int,
    seconds: tuple[float, float, float], counters: Mapping[str, int],
) -> Round:  # fmt: skip
    """The round of row `i`, which committed so many tokens."""
    drafted, drift = len(proposal.tokens[i]), None
    if not row.request.rule.lossless:
        # What was accepted and the first rejection; bonus and plain tokens add none.
        drift = (kept.drift or [])[:committed]
        row.drift = (row.drift or 0.0) + sum(drift)
    counted = {k: n - passed.counters[i].get(k, 0) for k, n in counters.items()}
    if i in proposal.predicted:
        counted["predicted"] = drafted
    if i in proposal.forced:
        counted["forced"] = proposal.forced[i]
    if i in proposal.nodes:
        counted["leaves"], counted["leaves_kept"] = len(proposal.nodes[i]), len(kept.path)
    drafting, verifying, other = seconds
    return Round(
        drafted, kept.accepted, committed, proposal.stopped_by[i] or Stop.LIMIT, drafting,
        verify_seconds=verifying if row.rounds else 0.0, other_seconds=other, drift=drift,
        counters=counted,
    )  # fmt: skip


def event(row: Row, drafted: list[int], first: int, last: int, done: Completion | None) -> Event:
    """What became of a row: its newest round, and its new tokens from `first` to `last`."""
    return Event(
        row.id,
        drafted,
        row.rounds[-1] if row.rounds else NOTHING,
        lambda: row.pieces(last)[first:last],
        done,
        row.logprobs[first:last] if row.request.logprobs is not None else [],
        row.queued,
    )
