"""The contract of a governor: the rows of one pass, and the only reader of costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

from forerun.checks import Count, Named, Within
from forerun.controllers.base import Chance, Controller, Forecaster, Outlook
from forerun.costs import Costs

SLOPE = 0.02  # what a further token adds to a target pass, if `cost` is given and `slope` is not


class Seat(NamedTuple):
    """A row of the pass that may draft."""

    trims: bool = True  # whether drafted tokens may be left out: no coins decide them
    blind: bool = False  # whether its drafter says nothing of its tokens, and proposes them at once
    rides: bool = False  # whether the pass reads its prompt: tokens to judge add next to nothing
    unread: int = 0  # tokens of its prompt that the drafter must read first
    left: int = 1 << 30  # most tokens that it may write yet
    by_row: bool = False
    """Whether what a batch loses counts by its rows: where no prompt is read for a draft, 16 rows
    need no more rounds than one to see what drafts are worth."""
    outlook: Outlook = Outlook(0.0, 0.0)  # what its policy expects


class Outcome(NamedTuple):
    """What became of a pass; by row that decoded."""

    committed: Mapping[int, int]  # tokens that it got
    judged: Mapping[int, int]  # drafted tokens that the target judged
    steps: int  # of the drafter in the pass
    seconds: float | None = None
    """By the clock, but for reading; None where prompts were read, or there is no clock."""
    reading: float = 0.0  # seconds in which the drafter read prompts
    leaves: Mapping[int, int] = MappingProxyType({})  # second choices that it judged, too


class Plan(ABC):
    """What a governor decides in one round, by row."""

    most: dict[int, int]  # per seat the most tokens to draft; 0 is plain decoding
    tree: int = 0  # most nodes of a tree, those drafted among them; see `Controller.tree`

    @abstractmethod
    def go(self, chances: Mapping[int, Chance]) -> Collection[int]:
        """The seats that draft another token, of those that do, by the chances behind their newest
        one."""

    def free(self, drafts: Mapping[int, Sequence[float]]) -> dict[int, int]:
        """How many tokens to take of drafts that cost no step of a model, by seat; seats that are
        left out leave the round to the model.

        Args:
            drafts: by seat the chances that the first, first two, … tokens are all kept.
        """
        return {seat: len(kept) for seat, kept in drafts.items()}

    def nodes(
        self, drafted: Sequence[int], grown: Mapping[int, Sequence[float]]
    ) -> dict[int, list[int]]:
        """Per seat which nodes of its tree shall be judged, too, or at which places of its draft
        the second choices; none of seats that are left out.

        Args:
            drafted: per row the tokens to judge; 0 of one that takes nothing beside them.
            grown: per row with a tree the chances of the nodes beside these, falling.
        """
        return {}

    def trim(self, seat: int) -> int:
        """How many of the newest tokens of a seat that `trims` to leave out, when it has ended."""
        return 0


Policy = Annotated[Forecaster, Named("one that forecasts, like survival")]


@dataclass(frozen=True)
class Governor(Controller, ABC):
    """Decides for the rows that share a pass, by what a policy forecasts for each.

    Subclasses are frozen dataclasses. What outlives a round is in the *pace*, a `NamedTuple` that
    the engine keeps; a `Plan` lives for one round. Everything is in Python's own numbers.

    Args:
        policy: what forecasts acceptance.
        cost: c, one target pass over one draft step, > 0, or none to go by what is measured (the
            default). Given, nothing is carried from one request to the next and each decides for
            itself, which makes sampled texts repeatable.
        slope: v, what each further token to judge adds to a target pass, in target passes, ≥ 0, if
            `cost` is given (0.02, ours).
        high: the most tokens per round, ≥ 1.
    """

    policy: Policy
    cost: Annotated[float, Within(0, 1e9, above=True)] | None = None
    slope: Annotated[float, Within(0, 1000)] | None = None
    high: Count = 32

    signals: ClassVar[frozenset[str]] = frozenset()
    """What a draft shall say of its tokens besides what the policy reads."""

    @cached_property
    def given(self) -> Costs | None:
        """Costs to decide by instead of the measured ones. A request then decides for itself, and
        nothing is carried to the next."""
        if self.cost is None:
            return None
        return Costs.synthetic(self.cost, SLOPE if self.slope is None else self.slope)

    def start(self) -> Any:
        """The pace of an engine that begins."""
        return ()

    def join(self, pace: Any, share: float) -> Any:
        """The pace when a request joins, and is this share of the rows of the pass."""
        return pace

    def rests(self, pace: Any, costs: Costs) -> bool:
        """Whether no row drafts in this round, whoever it is, unless others' drafts have paid for
        its width; asked before `open`, which takes longer."""
        return False

    def reads(self, pace: Any, costs: Costs, seat: Seat, rows: int) -> bool:
        """Whether the drafter reads a prompt, in a seat of a pass of so many rows."""
        return True

    @abstractmethod
    def open(
        self, pace: Any, costs: Costs, seats: Mapping[int, Seat], rows: int, paid: int
    ) -> Plan:
        """Begin a round.

        Args:
            pace: of the rows.
            costs: of a pass of all rows.
            seats: the rows that may draft, at least one, by row.
            rows: all that share the pass.
            paid: most tokens that other rows draft in any case, in steps and a width that cost
                these rows nothing.
        """

    def observe(self, pace: Any, costs: Costs, plan: Plan | None, outcome: Outcome) -> Any:
        """The pace after a round; `plan` is None if no row could draft."""
        return pace
