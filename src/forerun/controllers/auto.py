"""`auto`: draft on while the next token is worth more than its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple

from forerun.checks import between, whole
from forerun.controllers import auto_survival as survival
from forerun.controllers.auto_survival import LogOdds, Survival
from forerun.controllers.auto_table import Table
from forerun.controllers.base import LengthController, Opening
from forerun.controllers.elementwise import (
    anywhere,
    clip,
    interpolated,
    maximum,
    minimum,
    remembered,
    select,
    sigmoid,
    where,
)
from forerun.costs import Costs
from forerun.errors import require
from forerun.types import Round, Stop, Token

PRIOR_ROUNDS = 12.0
"""Rounds of the expected tokens and seconds that the observed ones are added to."""
FADE = 0.95
"""Share of what was observed that still counts a round later."""
PROBE_INTERVAL, LONGEST_PROBE_INTERVAL = 8.0, 256.0
"""Plain rounds before a probe, per plain round that a useless probe costs: at first and at most."""
CARRIED_INTERVAL = 0.125
"""Share of it that the next request starts from, unless the draft says nothing of its tokens, or
seems to be of no use."""
MOST_TRYING = 2
"""Rows that share a pass up to which a request begins with a probe: of more, the draft would first
read all their prompts."""
PAYS_READING = 4
"""Tokens kept of a request that make up for reading its prompt."""
MOST_IN_VAIN = 32.0
"""Most of the interval before the first probe of a request; it grows by `PROBE_INTERVAL` with each
request that drafted in vain after another."""
RARE_PROBE_INTERVAL = 128.0
"""From such an interval on a probe's token is judged whatever it is."""
SLOPE = 0.02
"""v if `cost` is given and `slope` is not."""
CARRIED = 0.5
"""Share of a request's corrections that the next one starts from."""
NO_TIME = 1e-6
"""Least share of a plain token's seconds that is left when a drafter's reading is taken off."""
# numpy is slow with enumerations
_LIMIT, _CONFIDENCE, _DIFFICULT = int(Stop.LIMIT), int(Stop.CONFIDENCE), int(Stop.DIFFICULT)


class Drafts(NamedTuple):
    """What rounds with a draft took and brought, fading."""

    judged: float = 0.0
    """Rounds whose draft made the target's pass wider, and"""
    judged_tokens: float = 0.0
    """tokens judged there."""
    free: float = 0.0
    """Rounds whose draft did not, for it was thrown away; and"""
    free_steps: float = 0.0
    """draft steps of these, and those of the others that gave no token to judge."""
    committed: float = 0.0
    """Tokens that all of them committed."""


class AutoState(NamedTuple):
    """State of `Auto`."""

    learned: Survival = Survival()
    """How tokens are kept."""
    rested: int = 0
    """Plain rounds by choice since the newest draft that taught something."""
    interval: float = PROBE_INTERVAL
    """Plain rounds before the next probe, per plain round that a useless one costs."""
    drafts: Drafts = Drafts()
    """What drafting took and brought."""
    table: Table = Table()
    """Tokens the draft errs at."""
    begun: bool = False
    """Whether this request had a round."""
    drafting: bool = False
    """Whether anything was drafted in it: the drafter has read its prompt."""
    accepted: float = 0.0
    """Tokens of this request that were kept."""
    in_vain: float = 0.0
    """Requests in a row that drafted and had next to nothing kept."""


class Terms(NamedTuple):
    """What a round's tokens are weighed by. A memo is these and the drafted tokens, if any."""

    by: LogOdds
    """The log-odds in force."""
    useful: float
    """Probability that the draft is of use at all, `1 − u`."""
    rate: float
    """λ, the tokens per second of the best policy."""
    judging: tuple[float, ...] = (0.0,)
    """Seconds that each token adds to the target's pass; 0 where none may be left out."""


Memo = tuple[Terms, survival.Drafted | None]
_NO_TABLE = Table(0.0, 0.0)


@dataclass(frozen=True)
class Auto(LengthController):
    """Draft another token while it is expected to commit more than its time does elsewhere.

    Args:
        cost: c, one target pass over one draft step, > 0, or none to go by what is measured (the
            default). Given, nothing is carried from one request to the next and each decides for
            itself, which makes sampled texts repeatable.
        slope: v, what each further token to judge adds to a target pass, in target passes, ≥ 0, or
            none to go by what is measured (0.02 if `cost` is given).
        high: the most tokens per round, ≥ 1. 32, beyond what pays for any drafter that costs time.

    Reference: ours. Optimal stopping of a renewal-reward process, with λ by the iteration of
    Dinkelbach 1967, "On Nonlinear Fractional Programming".

    >>> controller, costs = Auto(), Costs.synthetic(5)
    >>> state = controller.start()
    >>> begun = controller.open(state, costs).memo
    >>> for margin in (6.0, 0.1):
    ...     token = Token(logit_margin=margin, chosen=0.5)
    ...     controller.keep_going(state, costs, controller.fold(state, begun, token))
    True
    False
    """

    cost: float | None = None
    slope: float | None = None
    high: int = 32

    summary: ClassVar[str] = "draft on while the next token is worth more than its time"
    paper: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.cost is not None:
            between("cost", self.cost, 0, 1e9)
            require(self.cost > 0, "cost", self.cost, "above 0: a draft step costs something")
        if self.slope is not None:
            between("slope", self.slope, 0, 1000)
        whole("high", self.high, 1)

    @property
    def signals(self) -> frozenset[str]:
        """The margin, the probability of the drafted token, and which it is after which."""
        return self.certain_signals | {"chosen"}

    @property
    def certain_signals(self) -> frozenset[str]:
        """All but the probability, for which the logits would have to be summed up."""
        return frozenset({"logit_margin", "id", "previous"})

    @property
    def asks(self) -> bool:
        """Always."""
        return True

    @property
    def weighs(self) -> bool:
        """Always."""
        return True

    @cached_property
    def own_costs(self) -> Costs | None:
        """Those of `cost`."""
        if self.cost is None:
            return None
        return Costs.synthetic(self.cost, SLOPE if self.slope is None else self.slope)

    @property
    def carries(self) -> bool:
        """Unless `cost` is given."""
        return self.cost is None

    def start(self) -> AutoState:
        """The prior."""
        return AutoState()

    def carry(self, state: AutoState) -> AutoState:
        """Corrections fade, and the next request begins with a probe, unless several in a row
        drafted in vain."""
        learned = survival.carried(state.learned, CARRIED)
        sooner = maximum(CARRIED_INTERVAL * state.interval, PROBE_INTERVAL)
        in_vain = where(state.accepted < PAYS_READING, state.in_vain + 1, 0.0)
        return AutoState(
            learned,
            state.rested,
            where((learned.useless >= 0) | (learned.blind[1] > 0), state.interval, sooner),
            Drafts(*(CARRIED * value for value in state.drafts)),
            state.table,
            in_vain=where(state.drafting, in_vain, state.in_vain),
        )

    def begin(self, state: AutoState, certain: bool) -> AutoState:
        """With the prior for such tokens."""
        return state._replace(learned=state.learned._replace(certain=certain))

    def limit(self, state: AutoState, costs: Costs) -> int:
        """The most tokens per round; 0 where plain decoding is faster."""
        return self.open(state, costs).alone

    def open(self, state: AutoState, costs: Costs) -> Opening:
        """What a draft is expected to gain, and the price of its tokens."""
        return self._open(state, costs, looks=False)

    def look(self, state: AutoState, costs: Costs) -> Opening:
        """The same where the draft may be thrown away."""
        return self._open(state, costs, looks=True)

    def _open(self, state: AutoState, costs: Costs, looks: bool) -> Opening:
        asleep = state._replace(rested=0, table=_NO_TABLE)  # the same for as long as it rests
        opening, rest = self._expected(asleep, self._in_force(costs), looks)
        worth, left = opening.worth, rest - state.rested
        if not anywhere(worth < 0):
            return opening
        rests = (worth < 0) & (left > 0)
        nearer = where(rests, worth * left / (rest + 1), 0.0)  # from 0 on a probe is due
        return opening._replace(
            worth=where(worth < 0, nearer, worth),
            idle=where(worth < 0, nearer, opening.idle),
            due=where(rests, left, math.inf),
        )

    def fold(self, state: AutoState, memo: Memo, token: Token) -> Memo:
        """One more drafted token."""
        terms, drafted = memo
        longer = survival.extended(drafted, terms.by, state.table, token)
        if longer is None:
            return terms, None
        price = terms.rate * terms.judging[min(longer.tokens, len(terms.judging)) - 1]
        return terms, survival.weighed(longer, terms.useful, price)

    def worth(self, state: AutoState, costs: Costs, memo: Memo) -> float:
        """The chance that the next token is kept, less its price; where it pays for a level of the
        pass, with as many of the tokens behind it as is best."""
        (by, useful, rate, _), drafted = memo
        if drafted is None:
            return math.inf
        costs, kept = self._in_force(costs), survival.next_kept(drafted, by)
        tokens, gain = drafted.tokens, useful * drafted.survival * kept

        def step(drafted: int) -> float:
            seconds = costs.next(drafted)
            return where(state.begun, seconds, costs.further) if costs.prefill else seconds

        worth = best = drafted.lead + gain - rate * step(tokens)
        levels = len(costs.rounds)
        while tokens < self.high and anywhere(best <= 0):
            tokens, gain = tokens + 1, gain * kept
            more = gain - rate * step(tokens)
            if tokens >= levels and not anywhere(more > 0):
                break
            worth = worth + more
            best = where(best > 0, best, maximum(best, worth))
        return best

    def left_out(self, state: AutoState, costs: Costs, memo: Memo) -> int:
        """Those that are not worth their place in the target's pass; none of a draft that seems of
        no use, or of a rare probe: only what is judged can tell that it is better than it says."""
        drafted = memo[1]
        if drafted is None:
            return 0
        rare = (state.rested > 0) & (state.interval >= RARE_PROBE_INTERVAL)
        left_out: int = where(rare | (state.learned.useless >= 0), 0, drafted.left_out)
        return left_out

    def observe(self, state: AutoState, costs: Costs, round: Round) -> AutoState:
        """Learn from the tokens that were judged."""
        width = maximum(round.longest, round.drafted)
        chose_plain = (round.drafted == 0) & (round.stopped_by == _LIMIT)
        rested = state.rested + chose_plain * round.repeated
        begun = state.begun | True
        failed = round.stopped_by == _DIFFICULT  # a step that gave no token
        looked = (round.left_out > 0) & (round.stopped_by == _CONFIDENCE)
        looked = (width == 0) & (looked | failed)
        if not anywhere((width > 0) | looked):
            return state._replace(rested=rested, begun=begun)
        learn, mine = round.teaches | round.difficult, self._in_force(costs)
        # A draft that is judged with the prompt rides along: no later one can.
        rides = (mine.prefill > state.begun) & (width > 0)
        # Or others drafted, and this request had no room.
        paid = (learn | (width > round.drafted) | looked) & (rides < 1)
        free = looked | rides
        took = where(free, mine.plain + width * mine.draft, _seconds(mine, maximum(width, 1)))
        took = took + failed * mine.draft
        learned, table = survival.judged(state.learned, state.table, round)
        longer = minimum(2 * state.interval, LONGEST_PROBE_INTERVAL)
        # A draft right after a probe may only be there to be timed.
        useless = (round.accepted == 0) | (mine.batch > 1)  # unless it pays
        interval = where(useless & (state.rested > 0), longer, state.interval)
        pays = learn & ((round.accepted + 1) * mine.plain >= took)
        steps, judged = width + round.left_out + failed, where(free, 0, width)
        newest = judged > 0, judged, free, steps - judged, round.accepted + 1
        drafts = [FADE * old + new for old, new in zip(state.drafts, newest, strict=True)]
        return AutoState(
            select(learn, learned, state.learned),
            where(learn | looked, 0, rested),
            where(pays, PROBE_INTERVAL, where(learn | looked, interval, state.interval)),
            select(paid, Drafts(*drafts), state.drafts),
            table,
            begun,
            state.drafting | (width > 0) | looked,
            state.accepted + round.accepted,
            state.in_vain,
        )

    @remembered
    def _expected(self, state: AutoState, costs: Costs, looks: bool) -> tuple[Opening, float]:
        """What a round's draft is expected to gain, and plain rounds before a probe if it loses.

        Args:
            state: of which `rested` and `table` are not read.
            costs: in force.
            looks: whether the draft may be thrown away after a look.
        """
        plain, learned = self._plain(costs), state.learned
        by, useful = survival.in_force(learned), sigmoid(-learned.useless)
        best = self._best_fixed(*survival.typical(learned, by, useful), costs, learned.foreseen)
        length, tokens, seconds = best
        drafts = state.drafts
        mean = maximum(drafts.judged_tokens, NO_TIME) / maximum(drafts.judged, NO_TIME)
        took = drafts.judged * _seconds(costs, mean) + drafts.free_steps * costs.draft
        took = took + drafts.free * (costs.plain + costs.cold + costs.first)
        rounds = PRIOR_ROUNDS + drafts.judged + drafts.free
        # A draft that says nothing has no better place to stop than the best fixed length.
        blind = learned.blind[1] > 0
        most = where(blind, length, self.high)
        judging = costs.judging
        if costs.prefill and anywhere(state.begun < 1):
            judging = tuple(where(state.begun, seconds, costs.widening) for seconds in judging)
        probe = costs.draft_seconds(1)
        if looks:  # it finds the rounds that pay, where the mean one does not
            cold = where(state.begun >= costs.prefill, costs.cold, 0.0)
            probe = probe + where(blind, judging[0], cold)
            pays = blind | (tokens * plain > seconds)
            tokens, seconds = where(pays, tokens, 1.0), where(pays, seconds, plain)
        else:
            probe = probe + judging[0]
        tokens = PRIOR_ROUNDS * tokens + drafts.committed
        seconds = PRIOR_ROUNDS * seconds + took
        rate = maximum(tokens / seconds, 1 / plain)
        worth, idle = (tokens - seconds / plain) / rounds, 1 - seconds / plain / rounds
        if not looks:
            judging = (0.0,) * len(judging)
        elif costs.cold > 0 and anywhere(worth < 0):  # the pass behind a judged probe is cold, too
            cold = where((worth < 0) & (state.begun >= costs.prefill), costs.cold, 0.0)
            judging = judging[0] + cold, *judging[1:]
        memo = Terms(by, useful, rate, judging), None
        opening = Opening(most, worth, rate * costs.further, memo, idle, math.inf)
        return opening, self._rest(state, costs, probe)

    def _in_force(self, costs: Costs) -> Costs:
        """The costs to decide by."""
        if self.own_costs is not None or self.slope is None:
            return self.own_costs or costs
        return _with_slope(costs, self.slope)

    def _plain(self, costs: Costs) -> float:
        """Seconds of a plain token, less those of reading prompts that it saves the drafter."""
        left: float = maximum(costs.plain - costs.reading, NO_TIME * costs.plain)
        return left

    def _best_fixed(
        self, first: float, later: float, costs: Costs, foreseen: float
    ) -> tuple[int, float, float]:
        """The length with the most tokens per second if tokens are kept with these probabilities,
        the tokens it commits, and the seconds it takes.

        Args:
            foreseen: share of the tokens not kept before which the drafter itself stops.
        """
        best = length, tokens, seconds = 1, 1 + first, costs.one
        more, levels, going = first, len(costs.rounds), 1 - foreseen * (1 - first)
        for length in range(2, self.high + 1):
            more = more * later
            tokens, seconds = tokens + more, seconds + going * costs.next(length - 1)
            longer = tokens * best[2] > best[1] * seconds
            if anywhere(longer):
                best = select(longer, (length, tokens, seconds), best)
            # The rate has one peak beyond all levels, and none where a step alone is not worth it.
            elif length >= levels or not anywhere(more * best[2] > best[1] * going * costs.draft):
                break
            going = going * (1 - foreseen * (1 - later))
        return best

    def _rest(self, state: AutoState, costs: Costs, probe: float) -> float:
        """Plain rounds before a probe that takes so many seconds more than one of them."""
        # Slower even if all were kept: a probe could only find other costs.
        best = maximum(2 / costs.one, (1 + self.high) / _seconds(costs, self.high))
        first = clip(PROBE_INTERVAL * (state.in_vain - 1), 0.0, MOST_IN_VAIN)
        first = where(state.learned.useless >= 0, 4 * first, first)
        waits = (costs.batch > MOST_TRYING) | state.drafting
        interval = where(waits, state.interval, first)
        # A probe of rows together tells as much as one of each alone.
        interval = minimum(costs.batch * interval, LONGEST_PROBE_INTERVAL)
        interval = where(best * self._plain(costs) < 1, LONGEST_PROBE_INTERVAL, interval)
        reading = where(state.drafting, 0.0, costs.catch_up)
        rest: float = maximum(interval * (probe + reading) / costs.plain, 0.0)
        return rest


def _seconds(costs: Costs, drafted: float) -> float:
    """Of a round that drafts so many tokens, ≥ 1, also between whole numbers."""
    seconds: float = interpolated(costs.rounds, drafted - 1, costs.further)
    return seconds


@lru_cache(16)
def _with_slope(costs: Costs, slope: float) -> Costs:
    """Costs whose passes grow by `slope` of one that judges a token, with each further one."""
    judged = costs.verify_seconds(2)
    verify = ((1, costs.verify[0][1]), (2, judged), (3, (1 + slope) * judged))
    return replace(costs, verify=verify, levels=())
