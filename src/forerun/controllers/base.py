"""The contract of a length policy: how far to run ahead, for one request."""

from abc import ABC, abstractmethod
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

from forerun.checks import check
from forerun.controllers.elementwise import where
from forerun.types import RoundOutcome, Token


def mechanism(value: Any, off: Any) -> Any:
    """A field of a controller that does nothing at `off`; see `forerun ablate`."""
    return field(default=value, metadata={"off": off})


State = tuple[Any, ...]
"""What a policy knows of a request: a (named) tuple of numbers, of tuples of numbers, or of numpy
arrays. `()` knows nothing."""
Memo = Any  # what a policy keeps of the tokens drafted so far in a round: likewise, or None


class Controller:
    """What a request names: a length policy, whose own word is then taken, or a governor
    (`forerun.governors`) with the forecasts of one."""

    tree: int = 0
    """Most nodes of a tree, what it drafts among them, that a drafter which can grows in the same
    steps and the target judges in the same pass; 0: drafts are chains."""

    def __post_init__(self) -> None:
        check(self)


class LengthPolicy(Controller, ABC):
    """Decides, round by round, how many tokens to draft for one request; never sees what they cost.

    Subclasses are frozen dataclasses: their fields are the settings, all state is in what `start`
    and `observe` return, and every method is pure (same input, same output, nothing changed in
    place). What is kept is a rule's business: with a lossless one a policy only changes speed, and
    the engine sees to it; with a lossy one the text may depend on it.

    Formulas are written once, for one request, with the functions of `elementwise`: live they run
    on Python's numbers, in a replay on arrays over prompts. A policy that never looks at the draft
    needs `limit` alone, and `start` and `observe` if it learns.
    """

    stops_early: ClassVar[bool] = False
    """Whether `step` and `trim` are called. A draft that nobody looks into may run in one go."""

    def signals(self, certain: bool) -> frozenset[str]:
        """Fields of `Token` that it reads; it is shown no others.

        Args:
            certain: whether no coins are tossed over the request's tokens: they are greedy, or
                drawn by noise that its seed fixes.
        """
        return frozenset()

    def start(self, certain: bool = True, before: Any = None) -> State:
        """The state of a request that begins.

        Args:
            certain: see `signals`.
            before: the state of the engine's newest request under this policy that ended, if there
                is one; most policies start afresh.
        """
        return ()

    @abstractmethod
    def limit(self, state: Any) -> int:
        """Most tokens to draft this round, ≥ 0; 0 is plain decoding."""

    def step(self, state: Any, memo: Memo, token: Token) -> tuple[bool, Memo]:
        """Whether to draft another token behind the newest one, and the memo with that.

        Args:
            state: of the request.
            memo: of the round; None before its first token.
            token: the newest.
        """
        return True, token

    def trim(self, state: Any, memo: Memo) -> int:
        """How many of the newest drafted tokens to leave out of the target's pass, ≥ 0; asked once,
        when drafting has ended.

        Where coins decide the tokens, leaving one out for what was drawn would make sampling lossy:
        there the engine leaves out the newest at most, and that only if none of `signals` depends
        on the draw.
        """
        return 0

    def observe(self, state: Any, round: RoundOutcome) -> State:
        """The state after a round. Must not learn from rounds that are cut from outside
        (`RoundOutcome.teaches`)."""
        return state


class Outlook(NamedTuple):
    """Chances of a round's tokens before any is drafted, in [0, 1]."""

    first: float  # that its first token is kept
    later: float  # that any later one is, given that all before it are


class Chance(NamedTuple):
    """Chances after a drafted token, in [0, 1]."""

    kept: float  # that all drafted tokens are kept
    next: float  # that the next one is, given that


class Forecaster(LengthPolicy):
    """A policy that says how likely tokens are to be kept, so that a governor can weigh them.

    Its own word is to stop where some rejection becomes likely, the rule of SpecDec++ (Huang et al.
    2024).
    """

    threshold: float
    """Chance that all drafted tokens are kept, in [0, 1], below which its own word is to stop."""
    stops_early: ClassVar[bool] = True

    @abstractmethod
    def outlook(self, state: Any) -> Outlook:
        """What is expected of a round."""

    @abstractmethod
    def forecast(self, state: Any, memo: Memo, token: Token) -> tuple[Chance, Memo]:
        """What is expected behind the newest token, and the memo with it; see `step`."""

    def step(self, state: Any, memo: Memo, token: Token) -> tuple[bool, Memo]:
        """Go on while all drafted tokens are likely enough to be kept."""
        chance, memo = self.forecast(state, memo, token)
        return chance.kept >= self.threshold, memo


class Persistent(LengthPolicy):
    """With its setting `persistent` a request starts from the state of the one that ended last."""

    persistent: bool

    def start(self, certain: bool = True, before: Any = None) -> State:
        """The last state if so set, else the first."""
        return before if self.persistent and before is not None else self.first()

    @abstractmethod
    def first(self) -> State:
        """Of a request about which nothing is known."""


class Threshold(LengthPolicy):
    """Draft on while one signal of the newest token is good enough.

    A drafter without a distribution (lookup) says nothing, and is never stopped. The memo is
    whether the newest token was good enough.
    """

    signal: ClassVar[str]  # the field of `Token` it goes by
    length: int  # the most tokens per round
    keep: bool = True  # whether the token at which the draft stopped stays in it
    stops_early: ClassVar[bool] = True

    def limit(self, state: Any) -> int:
        return self.length

    @abstractmethod
    def sure(self, state: Any, signal: float) -> bool:
        """Whether the signal is good enough."""

    def signals(self, certain: bool) -> frozenset[str]:
        return frozenset({self.signal})

    def step(self, state: Any, memo: Memo, token: Token) -> tuple[bool, Memo]:
        """Whether the newest token's signal is good enough."""
        signal = getattr(token, self.signal)
        sure = True if signal is None else self.sure(state, signal)
        return sure, sure

    def trim(self, state: Any, memo: bool) -> int:
        """The unsure token, unless it is kept."""
        return 0 if self.keep else where(memo, 0, 1)
