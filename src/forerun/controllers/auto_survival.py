"""How likely `auto` takes drafted tokens, and the next one, to be kept.

Written for one request, element by element (`elementwise`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from forerun.controllers.auto_table import Table
from forerun.controllers.elementwise import (
    anywhere,
    clip,
    largest,
    log,
    minimum,
    select,
    sigmoid,
    where,
)
from forerun.types import Round, Token


class LogOdds(NamedTuple):
    """Of being kept: linear in what a drafted token, or the ones before it, say."""

    constant: float
    """Of a token that was drafted,"""
    per_margin: float
    """per logit of its margin, and"""
    per_chosen: float
    """per unit of its probability."""
    first: float
    """Of a round's first token before it is drafted."""
    next_constant: float
    """Of a later one,"""
    next_newest: float
    """per logit of the newest margin, and"""
    next_mean: float
    """per logit of the round's mean margin."""

    def drafted(self, margin: float, token: Token) -> float:
        """Of a drafted token; its probability counts where it was asked for."""
        z = self.constant + self.per_margin * margin
        return z if token.chosen is None else z + self.per_chosen * token.chosen


GREEDY = LogOdds(-0.44, 1.37, 0.0, 1.23, 0.70, 0.14, 0.21)
"""Prior of certain drafts; `python -m benchmarks.auto_prior` made both."""
SAMPLED = LogOdds(0.52, 0.0, 3.34, 0.97, 0.83, 0.17, 0.12)
"""Prior of those that coins decide."""
MOST_MARGIN = 8.0
"""Logits beyond which a margin says nothing more."""
TYPICAL_MARGIN = 4.0
"""Mean margin of drafts, for lengths that are planned before anything is drafted."""
SCALE_WEIGHTS = (4.0, 10.0)
"""Prior weight of the request's own constant 0 and slope 1, in `Σ w`, `Σ w·z²`."""
SHIFT_WEIGHT = 4.0
"""Prior weight of its shift 0 for the next token, in `Σ w`."""
FADE = 0.98
"""Share of that evidence that still counts a round later."""
MOST_SHIFT = 4.0
"""Bound on the request's constant and shift, either way, and above on its slope."""
LEAST_SLOPE = 0.25
"""Confidence never counts against itself."""
USELESS_START = -6.0
"""Log-odds, at first and at least, that the draft is of no use."""
USELESS_STEP, USELESS_CAP = 2.0, 2.0
"""How much a request that found it of no use raises the next one's start, and up to where: one hard
text says little about the next, several say it is the draft."""
USELESS_KEPT = 0.05
"""Share of such a draft's tokens that are kept."""
KEPT_IF_USELESS, LOST_IF_USELESS = math.log(USELESS_KEPT), math.log(1 - USELESS_KEPT)
"""Log-likelihood of a token of such a draft."""
BLIND_FIRST, BLIND_LATER = (0.8, 2.0), (3.4, 4.0)
"""Of a drafter without signals, before anything was judged: kept and judged first tokens of rounds,
and later ones."""


class Survival(NamedTuple):
    """What a request's judged tokens have taught."""

    certain: bool = True
    """Whether no coins decide what is kept: which of the priors is the request's."""
    constant: float = 0.0
    slope: float = 1.0
    """Of the request's own line through the prior's log-odds z: `b + a·z`."""
    weight: float = 0.0
    weight_z: float = 0.0
    weight_zz: float = 0.0
    """`Σ w`, `Σ w·z`, `Σ w·z²`, fading: how much is known of them."""
    shift: float = 0.0
    """The request's own constant for tokens not yet drafted."""
    shift_weight: float = 0.0
    """`Σ w`, fading."""
    useless: float = USELESS_START
    """Log-odds that the draft is of no use here."""
    useless_before: float = USELESS_START
    """What they were when the request began."""
    blind: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Tokens of drafts without signals, fading: first ones kept and judged, later ones likewise."""
    difficult: float = 0.0
    rejected: float = 0.0
    """Tokens that the drafter could not say, and ones it said that were not kept, fading."""

    @property
    def foreseen(self) -> float:
        """Share of the tokens not kept before which the drafter itself stops."""
        return self.difficult / (self.difficult + self.rejected + 1)


class Drafted(NamedTuple):
    """The drafted tokens of a round so far."""

    survival: float
    """Probability that all are kept, if the draft is of use at all."""
    tokens: int
    """How many, > 0."""
    newest: float
    total: float
    """The newest margin, and the sum of all."""
    lead: float = 0.0
    """Tokens by which judging all of them is worth more than judging the best beginning, ≤ 0,"""
    left_out: int = 0
    """and how many are behind that; both 0 where none may be left out."""


def in_force(learned: Survival) -> LogOdds:
    """The log-odds of this request: the prior, with its own line and shift."""
    constant, per_margin, per_chosen, first, later, per_newest, per_mean = prior(learned)
    slope, shift = learned.slope, learned.shift
    return LogOdds(
        learned.constant + slope * constant,
        slope * per_margin,
        slope * per_chosen,
        first + shift,
        later + shift,
        per_newest,
        per_mean,
    )


def prior(learned: Survival) -> LogOdds:
    """The log-odds expected of a request before anything was judged."""
    by: LogOdds = select(learned.certain, GREEDY, SAMPLED)
    return by


def extended(drafted: Drafted | None, by: LogOdds, table: Table, token: Token) -> Drafted | None:
    """With one more token; None if tokens say nothing."""
    if token.logit_margin is None:
        return drafted
    margin = minimum(token.logit_margin, MOST_MARGIN)
    kept = sigmoid(by.drafted(margin, token) + table(token))
    if drafted is None:
        return Drafted(kept, 1, margin, margin)
    survival, count, _, total, lead, left_out = drafted
    return Drafted(survival * kept, count + 1, margin, total + margin, lead, left_out)


def weighed(drafted: Drafted, useful: float, price: float) -> Drafted:
    """With what it is worth to judge the newest token, at a price in tokens."""
    survival, count, newest, total, lead, left_out = drafted
    lead = lead + useful * survival - price
    behind = where(lead < 0, left_out + 1, 0)
    return Drafted(survival, count, newest, total, minimum(lead, 0.0), behind)


def next_kept(drafted: Drafted, by: LogOdds) -> float:
    """Probability that the next token is kept if all drafted ones are."""
    mean = drafted.total / drafted.tokens
    kept: float = sigmoid(by.next_constant + by.next_newest * drafted.newest + by.next_mean * mean)
    return kept


def typical(learned: Survival, by: LogOdds, useful: float) -> tuple[float, float]:
    """Probability of keeping the first token of a round, and any later one, of typical drafts that
    are of use with this probability."""
    first = useful * sigmoid(by.first)
    later = by.next_constant + TYPICAL_MARGIN * (by.next_newest + by.next_mean)
    later = useful * sigmoid(later)
    kept, judged, later_kept, later_judged = learned.blind
    blind = judged > 0
    return (
        where(blind, (kept + BLIND_FIRST[0]) / (judged + BLIND_FIRST[1]), first),
        where(blind, (later_kept + BLIND_LATER[0]) / (later_judged + BLIND_LATER[1]), later),
    )


def carried(learned: Survival, share: float) -> Survival:
    """Where the next request starts: from a share of the corrections."""
    before, now = learned.useless_before, learned.useless
    worse = minimum(before + USELESS_STEP, USELESS_CAP)
    useless = where(now > before, worse, where(now < before, USELESS_START, before))
    return Survival(
        certain=learned.certain,
        constant=share * learned.constant,
        slope=1 + share * (learned.slope - 1),
        shift=share * learned.shift,
        useless=useless,
        useless_before=useless,
        blind=tuple(share * count for count in learned.blind),  # type: ignore[arg-type]
        difficult=share * learned.difficult,
        rejected=share * learned.rejected,
    )


def judged(learned: Survival, table: Table, round: Round) -> tuple[Survival, Table]:
    """After the judged tokens of a round: the accepted ones and the first rejected one. One that a
    drafter could not say counts as a rejected one of which nothing was shown.

    A Newton step of ridge logistic regression on z, for constant and slope; one for the shift of
    tokens not yet drafted; and the evidence that the draft is of no use.
    """
    count = round.judged
    most = largest(count)
    if most and not round.shows("logit_margin"):
        return _judged_blind(learned, round, most), table
    by = prior(learned)
    slope, shift, unexplained = learned.slope, learned.shift, []
    weight, weight_z = FADE * learned.weight, FADE * learned.weight_z
    weight_zz, next_weight = FADE * learned.weight_zz, FADE * learned.shift_weight
    miss = miss_z = next_miss = evidence = total = newest = 0.0
    stuck = anywhere(round.difficult)
    for i in range(most + stuck):
        guess = by.first
        if i:
            guess = by.next_constant + by.next_newest * newest + by.next_mean * (total / i)
        guess = guess + shift
        likely = sigmoid(guess)
        if stuck:
            here = round.difficult & (i == count)
            next_weight = next_weight + here * likely * (1 - likely)
            next_miss = next_miss - here * likely
        if i == most:
            break
        token, hit, inside = round.tokens[i], round.accept_prob[i], i < count
        margin = minimum(token.logit_margin, MOST_MARGIN)
        z = by.drafted(margin, token)
        chance = sigmoid(learned.constant + slope * z + table(token))
        w, short = inside * chance * (1 - chance), inside * (hit - chance)
        weight, weight_z, weight_zz = weight + w, weight_z + w * z, weight_zz + w * z * z
        miss, miss_z = miss + short, miss_z + short * z
        unexplained.append((token, w, short))
        next_weight = next_weight + inside * likely * (1 - likely)
        next_miss = next_miss + inside * (hit - likely)
        likelier = hit * KEPT_IF_USELESS + (1 - hit) * (LOST_IF_USELESS + guess) - log(likely)
        evidence = evidence + inside * likelier
        newest, total = margin, total + margin
    a, b, c = weight + SCALE_WEIGHTS[0], weight_z, weight_zz + SCALE_WEIGHTS[1]
    scale = 1 / (a * c - b * b)
    after = Survival(
        learned.certain,
        clip(learned.constant + (c * miss - b * miss_z) * scale, -MOST_SHIFT, MOST_SHIFT),
        clip(slope + (a * miss_z - b * miss) * scale, LEAST_SLOPE, MOST_SHIFT),
        weight, weight_z, weight_zz,
        clip(shift + next_miss / (next_weight + SHIFT_WEIGHT), -MOST_SHIFT, MOST_SHIFT),
        next_weight,
        clip(learned.useless + evidence, USELESS_START, -USELESS_START),
        learned.useless_before, learned.blind,
        FADE * learned.difficult + round.difficult,
        FADE * learned.rejected + (count > round.accepted),
    )  # fmt: skip
    return after, table.learned(unexplained)


def _judged_blind(learned: Survival, round: Round, most: int) -> Survival:
    """Likewise of a draft without signals."""
    first_kept, first_judged, kept, count = (FADE * share for share in learned.blind)
    for i in range(most):
        inside = where(i < round.judged, 1.0, 0.0)
        hit = inside * round.accept_prob[i]
        if i:
            kept, count = kept + hit, count + inside
        else:
            first_kept, first_judged = first_kept + hit, first_judged + inside
    return learned._replace(blind=(first_kept, first_judged, kept, count))
