"""`auto`: draft on while the next token is worth more than its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, zip_longest
from math import inf
from operator import itemgetter, mul
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


class _Places(NamedTuple):
    """Drafted tokens that are judged together or not at all, and make the pass wider by one."""

    worth: float  # of them in tokens
    kept: float  # chance of one
    steps: int  # of the model until there
    seats: Sequence[int]  # whose they are


class _Weighed(Plan):
    """One round: a row's gain is a chance; the price of a second is λ, of all rows it holds up.

    A pass gets longer by its *width*: drafted tokens to judge, of all rows where it takes them
    packed, else of the longest. Beyond a graph's size the first pays for all up to the next.
    """

    def __init__(
        self, by: Renewal, pace: Pace, costs: Costs, seats: Mapping[int, Seat], rows: int, paid: int
    ) -> None:
        first, *_ = seats.values()
        self._by, self._costs, self._seats, self._paid = by, costs, seats, paid
        self._price = by.rate(pace, rows) * rows / costs.plain
        self.shares = rows**SHARED if first.by_row else 1.0  # plain rounds of the reserve in one
        self._budget = min(pace.reserve / self.shares, pace.budget) * costs.plain
        self._apart = costs.packed and rows > 1  # each row's tokens make the pass wider
        self._rides = costs.prefill is not None and any(seat.rides for seat in seats.values())
        self._known: Sequence[float] = (0.0,) if self._rides else costs.judging
        """Seconds that 0, 1, … tokens add to the pass; each beyond the last adds `widening`."""
        if paid and not self._apart:
            most = range(paid, max(paid + 1, len(self._known)))
            self._known = [0.0] * paid + [self._judging(n) - self._judging(paid) for n in most]
        self._worth = dict.fromkeys(seats, 1.0)
        if len(seats) > 1:
            own = {i: 1 + sum(self._expected(i)) for i in seats}  # tokens a round, of each
            mean = sum(own.values()) / len(own)
            self._worth = {i: mean / tokens for i, tokens in own.items()}
        """What a token of each row counts for: of a row that keeps more it saves fewer rounds, and
        what rows that keep much draft makes the rounds of all others longer."""
        self._kept: dict[int, list[float]] = {i: [] for i in seats}  # so many first tokens all are
        self._tokens = self._width = 0  # steps of the draft so far, and what they are of the pass
        step, reserve = self._step(0), pace.reserve - self._step(0) / costs.plain
        judged = costs.retime == "judged" and self._budget >= step + self._added(1)
        trims = not judged and (rows == 1 or self._apart)
        self._trimming = [i for i, seat in seats.items() if trims and seat.trims]
        """Whose tokens that are not worth their place are left out."""
        self._surplus, self._left_out = 0.0, dict.fromkeys(seats, 0)
        """Tokens by which judging all that is drafted beats judging the best beginnings, ≤ 0, and
        how many these leave out."""
        look = step + self._added(len(seats))
        if rows == 1 and self._trimming and not first.blind:
            look = step + costs.cold * (not self._rides)
        self.most = dict.fromkeys(seats, 0)
        if look <= self._budget and costs.retime != "plain":
            for i, seat in seats.items():  # as many as the reserve pays the drafter's reading of
                if by.reads(pace._replace(reserve=reserve), costs, seat, rows):
                    reserve -= seat.unread * costs.reading / costs.plain
                    self.most[i] = by.high
        begun = [i for i, most in self.most.items() if most]
        self._loss = step + self._added(len(begun))  # seconds of the round if nothing is kept
        if begun and first.blind:
            foreseen = self._together({i: self._expected(i, by.high) for i in begun})
            _, best = self._best(foreseen)
            self.most |= {i: max(best[i], 1) for i in begun}

    def _added(self, rows: int) -> float:
        """Seconds by which a token more of so many rows makes the pass longer."""
        wider = rows if self._apart else min(rows, 1)
        return self._judging(self._width + wider) - self._judging(self._width)

    def _judging(self, width: int) -> float:
        """Seconds that so many tokens add to the pass."""
        if width < len(self._known):
            return self._known[width]
        return self._known[-1] + (width + 1 - len(self._known)) * self._costs.widening

    def _step(self, tokens: int) -> float:
        """Seconds of the draft step behind so many tokens."""
        costs = self._costs
        first = not (tokens % costs.ahead if costs.ahead else tokens)
        return (costs.draft + costs.first * first) * (tokens >= self._paid)

    def _expected(self, seat: int, tokens: int = FORESEEN) -> list[float]:
        """Chances that so many first tokens of a draft are kept, before it is seen."""
        first, later = self._seats[seat].outlook
        return [first * later**n for n in range(tokens)]

    def _together(
        self, drafts: Mapping[int, Sequence[float]], free: Collection[int] = ()
    ) -> list[_Places]:
        """Drafts by what they are worth in the pass: likeliest tokens first where each has a place
        of its own, else those at the same depth; in `free` seats they take no step of a model."""
        rows = [
            [
                _Places(self._worth[i] * kept, kept, depth * (i not in free), (i,))
                for depth, kept in enumerate(chances, 1)
            ]
            for i, chances in drafts.items()
        ]
        if self._apart or len(rows) == 1:
            return sorted(chain(*rows), key=itemgetter(0), reverse=True)
        depths = ([place for place in same if place] for same in zip_longest(*rows))
        return [
            _Places(
                sum(place.worth for place in same),
                sum(place.kept for place in same) / len(same),
                max(place.steps for place in same),
                [seat for place in same for seat in place.seats],
            )
            for same in depths
        ]

    def _best(self, places: Sequence[_Places]) -> tuple[float, Counter[int]]:
        """Those that are worth most net of their time, as far as the budget pays for what it may
        lose: their worth in tokens, and how many by seat."""
        count, best, tokens, steps, wide = 0, 0.0, 0.0, 0, self._judging(self._width)
        for n, place in enumerate(places, 1):
            steps, tokens = max(steps, place.steps), tokens + place.worth
            time = steps * self._costs.draft + self._judging(self._width + n) - wide
            if (1 - place.kept) * time > self._budget:
                break
            if (worth := tokens - self._price * time) > best:
                count, best = n, worth
        return best, Counter([seat for place in places[:count] for seat in place.seats])

    def free(self, drafts: Mapping[int, Sequence[float]]) -> dict[int, int]:
        """The best beginnings together, unless the model's are worth more as far as outlooks say,
        of all seats or of those of which it expects more."""
        model = {i: self._expected(i) for i, most in self.most.items() if most}
        likelier = {i: own for i, own in drafts.items() if sum(own) >= sum(model[i])}
        plans = [
            (*self._best(self._together({**beside, **own}, own)), own)
            for beside, own in (({}, drafts), (model, drafts), (model, likelier), (model, {}))
        ]
        _, best, own = max(plans, key=itemgetter(0))
        counts = {i: best[i] for i in own}
        self._width = sum(counts.values()) if self._apart else max(counts.values(), default=0)
        return counts

    def go(self, chances: Mapping[int, Chance]) -> list[int]:
        """The seats that want another token, those for whom it is worth most, if it is worth its
        time to them in sum, alone or with those behind it, as where it pays for a level of the
        pass; and if the budget pays for what it may lose, by how likely that is."""
        dear = self._price * self._added(1)
        self._tokens += 1
        self._width = self._width + len(chances) if self._apart else max(self._width, self._tokens)
        for i, chance in chances.items():
            self._kept[i].append(chance.kept)
            if i in self._trimming and not self._apart:
                self._surplus += chance.kept - dear
                self._left_out[i] = self._left_out[i] + 1 if self._surplus < 0 else 0
                self._surplus = min(self._surplus, 0.0)
        gains = {i: self._worth[i] * chance.kept * chance.next for i, chance in chances.items()}
        sets = [[*chances]]
        if self._apart:  # those whose next token is worth its place, then all
            self._look()
            ranked = sorted(gains, key=gains.__getitem__, reverse=True)
            net = self._net([gains[i] for i in ranked], self._width)
            sets.insert(0, ranked[: net.index(max(net))])
        for going in filter(None, sets):
            kept, later = [chances[i].kept for i in going], [chances[i].next for i in going]
            loss = self._loss + self._step(self._tokens) + self._added(len(going))
            own = [gains[i] for i in going]
            if (1 - sum(kept) / len(going)) * loss <= self._budget and self._pays(own, later):
                self._loss = loss
                return going
        return []

    def _net(self, worths: Iterable[float], width: int) -> list[float]:
        """What the first 0, 1, … of these tokens are worth net of their places behind others."""
        totals = enumerate(accumulate(worths, initial=0.0))
        begin = self._judging(width)
        return [total - self._price * (self._judging(width + n) - begin) for n, total in totals]

    def _look(self) -> None:
        """Note what drafts are worth beside the best beginnings of all rows."""
        drafted = {i: [self._worth[i] * kept for kept in self._kept[i]] for i in self._trimming}
        worths = sorted(chain(*drafted.values()), reverse=True)
        net = self._net(worths, self._width - len(worths))
        count = net.index(max(net))
        self._surplus, least = net[-1] - net[count], [inf, *worths][count]
        for i, own in drafted.items():
            self._left_out[i] = sum(worth < least for worth in own)

    def _pays(self, gains: Sequence[float], later: Sequence[float]) -> bool:
        """Whether another token of each row, or so many others up to behind the levels of passes,
        is worth its time."""
        tokens, width, wider = self._tokens, self._width, len(gains) if self._apart else 1
        worth, taken = self._surplus, self._judging(width)
        while True:
            width, before = width + wider, taken
            taken = self._judging(width)
            worth += sum(gains) - self._price * (self._step(tokens) + taken - before)
            if worth > 0:
                return True
            if width >= len(self._known):
                return False
            tokens, gains = tokens + 1, list(map(mul, gains, later))

    @property
    def tree(self) -> int:  # type: ignore[override]
        """As many nodes as are next to free, if these are enough for a tree."""
        for nodes in range(most := self._by.tree, min(most, BUSH) - 1, -1):
            if self._price * self._judging(nodes) <= FREE * nodes:
                return nodes
        return 0

    def nodes(
        self, drafted: Sequence[int], grown: Mapping[int, Sequence[float]]
    ) -> dict[int, list[int]]:
        """Where a rejection is likeliest, as many as are worth their places in the target's pass,
        if together they are worth what a tree takes."""
        widest, orders, hits = max(self._paid, *(drafted[i] for i in self._kept)), {}, {}
        spare = {i: 0 if self._apart else widest - drafted[i] for i in self._kept}
        for i, chances in self._kept.items():
            own, most = grown.get(i), self._by.tree
            if own is None:
                own = [SECOND * (a - b) for a, b in pairwise([1.0, *chances[: drafted[i]]])]
                most = self._by.leaves
            orders[i] = sorted(range(len(own)), key=own.__getitem__, reverse=True)[:most]
            hits[i] = [own[place] for place in orders[i]]
        self._width, self._budget = sum(drafted) if self._apart else widest, inf
        behind = {i: own[spare[i] :] for i, own in hits.items()}
        total, best = self._best(self._together(behind, hits))
        total += sum(sum(own[: spare[i]]) for i, own in hits.items())
        pays = total > self._price * self._costs.tree
        return {i: order[: spare[i] + best[i]] for i, order in orders.items()} if pays else {}

    def trim(self, seat: int) -> int:
        """Those that are not worth their place in the target's pass."""
        return self._left_out[seat]
