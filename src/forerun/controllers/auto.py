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
CHEAP_PROBE = 0.5
"""Most that a probe at the start of a request may take beyond a plain round, in plain rounds."""
SLOPE = 0.02
"""v if `cost` is given and `slope` is not."""
CARRIED = 0.5
"""Share of a request's corrections that the next one starts from."""
NO_TIME = 1e-6
"""Least share of a plain token's seconds that is left when a drafter's reading is taken off."""
_LIMIT = int(Stop.LIMIT)  # numpy is slow with enumerations


class AutoState(NamedTuple):
    """State of `Auto`."""

    learned: Survival = Survival()
    """How tokens are kept."""
    rested: int = 0
    """Plain rounds by choice since the newest draft that taught something."""
    interval: float = PROBE_INTERVAL
    """Plain rounds before the next probe, per plain round that a useless one costs."""
    drafts: float = 0.0
    """Rounds with a draft, fading,"""
    drafted: float = 0.0
    """tokens they drafted, and"""
    committed: float = 0.0
    """tokens they committed."""
    table: Table = Table()
    """Tokens the draft errs at."""


class Terms(NamedTuple):
    """What a round's tokens are weighed by. A memo is these and the drafted tokens, if any."""

    by: LogOdds
    """The log-odds in force."""
    useful: float
    """Probability that the draft is of use at all, `1 − u`."""
    rate: float
    """λ, the tokens per second of the best policy."""


Memo = tuple[Terms, survival.Drafted | None]


@dataclass(frozen=True)
class Auto(LengthController):
    """Draft another token while it is expected to commit more than its time does elsewhere.

    *Helps* everywhere without tuning: there is no length, threshold or rate to choose. How likely
    tokens are to be kept is read off the drafter's confidence and corrected by what is kept; what
    they cost is measured. Where speculation does not pay it decodes plainly and tries again now and
    then. *Hurts* a little in the first rounds, before anything was timed, and while a request is
    unlike what the starting values expect, as sampled ones of a weak draft are (a fixed length that
    fits was up to 1 % ahead there). What it drafts depends on the costs measured, and on earlier
    requests, unless `cost` is given.

    Rule: drafting is a renewal process, so the most tokens per second come from drafting on
    exactly while `S_i·ŝ_{i+1} > λ·(d + v·V)`, with `S_i` the probability that the i tokens drafted
    so far are all kept, `ŝ_{i+1}` that the next one is, λ the tokens per second of the best
    policy, d the seconds of a draft step and V those of a target pass that judges one token. A
    round starts with a draft while λ is at least the rate of plain decoding.

    - `S_i = (1 − u)·Π_j σ(b + a·z_j + t_j)`: `z` is linear in the logit margin (greedy requests) or
      in the probability of the drafted token (sampled ones), fitted once to many texts; what is
      kept tells which of the two a request is. `(b, a)`, from (0, 1), follow its judged tokens by
      one Newton step of ridge logistic regression a round. `t` is what a table has learned so, in
      this request and those before, of the drafted token and of its pair with the one before it:
      a draft errs at some tokens more often than its confidence says (`auto_table`).
    - `ŝ_{i+1} = σ(z' + b')`: z' is linear in the newest margin and the mean margin of the round,
      fitted likewise, with a constant for the first token; b' follows the request. u is the
      probability that the draft is of no use at all, by the likelihood of what was kept. A request
      that found it of no use makes the next one a little less hopeful, several make it rest.
    - A draft that says nothing of its tokens (lookup) is as long as the best fixed length, by how
      many first tokens of a round, and how many further ones, were kept.
    - Of a request alone `v·V` is what the token really adds. Where a pass takes as long for eight
      tokens as for five (`Costs.levels`), the fifth pays for the others, and is weighed with as
      many of them as is best: `max_k Σ_{j≤k} S_i·ŝ^j − λ·(k·d + v_k·V)`.
    - λ is tokens over seconds of the request's rounds, fading, added to some rounds of the best
      fixed length for the expected acceptance (so it needs no start), and at least the plain rate.
      The seconds are those the costs say. A drafter reads the prompts of requests that come, too;
      where that was timed, a plain token is so much cheaper than one with a draft.
    - Rejections, and only they, end what a round can teach; rounds cut short from outside teach
      nothing.
    - Requests that decode plainly probe after 8 rounds, times what a useless probe costs in plain
      rounds; each that keeps nothing makes the next wait twice as long, up to 256, which is also
      where a request starts whose draft would not pay even if it were always kept. After a request
      that rested, as its draft did not pay, the next one begins with a probe, if that takes at most
      one and a half plain rounds.
    - Requests that share a pass draft and rest as one. A draft step takes its time however many
      rows it serves, and the pass is as wide as the longest draft, so all draft on while
      `Σ S_i·ŝ_{i+1}` over those still drafting is above `Σ λ·(d + v·V)` over all.

    Args:
        cost: c, one target pass over one draft step, > 0, or none to go by what is measured (the
            default). Given, nothing is carried from one request to the next and each decides for
            itself, which makes sampled texts repeatable.
        slope: v, what each further token to judge adds to a target pass, in target passes, ≥ 0, or
            none to go by what is measured (0.02 if `cost` is given).
        high: the most tokens per round, ≥ 1. 32, beyond what pays for any drafter that costs time.

    Deviations: the rule is the best one if survival only falls, as when the next tokens are alike;
    a doubtful token followed by certain ones is worth a little more than it says. With `cost`
    given, a request decides for itself whoever shares its pass, so in a large batch it can be
    slower than plain decoding. The starting values were fitted to texts of an earlier shipped
    pair.

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
        return frozenset({"logit_margin", "chosen", "id", "previous"})

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
        """Corrections fade. A rest goes on if the draft is of no use; if it only did not pay, the
        next request begins with a probe, where that is cheap."""
        learned = survival.carried(state.learned, CARRIED)
        due = maximum(state.rested, CHEAP_PROBE * state.interval)
        return AutoState(
            learned,
            rested=where(learned.useless < 0, due, state.rested),
            interval=state.interval,
            drafts=CARRIED * state.drafts,
            drafted=CARRIED * state.drafted,
            committed=CARRIED * state.committed,
            table=state.table,
        )

    def limit(self, state: AutoState, costs: Costs) -> int:
        """The most tokens per round; 0 where plain decoding is faster."""
        return self.open(state, costs).alone

    def open(self, state: AutoState, costs: Costs) -> Opening:
        """What a draft is expected to gain, and the price of its tokens."""
        costs = self._in_force(costs)
        seen = state.drafts, state.drafted, state.committed
        opening = self._expected(state.learned, *seen, costs)
        if not anywhere(opening.worth < 0):
            return opening
        rests = self._resting(state, costs, opening.worth)
        worth = where(opening.worth < 0, rests, opening.worth)
        idle = where(opening.worth < 0, rests, opening.idle)
        return opening._replace(worth=worth, idle=idle)

    def fold(self, state: AutoState, memo: Memo, token: Token) -> Memo:
        """One more drafted token."""
        terms, drafted = memo
        return terms, survival.extended(drafted, terms.by, state.table, token)

    def worth(self, state: AutoState, costs: Costs, memo: Memo) -> float:
        """The chance that the next token is kept, less its price; where it pays for a level of the
        pass, with as many of the tokens behind it as is best."""
        (by, useful, rate), drafted = memo
        if drafted is None:
            return math.inf
        costs, kept = self._in_force(costs), survival.next_kept(drafted, by)
        tokens, gain = drafted.tokens, useful * drafted.survival * kept
        worth = best = gain - rate * costs.next(tokens)
        levels = len(costs.rounds)
        while tokens < levels and anywhere(best <= 0):
            tokens, gain = tokens + 1, gain * kept
            step = gain - rate * costs.next(tokens)
            if tokens >= levels and not anywhere(step > 0):
                break
            worth = worth + step
            best = maximum(best, worth)
        return best

    def observe(self, state: AutoState, costs: Costs, round: Round) -> AutoState:
        """Learn from the tokens that were judged."""
        width = maximum(round.longest, round.drafted)
        chose_plain = (round.drafted == 0) & (round.stopped_by == _LIMIT)
        rested = state.rested + chose_plain
        if not anywhere(width):
            return state._replace(rested=rested)
        learn = round.teaches
        paid = learn | (width > round.drafted)  # others drafted, and this request had no room
        learned, table = survival.judged(state.learned, state.table, round)
        longer = minimum(2 * state.interval, LONGEST_PROBE_INTERVAL)
        # A draft right after a probe may only be there to be timed.
        useless = where(state.rested > 0, longer, state.interval)
        interval = where(round.accepted > 0, PROBE_INTERVAL, useless)
        return AutoState(
            select(learn, learned, state.learned),
            where(learn, 0, rested),
            where(learn, interval, state.interval),
            where(paid, FADE * state.drafts + 1, state.drafts),
            where(paid, FADE * state.drafted + width, state.drafted),
            where(paid, FADE * state.committed + round.accepted + 1, state.committed),
            table,
        )

    @remembered
    def _expected(
        self, learned: Survival, drafts: float, drafted: float, committed: float, costs: Costs
    ) -> Opening:
        """What a round's draft is expected to gain: the same for as long as a request rests."""
        plain = self._plain(costs)
        by, useful = survival.in_force(learned), sigmoid(-learned.useless)
        best = self._best_fixed(*survival.typical(learned, by, useful), costs)
        length, tokens, seconds = best
        tokens = PRIOR_ROUNDS * tokens + committed
        mean = maximum(drafted, NO_TIME) / maximum(drafts, NO_TIME)
        seconds = PRIOR_ROUNDS * seconds + drafts * _seconds(costs, mean)
        rounds = PRIOR_ROUNDS + drafts
        worth, idle = (tokens - seconds / plain) / rounds, 1 - seconds / plain / rounds
        rate = maximum(tokens / seconds, 1 / plain)
        # A draft that says nothing has no better place to stop than the best fixed length.
        most = where(learned.blind[1] > 0, length, self.high)
        return Opening(most, worth, rate * costs.further, (Terms(by, useful, rate), None), idle)

    def _in_force(self, costs: Costs) -> Costs:
        """The costs to decide by."""
        if self.own_costs is not None or self.slope is None:
            return self.own_costs or costs
        return _with_slope(costs, self.slope)

    def _plain(self, costs: Costs) -> float:
        """Seconds of a plain token, less those of reading prompts that it saves the drafter."""
        left: float = maximum(costs.plain - costs.reading, NO_TIME * costs.plain)
        return left

    def _best_fixed(self, first: float, later: float, costs: Costs) -> tuple[int, float, float]:
        """The length with the most tokens per second if tokens are kept with these probabilities,
        the tokens it commits, and the seconds it takes."""
        best = length, tokens, seconds = 1, 1 + first, costs.one
        more, levels = first, len(costs.rounds)
        for length in range(2, self.high + 1):
            more = more * later
            tokens, seconds = tokens + more, seconds + costs.next(length - 1)
            longer = tokens * best[2] > best[1] * seconds
            if anywhere(longer):
                best = select(longer, (length, tokens, seconds), best)
            # The rate has one peak beyond all levels, and none where a step alone is not worth it.
            elif length >= levels or not anywhere(more * best[2] > best[1] * costs.draft):
                break
        return best

    def _resting(self, state: AutoState, costs: Costs, worth: float) -> float:
        """A draft's worth, below 0, while the next probe comes nearer: from 0 on it is due."""
        plain, one = costs.plain, costs.one
        # Slower even if all were kept: a probe could only find other costs.
        best = maximum(2 / one, (1 + self.high) / _seconds(costs, self.high))
        interval = where(best * self._plain(costs) < 1, LONGEST_PROBE_INTERVAL, state.interval)
        rest = maximum(interval * ((one + costs.catch_up) / plain - 1), 0.0)
        left = rest - state.rested
        nearer: float = where(left > 0, worth * left / (rest + 1), 0.0)
        return nearer


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
