"""`gammatune`: moving average of accepted tokens, longer when all were accepted."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from forerun.checks import Count, Within
from forerun.controllers.base import Persistent
from forerun.controllers.elementwise import ceil, clip, maximum, where
from forerun.types import RoundOutcome, Stop

_LIMIT = int(Stop.LIMIT)  # numpy is slow with enumerations


class GammaTuneState(NamedTuple):
    """State of `GammaTune` and `GammaTunePlus`."""

    window: float  # γ̄, the smoothed window; γ is its ceiling
    reach: float = 0.0  # γ of the next round where the last one expanded it alone, else 0


@dataclass(frozen=True)
class Window(Persistent):
    """What `GammaTune` and `GammaTunePlus` do between rounds.

    Args:
        length: γ̄ of the first round, tokens, `low ≤ length ≤ high`. The paper averages over
            starts from 1 to 24; 7 is ours (see `eta`).
        eta: η, weight of the newest round, in (0, 1]. The paper gives no value; ours, by a
            sweep over validation prompts (`benchmarks/results/sweep.md`).
        delta: δ, tokens added to a fully accepted round, ≥ 0. The paper gives no value; ours, by
            the same sweep.
        low: γ_min, tokens, ≥ 1. The paper gives no value; 1 is the smallest that can learn.
        high: γ_max, tokens. The paper gives no value; 24 is its largest starting length.
        literal: run Algorithm 1 as printed.
        early_stop: what a fully accepted draft teaches that ended before γ by somebody's decision
            (the confidence threshold of `gammatune+`, a difficult token). The paper does not say.
            `"expand"`: `A + δ`, taking "all drafted were accepted" for "A = γ" (the default, best
            in the sweep); `"update"`: `A` as it is, which is below γ and so pulls the window down
            (the algorithm taken at its word); `"skip"`: nothing, as a longer draft was never
            tried.
        expand: what a fully accepted round lengthens. `"average"`: the A that enters γ̄, as §4.1
            says; `"next"`: the next round's γ alone, which becomes `A + δ` (eq. 7), while γ̄ takes A
            as it is.
        persistent: whether a request starts from the window of the one that ended last
            (`num_assistant_tokens_schedule="heuristic"` in `transformers`, the paper's code base),
            instead of afresh. Requests with a seed that are sampled always start afresh.
    """

    length: Count = 7
    eta: Annotated[float, Within(0, above=True)] = 0.3
    delta: Annotated[float, Within(0, 1000)] = 4
    low: Count = 1
    high: Count = 24
    literal: bool = False
    early_stop: Literal["update", "expand", "skip"] = "expand"
    expand: Literal["average", "next"] = "average"
    persistent: bool = False
    rising = ("low", "length", "high")

    def first(self) -> GammaTuneState:
        return GammaTuneState(float(self.length))

    def limit(self, state: GammaTuneState) -> int:
        """γ = ⌈γ̄⌉, or what the last round reached for."""
        return ceil(maximum(state.window, state.reach))

    def observe(self, state: GammaTuneState, round: RoundOutcome) -> GammaTuneState:
        """Move the window towards what was accepted, by the rule in `GammaTune`."""
        full, learn = round.full, round.teaches
        if self.early_stop != "expand":
            reached = (round.stopped_by == _LIMIT) | (round.accepted >= state.window)
            if self.early_stop == "skip":
                learn = learn & (reached | (round.accepted < round.drafted))
            full = full & reached
        further = round.accepted + where(full, self.delta, 0)
        average = self.expand == "average" and not self.literal
        accepted = further if average else round.accepted
        # (1 − η)·γ̄ + η·A, written so that A = γ̄ leaves γ̄ exactly where it is.
        moved = state.window + self.eta * (accepted - state.window)
        window = where(learn, clip(moved, self.low, self.high), state.window)
        if average or self.literal:
            return GammaTuneState(window, state.reach)
        reach = where(full, clip(further, self.low, self.high), 0.0)
        return GammaTuneState(window, where(learn, reach, state.reach))


@dataclass(frozen=True)
class GammaTune(Window):
    """Set γ to a moving average of the accepted tokens, and reach further when all were accepted.

    Reference: Gautam et al. 2025 (GammaTune) [gammatune2025], §4.1 and Algorithm 1.
    """
