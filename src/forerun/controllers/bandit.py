"""`bandit`: a bandit (UCB or Thompson) over a few fixed lengths."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from forerun.checks import Count, Whole, Within
from forerun.controllers.base import LengthPolicy
from forerun.controllers.elementwise import log, maximum, picked, sqrt, where
from forerun.types import FloatArray, IntArray, RoundOutcome

BLEND = 0.5
DELTA = 0.5  # as the proof of BanditSpec's Theorem 4.3 takes it


class BanditState(NamedTuple):
    """State of `Bandit`."""

    rounds: int  # rounds so far
    pulls: IntArray  # `(arms,)` rounds that taught each arm
    rewards: FloatArray  # `(arms,)` sum of their rewards
    most: float  # the most that a round could have been worth so far, by which rewards are scaled


@dataclass(frozen=True)
class Bandit(LengthPolicy):
    """Treat some fixed lengths as the arms of a bandit.

    Args:
        policy: `"ucb"` (BanditSpec, the default) or `"thompson"` (one of TapOut's).
        reward: `"throughput"` (the default; BanditSpec's for lengths, see below), `"accepted"`
            (BanditSpec's for choosing drafters; among lengths the longest always wins it) or
            `"blend"` (TapOut's form; the equal weights are ours).
        low: the shortest arm, tokens, ≥ 1 (BanditSpec has 0 to 4, its code 1 to 4).
        high: L, no arm is longer, tokens, ≥ low (ours: cheap drafters want more than 4).
        stride: from arm to arm, tokens, ≥ 1 (1 in BanditSpec; 2 is ours, for K = 5 as there).
        explore: ε, ≥ 0. BanditSpec has 1, which explores nearly evenly for hundreds of rounds;
            0.25 is ours: in simulations the least that recovers from an unlucky first play.
        seed: of the `"thompson"` draws, ≥ 0.

    Reference: Hou et al. 2025 (BanditSpec) [banditspec2025], Algorithm 4 and §6.2; Sridhar et al.
    2025 (TapOut) [tapout2025].
    """

    policy: Literal["ucb", "thompson"] = "ucb"
    reward: Literal["throughput", "accepted", "blend"] = "throughput"
    low: Count = 1
    high: Count = 9
    stride: Count = 2
    explore: Annotated[float, Within(0, 1000)] = 0.25
    seed: Whole = 0

    rising = ("low", "high")

    @cached_property
    def arms(self) -> tuple[int, ...]:
        return tuple(range(self.low, self.high + 1, self.stride))

    def start(self, certain: bool = True, before: Any = None) -> BanditState:
        arms = len(self.arms)
        return BanditState(0, np.zeros(arms, dtype=np.int64), np.zeros(arms), 1.0)

    def limit(self, state: BanditState) -> int:
        """The arm to play; the same state always plays the same."""
        return picked(self.arms, self._arm(state))

    def _arm(self, state: BanditState) -> int:
        """Its place among `arms`."""
        n = maximum(state.pulls, 1)
        if self.policy == "ucb":
            total = maximum(state.pulls.sum(0), 1)
            spread = log(len(self.arms) * total**2.0 * sqrt(1 + n) / DELTA)
            radius = sqrt((1 + n) / n**2 * (1 + 2 * spread)) / 2
        else:
            radius = normal(self.seed, state.rounds, len(self.arms)) / sqrt(n)
        score = where(
            state.pulls > 0, state.rewards / (n * state.most) + self.explore * radius, math.inf
        )
        return score.argmax(0)

    def observe(self, state: BanditState, round: RoundOutcome) -> BanditState:
        played = np.equal.outer(np.arange(len(self.arms)), self._arm(state)) & round.teaches
        reward = where(played, self._reward(round.drafted, round.accepted, round.took), 0.0)
        most = state.most
        if self.reward == "throughput":
            most = maximum(most, where(round.teaches, (round.drafted + 1) / round.took, 0.0))
        return BanditState(state.rounds + 1, state.pulls + played, state.rewards + reward, most)

    def _reward(self, drafted: int, accepted: int, took: float) -> float:
        """In [0, most], for any length up to `high`."""
        if self.reward == "accepted":
            return (accepted + 1) / (self.high + 1)
        if self.reward == "blend":
            rate: float = accepted / maximum(drafted, 1)
            return BLEND * accepted / self.high + (1 - BLEND) * rate
        return (accepted + 1) / took


def normal(seed: int, count: Any, columns: int) -> Any:
    """`(columns, ...)` standard normal numbers, functions of (seed, count, column) alone.

    SplitMix64 (Steele et al. 2014) of a counter, then Box–Muller. `count` ≥ 0 is a number or an
    array, whose shape the result has behind the columns.
    """
    start = mixed(np.array(seed % 2**64, dtype=np.uint64))
    column = np.arange(2 * columns, dtype=np.uint64)
    bits = mixed(np.add.outer(column, mixed(start + np.asarray(count, dtype=np.uint64))))
    uniform = ((bits >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # in (0, 1]
    radius = np.sqrt(-2 * np.log(uniform[:columns]))
    return radius * np.cos(2 * math.pi * uniform[columns:])


def mixed(z: Any) -> Any:
    """SplitMix64's output at counters of `uint64`, which wrap around."""
    with np.errstate(over="ignore"):
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
