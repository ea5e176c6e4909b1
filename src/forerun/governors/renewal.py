"""`auto`: draft on while the next token is worth more than its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import gt, mul
from typing import NamedTuple

from forerun.checks import Whole
from forerun.controllers.base import Chance, mechanism
from forerun.controllers.survival import Survival
from forerun.costs import Costs
from forerun.governors.base import Governor, Outcome, Plan, Policy, Seat

SECOND = 0.4
"""Chance that, where a drafted token is rejected, the draft's second choice is the target's: 0.46
in the shipped pair. Between 0.3 and 0.5 it moves the time by less than 0.2 %."""
FREE = 0.05  # tokens that a node may cost in the target's pass for trees to be grown
BUSH = 8  # nodes of the smallest tree that has more tokens a round than second choices
FORESEEN = 8  # tokens of a draft by which a row is weighed against others, and against a free one
SHARED = 0.8
"""Power of the rows for which a batch's rounds count if the reserve is `Seat.by_row`: by 1 good
streams of 16 rows lose 2 % to it, by 0 poor ones do."""
HELD_UP = 4.0  # times what costs say that a round is booked at most: the machine holds some up


class Pace(NamedTuple):
    """What the rows of a pass have gained and lost, in plain rounds and tokens of a row."""

    reserve: float  # what may be lost yet over all requests, the draft's reading of prompts, too
    budget: float  # what may be lost yet in the requests that run
    tokens: float = 0.0  # committed in the requests that run, less what came before
    time: float = 0.0  # that this takes by the costs


@dataclass(frozen=True)
class Renewal(Governor):
    """Draft another token while it is expected to commit more than its time does elsewhere.

    Args:
        policy: what forecasts acceptance.
        high: the most tokens per round, ≥ 1; more than 32 never pay where drafting takes time.
        interest: ε, share of every committed token that speculation may lose, ≥ 0.
        reserve: plain rounds that it may lose besides over all requests, and saves at most, ≥ 0.
        budget: plain rounds that it may lose in a request before it has gained any, ≥ 0.
        most: plain rounds that one round takes from that budget at most, ≥ 0.
        prior: plain rounds that a request's own rate is added to, > 0.
        carried: share of that rate that the next request starts from, in [0, 1].
        leaves: the most second choices per round that are judged beside drafted tokens, ≥ 0.
        tree: the most nodes of a tree per round, ≥ 0 (0: a chain), for drafters that can be run
            along branches; grown where tokens more take next to nothing in the target's pass.

    Reference: ours. Optimal stopping of a renewal-reward process, with λ by the iteration of
    Dinkelbach 1967, "On Nonlinear Fractional Programming".
    """

    policy: Policy = field(default_factory=Survival)
    interest: float = mechanism(0.01, off=0.0)
    reserve: float = mechanism(16.0, off=1e9)
    budget: float = mechanism(2.0, off=1e9)
    most: float = mechanism(1.0, off=1e9)
    prior: float = mechanism(4.0, off=1e9)
    carried: float = mechanism(0.5, off=0.0)
    leaves: Whole = 0
    tree: Whole = 0

    @property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"second"} if self.leaves else ())

    def start(self) -> Pace:
        return Pace(self.reserve, self.budget)

    def join(self, pace: Pace, share: float) -> Pace:
        """A request brings a budget of its own, less where much of the reserve is lost, so that
        those to come have theirs; its rate is not known."""
        kept = 1 - share * (1 - self.carried)
        left = min(max(pace.reserve / self.reserve, 0.0), 1.0) if self.reserve else 0.0
        budget = (1 - share) * pace.budget + share * left * self.budget
        return Pace(pace.reserve, budget, kept * pace.tokens, kept * pace.time)

    def rests(self, pace: Pace, costs: Costs) -> bool:
        """Where what may be lost does not even pay for a draft step."""
        look = costs.draft_seconds(1) + min(costs.cold, 0.0)
        return costs.retime == "plain" or min(pace.reserve, pace.budget) * costs.plain < look

    def reads(self, pace: Pace, costs: Costs, seat: Seat, rows: int) -> bool:
        """If the text is long enough to earn it, and the reserve pays for it."""
        reading = seat.unread * costs.reading
        return reading <= min(seat.left / rows, pace.reserve) * costs.plain

    def open(
        self, pace: Pace, costs: Costs, seats: Mapping[int, Seat], rows: int, paid: int
    ) -> _Weighed:
        """Draft where what may be lost pays for a look at a token."""
        return _Weighed(self, pace, costs, seats, rows, paid)

    def observe(self, pace: Pace, costs: Costs, plan: Plan | None, outcome: Outcome) -> Pace:
        """Book what the round gained or lost, and the interest."""
        reading = outcome.reading / costs.plain
        if not outcome.committed:
            return pace._replace(reserve=pace.reserve - reading)
        rows = len(outcome.committed)
        tokens = sum(outcome.committed.values()) / rows
        judged = [n + outcome.leaves.get(i, 0) for i, n in outcome.judged.items()]
        width, tree = costs.width(judged, rows), bool(outcome.leaves)
        time = took = costs.round_seconds(outcome.steps, width, tree) / costs.plain
        if outcome.seconds is not None and (outcome.steps or width > 1):
            took = min(outcome.seconds / costs.plain, HELD_UP * time)
        gain = (1 + self.interest) * tokens - took
        booked = gain * plan.shares if isinstance(plan, _Weighed) else gain
        return Pace(
            min(pace.reserve + booked - reading, self.reserve),
            max(pace.budget + max(gain, -self.most), 0.0),
            pace.tokens + tokens,
            pace.time + time,
        )

    def rate(self, pace: Pace, rows: int = 1) -> float:
        """λ: tokens per time, that of plain decoding at least."""
        prior = self.prior / rows  # a round of a batch says as much as so many rounds of a row
        return max((prior + pace.tokens) / (prior + pace.time), 1.0)


class _Weighed(Plan):
    """One round: a row's gain is a chance; the price of a second is λ, of all rows it holds up."""

    def __init__(
        self, by: Renewal, pace: Pace, costs: Costs, seats: Mapping[int, Seat], rows: int, paid: int
    ) -> None:
        first, *_ = seats.values()
        self._by, self._costs, self._seats, self._rows, self._paid = by, costs, seats, rows, paid
        self._price = by.rate(pace, rows) * rows / costs.plain
        self.shares = rows**SHARED if first.by_row else 1.0  # plain rounds of the reserve in one
        self._budget = min(pace.reserve / self.shares, pace.budget) * costs.plain
        self._apart = costs.packed and rows > 1  # each row's tokens make the pass wider
        rides = costs.prefill is not None and any(seat.rides for seat in seats.values())
        judging = (costs.widening,) if rides else costs.judging
        if paid and not self._apart:
            judging = (*[0.0] * paid, *(judging[paid:] or judging[-1:]))
        self._judging = judging  # by token what it adds to the pass; each beyond adds the last
        judged = costs.retime == "judged" and self._budget >= costs.seconds(1) - costs.plain
        self._trims = rows == 1 and first.trims and not judged  # tokens not worth their place
        self._surplus, self._trimmed = 0.0, 0
        """Tokens by which judging the whole draft beats judging the best beginning, and how many
        that leaves out."""
        own = {i: 1 + sum(self._expected(i, FORESEEN)) for i in seats}  # tokens a round, of each
        mean = sum(own.values()) / len(own)
        self._worth = {i: mean / tokens for i, tokens in own.items()}
        """What a token of each row counts for: of a row that keeps more it saves fewer rounds, and
        what rows that keep much draft makes the rounds of all others longer."""
        self._kept: dict[int, list[float]] = {i: [] for i in seats}  # so many first tokens all are
        self._tokens = 0  # drafted so far
        step, reserve = self._step(0), pace.reserve - self._step(0) / costs.plain
        look = step + self._added(1, len(seats))
        if self._trims and not first.blind:
            look = step + costs.cold * (not rides)
        self.most = dict.fromkeys(seats, 0)
        if look <= self._budget and costs.retime != "plain":
            for i, seat in seats.items():  # as many as the reserve pays the drafter's reading of
                if by.reads(pace._replace(reserve=reserve), costs, seat, rows):
                    reserve -= seat.unread * costs.reading / costs.plain
                    self.most[i] = by.high
        begun = [i for i, most in self.most.items() if most]
        self._loss = step + self._added(1, len(begun))  # seconds of the round if nothing is kept
        if begun and first.blind:
            self._foresee(begun)

    def _added(self, tokens: int, rows: int = 1) -> float:
        """Seconds by which the n-th token of so many rows makes the pass longer."""
        seconds = self._judging[min(tokens, len(self._judging)) - 1]
        return seconds * rows / self._rows if self._apart else seconds

    def _step(self, tokens: int) -> float:
        """Seconds of the draft step behind so many tokens."""
        costs = self._costs
        first = not (tokens % costs.ahead if costs.ahead else tokens)
        return (costs.draft + costs.first * first) * (tokens >= self._paid)

    def _best(self, drafts: Sequence[Sequence[float]], step: float) -> tuple[int, float]:
        """The length that is worth most net of its time, as far as the budget pays for what it may
        lose, and what it is worth in tokens, of drafts whose first, first two, … tokens are all
        kept with these chances; a token of all takes a `step`."""
        count, best, worth, loss = 0, 0.0, 0.0, 0.0
        for n, chances in enumerate(zip(*drafts, strict=True), 1):
            dear, kept = self._price * self._added(n), sum(chances)
            gain = sum(max(c - dear, 0.0) for c in chances) if self._apart else kept - dear
            worth = worth + gain - self._price * step
            loss = loss + step + self._added(n, len(drafts))
            if (1 - kept / len(drafts)) * loss > self._budget:
                break
            if worth > best:
                count, best = n, worth
        return count, best

    def _expected(self, seat: int, tokens: int) -> list[float]:
        """Chances that so many first tokens of a draft are kept, before it is seen."""
        first, later = self._seats[seat].outlook
        return [first * later**n for n in range(tokens)]

    def _foresee(self, begun: Sequence[int]) -> None:
        """The lengths of drafts that are not seen until they are judged, as they pay together, or
        a token to learn from."""
        drafts = [self._expected(i, self._by.high) for i in begun]
        count, _ = self._best(drafts, self._costs.draft)
        dear = [self._price * self._added(n) * self._apart for n in range(1, count + 1)]
        for i, kept in zip(begun, drafts, strict=True):
            self.most[i] = max(sum(map(gt, kept, dear)), 1)

    def free(self, seat: int, kept: Sequence[float]) -> int | None:
        """The best beginning, unless the model's is worth more, as far as its outlook says, where
        all rows share its steps."""
        count, own = self._best([kept], self._costs.free)
        step = self._costs.draft / len(self._seats)
        _, model = self._best([self._expected(seat, FORESEEN)], step)
        return None if model > own else count

    def go(self, chances: Mapping[int, Chance]) -> list[int]:
        """The seats that want another token, if that is worth its time to them in sum, alone or
        with those behind it, as where it pays for a level of the pass; and if the budget pays for
        what it may lose, by how likely that is."""
        self._tokens += 1
        dear = self._price * self._added(self._tokens)
        following = self._price * self._added(self._tokens + 1) if self._apart else 0.0
        worth = 0.0
        for i, chance in chances.items():
            self._kept[i].append(chance.kept)
            if self._trims:
                own = self._surplus + chance.kept - dear
                self._trimmed = self._trimmed + 1 if own < 0 else 0
                self._surplus = worth = min(own, 0.0)
        going = [i for i, c in chances.items() if self._worth[i] * c.kept * c.next > following]
        kept, later = [chances[i].kept for i in going], [chances[i].next for i in going]
        gains = [self._worth[i] * chances[i].kept for i in going]
        loss = self._loss + self._step(self._tokens) + self._added(self._tokens + 1, len(going))
        if going and (1 - sum(kept) / len(going)) * loss <= self._budget:
            for n in range(self._tokens, max(self._tokens, len(self._costs.passes)) + 1):
                gains = list(map(mul, gains, later))
                time = self._step(n) + self._added(n + 1, len(going))
                worth += sum(gains) - self._price * time
                if worth > 0:
                    self._loss = loss
                    return going
        return []

    @property
    def tree(self) -> int:  # type: ignore[override]
        """As many nodes as are next to free, if these are enough for a tree."""
        for nodes in range(most := self._by.tree, min(most, BUSH) - 1, -1):
            if self._price * sum(map(self._added, range(1, nodes + 1))) <= FREE * nodes:
                return nodes
        return 0

    def nodes(
        self, drafted: Sequence[int], grown: Mapping[int, Sequence[float]]
    ) -> dict[int, list[int]]:
        """Where a rejection is likeliest, as many as are worth their places in the target's pass,
        if together they are worth what a tree takes."""
        widest, total, out = max(self._paid, *(drafted[i] for i in self._kept)), 0.0, {}
        for i, chances in self._kept.items():
            hits, tokens, most = grown.get(i), drafted[i], self._by.tree
            if hits is None:
                hits = [SECOND * (a - b) for a, b in pairwise([1.0, *chances[:tokens]])]
                most = self._by.leaves
            order = sorted(range(len(hits)), key=hits.__getitem__, reverse=True)[:most]
            worth = [0.0]
            for width, place in enumerate(order, tokens + 1):
                dear = self._added(width) if self._apart or width > widest else 0.0
                worth.append(worth[-1] + hits[place] - self._price * dear)
            best = max(worth)
            total += best
            out[i] = order[: worth.index(best)]
        return out if total > self._price * self._costs.tree else {}

    def trim(self, seat: int) -> int:
        """Those that are not worth their place in the target's pass."""
        return self._trimmed
