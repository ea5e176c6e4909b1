"""`auto`: draft on while the next token is worth more than its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from forerun.checks import between, whole
from forerun.controllers import auto_costs as costs
from forerun.controllers import auto_survival as belief
from forerun.controllers.base import LengthController
from forerun.errors import require
from forerun.types import BoolArray, FloatArray, IntArray, RoundOutcome, Signals

TRUST = 12.0
"""Rounds of the expected tokens and seconds that the observed ones are added to."""
FADE = 0.95
"""Of what was observed, what still counts a round later."""
HOPE = 0.75
"""V(1) over V(2) until a plain round was timed: low, so that one is tried when in doubt."""
DOUBT = 0.95
"""Speed over plain decoding, as expected, below which a row rests: near 1 drafting costs nothing
and teaches."""
REST, LONGEST_REST = 8.0, 256.0
"""Plain rounds per plain round that a useless probe costs, before the first and the last probes."""
UNTIMED = 12
"""Most tokens to draft before anything was timed."""
TIMED, PLAIN_TIMED = 4, 16
"""Of so many rounds, with a draft or without, one is timed, a request's second first: its first may
read the prompt."""
CARRY = 0.5
"""Of a row's corrections, what the next request starts from."""


@dataclass(frozen=True)
class AutoState(costs.CostState, belief.SurvivalState):
    """State of `Auto`."""

    tokens: FloatArray
    """`(rows,)` tokens committed by rounds with a draft (fading)."""
    seconds: FloatArray
    """`(rows,)` what those rounds took."""
    price: FloatArray
    """`(rows,)` tokens that must be expected of a drafted token: `λ·(d + v·V)`."""
    awake: BoolArray
    """`(rows,)` whether speculation is expected to pay."""
    probed: IntArray
    """`(rows,)` the newest round with a draft, counted from 1."""
    caught: FloatArray
    """`(rows,)` seconds it took to catch up before the newest draft."""
    patience: FloatArray
    """`(rows,)` plain rounds before the next probe, per plain round that a useless one costs."""
    rest: FloatArray
    """`(rows,)` plain rounds before the next probe."""
    most: IntArray
    """`(rows,)` the most tokens to draft."""
    size: IntArray
    """`(rows,)` which of the batch sizes the costs in force are of; 0: of a row by itself."""


@dataclass(frozen=True)
class Auto(LengthController):
    """Draft another token while it is expected to commit more than its time does elsewhere.

    *Helps* everywhere without tuning: there is no length, threshold or rate to choose. How likely
    tokens are to be kept is read off the drafter's confidence and corrected by what is kept; what
    they cost is read off the clock. Where speculation does not pay it decodes plainly and tries
    again now and then. *Hurts* a little in the first rounds, before anything was timed, and while
    a row is unlike what the starting values expect. What it drafts depends on the clock unless
    `cost` is given.

    Rule: drafting is a renewal process, so the most tokens per second come from drafting on
    exactly while `S_i·ŝ_{i+1} > λ·(d + v·V)`, with `S_i` the probability that the i tokens drafted
    so far are all kept, `ŝ_{i+1}` that the next one is, λ the tokens per second of the best
    policy, d the seconds of a draft step and V those of a target pass that judges one token. A
    round starts with a draft while λ is above 0.95 of the rate of plain decoding: near it a draft
    costs next to nothing, and teaches.

    - `S_i = Π_j σ(b + a·z_j)`: `z` is linear in the logit margin (greedy requests) or in the
      probability of the drafted token (sampled ones), fitted once to many texts; what is kept
      tells which of the two a row is. `(b, a)`, from (0, 1), follow the row's judged tokens by one
      Newton step of ridge logistic regression a round.
    - `ŝ_{i+1} = (1 − u)·σ(z' + b')`: z' is linear in the newest margin and the mean margin of the
      round, fitted likewise, with a constant for the first token; b' follows the row; u is the
      probability that the draft is of no use at all, by the likelihood of what was kept. A request
      that found it of no use makes the next one a little less hopeful, several make it rest.
    - A draft that says nothing of its tokens (lookup) is as long as the best fixed length, by how
      many first tokens of a round, and how many further ones, were kept.
    - λ is tokens over seconds of the row's rounds, fading, added to some rounds of the best fixed
      length for the expected acceptance (so it needs no start), and at least the plain rate.
    - d, what a round's first step takes more, V and the plain pass are medians of the newest
      timings, v is a ridge regression of differences. Rejections, and only they, end what a round
      can teach; rounds cut short from outside teach nothing but their time.
    - Plainly decoding rows probe after 8 rounds, times what a useless probe costs in plain rounds;
      each further probe waits twice as long, up to 256, which is also where a row starts whose
      draft would not pay even if it were always kept.
    - Rows decoded together draft and rest as one. A draft step takes its time however many rows it
      serves, and the pass is as wide as the longest draft, so all draft on while `Σ S_i·ŝ_{i+1}`
      over the rows still drafting is above `Σ λ·(d + v·V)` over all. Costs are known per size of
      the batch, to the next power of two; at a size that is new, one round is plain.

    Args:
        cost: c, one target pass over one draft step, > 0, or none to measure it (the default).
            Given, the clock is not read and nothing is carried from one request to the next, which
            makes sampled texts repeatable; so it is for sampled requests with a seed.
        slope: v, what each further token to judge adds to a target pass, in target passes, ≥ 0, or
            none to measure it (0.02 if `cost` is given).
        high: the most tokens per round, ≥ 1. 32, beyond what pays for any drafter that costs time.

    Deviations: the rule is the best one if survival only falls, as when the next tokens are alike;
    a doubtful token followed by certain ones is worth a little more than it says. With `cost`
    given, a row decides for itself whoever is decoded with it, so in a large batch it can be slower
    than plain decoding. The starting values were fitted to the texts of the shipped pair.

    Reference: ours. Optimal stopping of a renewal-reward process, with λ by the iteration of
    Dinkelbach 1967, "On Nonlinear Fractional Programming".

    >>> controller = Auto(cost=5)
    >>> margin, chosen = np.array([[6.0], [0.1]]), np.array([[0.9], [0.2]])
    >>> said = Signals(logit_margin=margin, chosen=chosen)
    >>> controller.keep_going(controller.start(2), np.array([1, 1]), said)
    array([ True, False])
    """

    cost: float | None = None
    slope: float | None = None
    high: int = 32

    summary: ClassVar[str] = "draft on while the next token is worth more than its time"
    paper: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""
    _sizes: ClassVar[int] = 1
    """Sizes of batches whose costs are told apart."""
    _clocks: ClassVar[int | None] = None
    """Rows with a turn of their own to be timed; None: all."""

    def __post_init__(self) -> None:
        if self.cost is not None:
            between("cost", self.cost, 0, 1e9)
            require(self.cost > 0, "cost", self.cost, "above 0: a draft step costs something")
        if self.slope is not None:
            between("slope", self.slope, 0, 1000)
        whole("high", self.high, 1)

    @property
    def signals(self) -> frozenset[str]:
        """The margin, and the probability of the drafted token."""
        return frozenset({"logit_margin", "chosen"})

    def start(self, rows: int) -> AutoState:
        """State for `rows` new sequences."""
        state = AutoState(
            rounds=np.zeros(rows, dtype=np.int64),
            **costs.unknown(rows, self.cost, self.slope, self._sizes),
            **belief.unseen(rows),
            tokens=np.zeros(rows),
            seconds=np.zeros(rows),
            price=np.zeros(rows),
            awake=np.ones(rows, dtype=bool),
            probed=np.zeros(rows, dtype=np.int64),
            caught=np.zeros(rows),
            patience=np.full(rows, REST),
            rest=np.zeros(rows),
            most=np.full(rows, self.high),
            size=np.zeros(rows, dtype=np.int64),
        )
        return self._begun(state)

    def renew(self, state: AutoState) -> AutoState:
        """State for the next sequences of the same rows: costs stay, corrections fade."""
        if self.cost is not None:
            return self.start(len(state))
        return self._begun(
            state.having(
                **belief.faded(state, CARRY),
                rounds=np.zeros_like(state.rounds),
                tokens=CARRY * state.tokens,
                seconds=CARRY * state.seconds,
                probed=state.probed - state.rounds,
            )
        )

    def timeless(self, cost: float) -> Auto:
        """With the cost given, unless it is already."""
        return self if self.cost is not None else replace(self, cost=cost)

    def together(self) -> Auto:
        """For rows that share rounds, unless the cost is given: then texts are repeatable."""
        return self if self.cost is not None else _Together(self.cost, self.slope, self.high)

    def limit(self, state: AutoState) -> IntArray:
        """`(rows,)` the most tokens per round; 0 where plain decoding is faster."""
        due = state.rounds - state.probed >= state.rest
        return np.where(state.awake | due, state.most, 0)

    def keep_going(self, state: AutoState, drafted: IntArray, signals: Signals) -> BoolArray:
        """Whether the next token is expected to be worth its time."""
        if signals.chosen is None:
            return np.ones(len(state), dtype=bool)
        worth: BoolArray = belief.next_kept(state, drafted, signals) > state.price
        return worth

    def observe(self, state: AutoState, outcome: RoundOutcome) -> AutoState:
        """Learn from the tokens that were judged and from the clock, and decide anew."""
        return self._observed(state, outcome, outcome.drafted)

    def _observed(
        self, state: AutoState, outcome: RoundOutcome, width: IntArray, size: int = 0
    ) -> AutoState:
        """`observe`, of passes that judged `width` tokens `(rows,)`, in a batch of such a size."""
        clock = self.cost is None
        plain = width == 0
        known = np.where(plain, state.known[:, 1], state.known[:, 0])
        turn = state.rounds[: self._clocks] % np.where(plain, PLAIN_TIMED, TIMED)
        skip = known & (turn != 1)
        rounds = state.rounds + 1
        # A row at rest must cost no time either.
        if (plain & (skip | (not clock))).all():
            return state.having(rounds=rounds)
        learn = (outcome.drafted > 0) & ~outcome.censored
        changed: dict[str, Any] = {}
        if learn.any():
            changed = belief.judged(state, outcome, learn)
        if clock and not skip.all():
            changed |= costs.timed(state, outcome, width, ~skip, size, self.slope is None)
        new = state.having(**changed)
        took, timed = costs.seconds(new, outcome, width, clock)
        # Before anything was timed, the unit is a target pass and not a second.
        in_seconds = ~np.isnan(new.recent[:, size, :, 0]).all(axis=1) | (not clock)
        count = (learn & in_seconds) | ((width > 0) & timed)
        new = new.having(
            rounds=rounds,
            tokens=np.where(count, FADE * new.tokens + outcome.accepted + 1, new.tokens),
            seconds=np.where(count, FADE * new.seconds + took, new.seconds),
            probed=np.where(learn, rounds, state.probed),
            caught=np.where((width > 0) & clock, outcome.catch_up_seconds, state.caught),
        )
        anew = ~(skip & state.awake)
        if not anew.any():
            return new
        price, awake, most = self._decided(new)
        longer = np.minimum(2 * state.patience, LONGEST_REST)
        patience = np.where(learn, np.where(awake | state.awake, REST, longer), state.patience)
        rest = self._rest(new, patience)
        return new.having(
            price=np.where(anew, price, state.price),
            awake=np.where(anew, awake, state.awake),
            patience=np.where(anew, patience, state.patience),
            rest=np.where(anew, rest, state.rest),
            most=np.where(anew, most, state.most),
        )

    def _begun(self, state: AutoState) -> AutoState:
        """A request's first state, with what follows from the rest of it."""
        price, awake, most = self._decided(state)
        patience = np.where(awake, REST, state.patience)
        rest = self._rest(state, patience)
        return state.having(price=price, awake=awake, patience=patience, rest=rest, most=most)

    def _rest(self, state: AutoState, patience: FloatArray) -> FloatArray:
        """`rest`."""
        plain = np.where(np.isnan(state.plain), state.base, state.plain)
        one = state.base + state.lead + state.step
        many = one + (self.high - 1) * (state.step + state.slope * state.base)
        # Slower even if all were kept: a probe could only find other costs.
        never = plain * np.maximum(2 / one, (1 + self.high) / many) < 1
        rest = np.where(never, LONGEST_REST, patience) * ((one + state.caught) / plain - 1)
        return np.where(self._untimed(state), 0.0, rest)

    def _untimed(self, state: AutoState) -> BoolArray:
        """`(rows,)` where no pass that judged a draft was timed."""
        missing = np.isnan(state.recent[:, :, 1, 0])
        untimed: BoolArray = (missing.sum(axis=1) == missing.shape[1]) & (self.cost is None)
        return untimed

    def _decided(self, state: AutoState) -> tuple[FloatArray, BoolArray, IntArray]:
        """`price`, `awake` and `most`."""
        blind = self._mean(belief.blind(state)) > 0  # one drafter serves all rows
        first, later = belief.typical(state, blind)
        more = np.arange(self.high)
        tokens = 1 + first[:, None] * (1 - later[:, None] ** (more + 1)) / (1 - later[:, None])
        tokens, committed, spent = map(self._mean, (tokens, state.tokens, state.seconds))
        each = state.step + state.slope * state.base
        seconds = (state.base + state.lead + state.step)[:, None] + more * each[:, None]
        best = (np.arange(len(state)), (tokens / seconds).argmax(axis=1))
        rate = (TRUST * tokens[best] + committed) / (TRUST * seconds[best] + spent)
        untimed = np.isnan(state.plain)
        hope = HOPE * (state.size == 0) * state.base
        awake = rate * np.where(untimed, hope, state.plain) > DOUBT
        rate = np.maximum(rate, 1 / np.where(untimed, state.base, state.plain))
        # A draft that says nothing has no better place to stop than the best fixed length.
        most = np.where(blind, best[1] + 1, self.high)
        most = np.where(self._untimed(state), np.minimum(most, UNTIMED), most)
        return rate * each, awake, most

    def _mean(self, each: FloatArray | BoolArray) -> Any:
        """What each row adds to a round it shares with others; a row by itself shares none."""
        return each


class _Together(Auto):
    """Rows whose rounds take one time: they draft and rest as one, as far as pays for all.

    The first row, which was there longest, says what things cost and when to probe.
    """

    _sizes: ClassVar[int] = 7
    _clocks: ClassVar[int | None] = 1

    def regrouped(self, state: AutoState) -> AutoState:
        """With the costs of a batch of as many rows, and what follows from them."""
        size = min((len(state) - 1).bit_length(), self._sizes - 1)
        same = state.size == size
        if same.all():
            return state
        return self._begun(
            state.having(
                **costs.resized(state, size, size - state.size),
                size=np.full(len(state), size),
                tokens=np.where(same, state.tokens, 0),
                seconds=np.where(same, state.seconds, 0),
            )
        )

    def limit(self, state: AutoState) -> IntArray:
        """`(rows,)` one length for all."""
        each = super().limit(state)
        return each if len(each) == 1 else np.full(len(each), each[0])

    def keep_going(self, state: AutoState, drafted: IntArray, signals: Signals) -> BoolArray:
        """Whether the next tokens of all are expected to be worth their time."""
        if (rows := len(state)) == 1 or signals.chosen is None:
            return super().keep_going(state, drafted, signals)
        drafting = drafted == signals.chosen.shape[1]
        worth = belief.next_kept(state, drafted, signals)[drafting].sum()
        return np.full(rows, worth > rows * state.price[0])

    def observe(self, state: AutoState, outcome: RoundOutcome) -> AutoState:
        """As a row by itself, with the width of the whole batch and the costs of its size."""
        width = outcome.drafted
        if len(state) > 1:
            width = np.full(len(state), width.max())
        return self._observed(state, outcome, width, int(state.size[0]))

    def _mean(self, each: FloatArray | BoolArray) -> Any:
        return each if len(each) == 1 else np.broadcast_to(each.mean(axis=0), each.shape)
