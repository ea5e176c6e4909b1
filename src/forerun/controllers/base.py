"""The contract of a length controller: how far to run ahead."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from forerun.controllers.elementwise import where
from forerun.costs import Costs
from forerun.types import Round, Token

State = tuple[Any, ...]
"""What a controller knows of a request: a (named) tuple of numbers, of tuples of numbers, or of
numpy arrays. `()` knows nothing."""
Memo = Any
"""What a controller keeps of the tokens drafted so far in a round; likewise, or None."""


class Opening(NamedTuple):
    """How a request goes into a round."""

    most: int
    """Most tokens to draft."""
    worth: float = math.inf
    """Tokens that drafting is expected to gain in this round, net of the time it takes; below 0 the
    request decodes plainly."""
    loss: float = 0.0
    """Tokens' worth of time it loses when others in its pass draft one more token."""
    memo: Memo = None
    """Before anything is drafted."""
    idle: float = 0.0
    """`worth` where others in its pass draft and it cannot: below 0 by the time that takes."""
    due: float = 0.0
    """Plain rounds in which a `worth` below 0 rises evenly to 0, while costs stay; one above stays.
    Where all in a pass decode plainly nobody is asked again, or told, before that matters. 0: it is
    asked every round."""

    @property
    def alone(self) -> int:
        """Most tokens to draft by a request that decides for itself; 0 is plain decoding."""
        limit: int = where(self.worth >= 0, self.most, 0)
        return limit


class LengthController(ABC):
    """Decides, round by round, how many tokens to draft for one request.

    Subclasses are frozen dataclasses: their fields are the settings, all state is in what `start`
    and `observe` return, and every method is pure (same input, same output, nothing changed in
    place). What is kept is a rule's business: with a lossless one a controller only changes speed;
    with a lossy one the text may depend on it, for bonus and plain tokens are judged by nobody.

    Formulas are written once, for one request, with the functions of `elementwise`: live they run
    on Python's numbers, in a replay on arrays over prompts. What a controller can do is declared by
    the properties; a policy that never looks at the draft needs `limit` alone, and `start` and
    `observe` if it learns.
    """

    summary: ClassVar[str]
    """One line for lists: what it does."""
    paper: ClassVar[str]
    """Short citation, e.g. "Gautam et al. 2025 (GammaTune)"; empty if there is none."""
    bibtex: ClassVar[str]
    """BibTeX entries; empty if there are none."""

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Token` that it reads; nothing else is computed."""
        return frozenset()

    @property
    def certain_signals(self) -> frozenset[str]:
        """Likewise of requests whose tokens no coins decide (`begin`)."""
        return self.signals

    @property
    def asks(self) -> bool:
        """Whether it may end a draft before the limit: by `keep_going`, or `worth`."""
        return False

    @property
    def weighs(self) -> bool:
        """Whether it says what drafting is worth (`Opening.worth`, `worth`), instead of yes or no:
        requests that share a pass then draft on while it is worth it for all of them in sum."""
        return False

    @property
    def own_costs(self) -> Costs | None:
        """Costs to decide by instead of the measured ones; the request then decides for itself,
        and nothing is carried to the next: what it drafts is repeatable."""
        return None

    @property
    def carries(self) -> bool:
        """Whether a request starts from what an earlier one has learned (`carry`)."""
        return False

    @property
    def drops_last(self) -> bool:
        """Whether the token at which `keep_going` said no is left out of the draft.

        Only for decisions that do not depend on the newest token itself, such as those on its
        `top1`: leaving out tokens because of what was sampled (`chosen`, `id`) changes the
        distribution of the tokens that stay, and sampling would not be lossless any more. For the
        same reason the loop leaves out an end-of-text token like any other.
        """
        return False

    def left_out(self, state: Any, costs: Costs, memo: Memo) -> int:
        """Asked when `keep_going` said no, of requests that began with `look`: how many of the
        newest tokens to leave out. Their draft is certain, so this may depend on it; else
        `drops_last` decides."""
        return int(self.drops_last)

    @property
    def previews(self) -> bool:
        """Whether the length is chosen by `plan`, from a preview of `limit` drafted tokens."""
        return False

    def start(self) -> State:
        """Of a request about which nothing is known."""
        return ()

    def carry(self, state: Any) -> State:
        """Of a request that follows one that ended with `state`, if it `carries`."""
        return self.start()

    def begin(self, state: Any, certain: bool) -> State:
        """`state` of a request that is about to begin, told whether its tokens are certain (greedy,
        or by noise that its seed fixes) or drawn by coins."""
        return state

    @abstractmethod
    def limit(self, state: Any, costs: Costs) -> int:
        """Most tokens to draft this round; 0 means plain decoding this round."""

    def open(self, state: Any, costs: Costs) -> Opening:
        """The same with all that `weighs` needs, and the memo that the round begins with."""
        return Opening(self.limit(state, costs))

    def look(self, state: Any, costs: Costs) -> Opening:
        """`open` of a request that decides for itself and tosses no coins: its draft may be thrown
        away after a look at it (`left_out`)."""
        return self.open(state, costs)

    def fold(self, state: Any, memo: Memo, token: Token) -> Memo:
        """The memo with the newest drafted token; by default that token alone."""
        return token

    def keep_going(self, state: Any, costs: Costs, memo: Memo) -> bool:
        """Asked after each drafted token if it `asks`: draft another one?

        The newest token stays in the draft unless `drops_last`.
        """
        return self.worth(state, costs, memo) > 0

    def worth(self, state: Any, costs: Costs, memo: Memo) -> float:
        """Likewise if it `weighs`: tokens that drafting another one is expected to gain, net of its
        time; above 0 means yes."""
        return math.inf

    def plan(self, state: Any, costs: Costs, memo: Memo) -> int:
        """Asked once per round if it `previews`: how many of the previewed tokens to draft.

        Unlike `keep_going` this may depend on every previewed token, so a sampled preview is
        thrown away and the draft drawn anew: keeping it would select among drafts by what they
        say, and sampling would not be lossless any more.
        """
        raise NotImplementedError(f"{type(self).__name__} previews and has no plan")

    def observe(self, state: Any, costs: Costs, round: Round) -> State:
        """The state after a round. Must not learn from rounds that are cut from outside
        (`Round.teaches`)."""
        return state


def _inner(name: str) -> Any:
    """An attribute of a wrapper that is the wrapped controller's."""
    return property(lambda wrapper: getattr(wrapper.inner, name))


class Wrapper(LengthController):
    """Everything as the controller `inner` has it, but for what a subclass defines."""

    inner: LengthController
    signals = _inner("signals")
    certain_signals = _inner("certain_signals")
    asks = _inner("asks")
    weighs = _inner("weighs")
    own_costs = _inner("own_costs")
    carries = _inner("carries")
    drops_last = _inner("drops_last")
    previews = _inner("previews")
    start = _inner("start")
    carry = _inner("carry")
    begin = _inner("begin")
    limit = _inner("limit")
    open = _inner("open")
    fold = _inner("fold")
    keep_going = _inner("keep_going")
    left_out = _inner("left_out")
    worth = _inner("worth")
    plan = _inner("plan")
    observe = _inner("observe")

    def look(self, state: Any, costs: Costs) -> Opening:
        """As the inner controller has it, unless a subclass has an `open` of its own."""
        own = type(self).open is not Wrapper.open
        opening: Opening = self.open(state, costs) if own else self.inner.look(state, costs)
        return opening
