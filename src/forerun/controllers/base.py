"""The contract of a length controller: how far to run ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from forerun.types import BoolArray, IntArray, RoundOutcome, Signals

S = TypeVar("S", bound="State")


@dataclass(frozen=True)
class State:
    """State of a controller over some rows: every field is an array whose first axis is rows."""

    rounds: IntArray
    """`(rows,)` rounds observed so far by each row."""

    def __len__(self) -> int:
        return len(self.rounds)

    def take(self: S, index: IntArray) -> S:
        """The state of some rows only (requests left, or were reordered)."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def having(self: S, **changes: Any) -> S:
        """`dataclasses.replace`, but fast: a state of many fields changes in every round."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new

    def join(self: S, other: S) -> S:
        """This state followed by `other`'s rows (requests joined)."""
        pairs = {
            f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)])
            for f in fields(self)
        }
        return replace(self, **pairs)


class LengthController(ABC):
    """Decides, per row and round, how many tokens to draft.

    Subclasses are frozen dataclasses: their fields are the settings, all state is in `State`, and
    every method is pure (same input, same output, nothing changed in place), so a controller runs
    unchanged live, in a replay and in a worker process. Rows never influence each other, but for
    `together`. It only changes speed: what is kept is a rule's business.
    """

    summary: ClassVar[str]
    """One line for lists: what it does."""
    paper: ClassVar[str]
    """Short citation, e.g. "Gautam et al. 2025 (GammaTune)"; empty if there is none."""
    bibtex: ClassVar[str]
    """BibTeX entries; empty if there are none."""

    @property
    def signals(self) -> frozenset[str]:
        """Fields of `Signals` that `keep_going` and `observe` read; nothing else is computed."""
        return frozenset()

    @abstractmethod
    def start(self, rows: int) -> Any:
        """State for `rows` new sequences."""

    def renew(self, state: Any) -> Any:
        """State for the next sequences of the same rows: what outlives a request, if anything.

        The engine starts new requests from the newest one that left. Must not make what a request
        drafts depend on others where the controller is repeatable (`timeless`).
        """
        return self.start(len(state))

    def timeless(self, cost: float) -> LengthController:
        """The same policy without a clock and without memory, for texts that must be repeatable.

        How long a draft is decides how many random numbers a sampled request takes. `cost` is the
        drafter's estimate of target passes over draft steps, from sizes alone.
        """
        return self

    def together(self) -> LengthController:
        """The same policy for rows decoded together, whose rounds take one time.

        Only there rows may influence each other, and only those of a policy that reads the clock:
        what others draft must stay repeatable. The engine asks for it.
        """
        return self

    def regrouped(self, state: Any) -> Any:
        """The state once rows joined or left those decoded together."""
        return state

    @abstractmethod
    def limit(self, state: Any) -> IntArray:
        """`(rows,)` the most tokens to draft this round; 0 means plain decoding this round."""

    def keep_going(self, state: Any, drafted: IntArray, signals: Signals) -> BoolArray:
        """Asked after each drafted token: draft another one?

        `drafted` `(rows,)` counts the tokens drafted so far this round and `signals` `(rows, n)`
        describes them, the last column being the newest; `n ≥ drafted`, and answers for rows that
        already stopped are ignored. The newest token stays in the draft unless `drops_last`.
        """
        return np.ones(len(drafted), dtype=bool)

    @property
    def drops_last(self) -> bool:
        """Whether the token at which `keep_going` said no is left out of the draft.

        Only for decisions that do not depend on the newest token itself, such as those on
        `Signals.top1`: leaving out tokens because of what was sampled (`Signals.chosen`) changes
        the distribution of the tokens that stay, and sampling would not be lossless any more. For
        the same reason the loop leaves out an end-of-text token like any other.
        """
        return False

    @property
    def previews(self) -> bool:
        """Whether the length is chosen by `plan`, from a preview of `limit` drafted tokens."""
        return False

    def plan(self, state: Any, drafted: IntArray, signals: Signals) -> IntArray:
        """Asked once per round if `previews`: how many tokens to draft after all, `(rows,)`.

        `drafted` `(rows,)` counts the previewed tokens and `signals` `(rows, n)` describes them.
        Unlike `keep_going` this may depend on every previewed token, so a sampled preview is
        thrown away and the draft drawn anew: keeping it would select among drafts by what they
        say, and sampling would not be lossless any more.
        """
        return drafted

    @abstractmethod
    def observe(self, state: Any, outcome: RoundOutcome) -> Any:
        """The state after a round. Must not learn from `outcome.censored` rounds."""
