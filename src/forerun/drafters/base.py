"""The contract of a drafter: who runs ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from forerun.checks import Named, check
from forerun.errors import SettingError
from forerun.runtime import gguf
from forerun.runtime.drafts import no_encoder, own_draft, read_about
from forerun.types import Array, Stop, Token

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from forerun.drafters.trees import Tree
    from forerun.runtime.base import Best, Rows

Texts = Sequence[list[int] | None]
"""Per row the committed text to draft from; None for rows that do not draft this round."""
Prompts = Sequence[Sequence[int]]  # token ids by row


@dataclass
class Proposal:
    """What a drafter proposes for one round. Lists are per row."""

    tokens: list[list[int]]  # token ids, at most as many as were asked for
    stopped_by: list[Stop | None]
    """Why the drafter ended a row's draft before its limit; None where it did not: a draft that is
    shorter than its limit is then taken to be exhausted."""
    shown: list[list[Token]] = field(default_factory=list)
    """What the draft's distribution says of each token, for controllers; empty rows where it says
    nothing (lookup)."""
    probs: Array | None = None
    """`(rows, steps, V)` processed probabilities the tokens were drawn with, until the next round;
    None where all tokens were certain."""
    nodes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Rows in which more is judged than a chain: `(place, token)` of each node beside it, which
    follows that many of the drafted tokens; where place exceeds their number, by n, it follows the
    n-th of these nodes, an earlier one."""
    trees: dict[int, Tree] = field(default_factory=dict)
    """By row what the drafter would have judged beside its draft."""
    raw: list[Any] = field(default_factory=list)
    """Per step `(rows, V)` the draft's logits at temperature 1, a tensor or an array, where rules
    read more than `probs`; until the next round."""
    predicted: set[int] = field(default_factory=set)
    """Rows whose tokens are of their request's own prediction, not the drafter's."""
    forced: dict[int, int] = field(default_factory=dict)
    """Rows whose first tokens are of their request's constraint, and how many are."""
    steps: int = 0
    """Steps of the drafter; of one without a model, as many as tokens in its longest draft."""
    first_seconds: float = 0.0  # seconds of the first of these, with all that was read before it
    free: set[int] = field(default_factory=set)
    """In a chain, rows whose drafts are of the drafter without a model."""
    free_steps: int = 0
    """In a chain, tokens of the longest draft by the drafter without a model, and"""
    free_seconds: float = 0.0
    """the seconds of these."""

    @property
    def widths(self) -> list[int]:
        """Tokens of each row that the target judges."""
        return [len(own) + len(self.nodes.get(i, ())) for i, own in enumerate(self.tokens)]

    @classmethod
    def none(cls, rows: int) -> Proposal:
        return cls([[] for _ in range(rows)], [None] * rows, [[] for _ in range(rows)])

    def prepend(self, certain: Mapping[int, Sequence[int]]) -> None:
        """Put tokens by row before the drafted ones.

        Where these come with a distribution, that of the others is all on the token, so that rules
        judge them as they judge a lookup.
        """
        for row, tokens in certain.items():
            self.tokens[row] = [*tokens, *self.tokens[row]]
        if self.probs is None or not any(certain.values()):
            return
        longest, steps = max(map(len, self.tokens)), self.probs.shape[1]
        probs = self.probs[:, [min(place, steps - 1) for place in range(max(longest, steps))]]
        for row, tokens in certain.items():
            first, last = len(tokens), len(self.tokens[row])
            probs[row, first:last] = self.probs[row, : last - first]
            probs[row, :first] = 0.0
            for place, token in enumerate(tokens):
                probs[row, place, token] = 1.0
        self.probs = probs


@dataclass
class Step:
    """What may come next in each row: a distribution, or what is needed of one."""

    logits: torch.Tensor | None = None  # `(rows, V)` raw logits over the target's vocabulary
    best: Best | None = None
    """The most likely token of each row, one column; enough where all rows decode greedily."""
    ended: Sequence[Stop | None] | None = None
    """Why the drafter ends a row's draft here; None in a row that goes on, or None if all do. It
    must be decided before anyone knows which token would be drawn, or samples are biased."""
    ran: bool = True
    """Whether anything was computed: a step that only ends drafts is none, and takes no time."""


class StepContext(Protocol):
    """What the engine lends to a drafter for a round: sampling, and the controllers' decisions.

    Drafters that propose whole blocks need none of it; step by step, `stepping` uses it.
    """

    clock: Callable[[], float]  # seconds, as the engine takes them
    greedy: frozenset[str] | None
    """If `Step.best` is enough: the fields of `Signals` wanted with it. Else None."""

    def trees(self, limit: int) -> Sequence[int]:
        """Per row the most nodes of a tree to draft, its draft among them, by a drafter of so many
        tokens of context; 0: a chain. Empty if all are."""

    def likeliest(
        self, logits: torch.Tensor, paths: Sequence[Sequence[Sequence[int]]], count: int
    ) -> tuple[list[list[list[float]]], list[list[list[int]]]]:
        """`[row][column]` the chances and ids of the `count` tokens that are likeliest by `(rows,
        n, V)` raw logits, under each row's settings; `paths` are the drafted tokens that columns
        follow."""

    def choose(
        self, step: Step, texts: Texts, active: Sequence[int], proposal: Proposal
    ) -> list[int]:
        """Draw a token for every active row that has one, add it to the row's text and proposal,
        and note what the draft says of it. Returns these rows."""

    def note(self, row: int, token: int, shown: Token, text: list[int], proposal: Proposal) -> None:
        """Add a token to a row's text and proposal, with what the draft says of it."""

    def settle(
        self, active: list[int], most: Sequence[int], proposal: Proposal, free: bool = False
    ) -> list[int]:
        """Rows that draft on after their newest token; those that stop are told why.

        `free` says that their tokens cost no step of a model.
        """

    def free(self, drafts: Mapping[int, Sequence[float]], enough: float) -> Mapping[int, int]:
        """How many tokens of free drafts to take, by row; rows that are left out had rather have a
        model's.

        Args:
            drafts: by row that may draft the chances that the first, first two, … tokens of its
                draft are all kept.
            enough: tokens expected to be kept for which a policy without a governor takes it.
        """


class Drafter(ABC):
    """Proposes a block of tokens for each of the engine's rows.

    A drafter may hold state per row (a cache), under the one invariant of every cache here: it
    covers `context[:n]`, and `propose` brings it up to date with whatever text it is shown.
    """

    limit: int = 1 << 30
    """Most tokens of context this drafter can follow; beyond it, rows decode plainly."""
    bonus: bool = True
    """Whether a draft that is accepted whole is followed by a token of the target's own in the same
    round. Without, the last token of a draft that was cut short from outside (`CENSORING`), by the
    drafter's own bound above all, is not fed. A difficult token is fed in any case, and a draft
    that its controller ends has its bonus token: controllers count on it."""
    has_distribution: bool = True
    """Whether tokens come with a distribution; rules that read it need one."""
    blind: bool = False
    """Whether governors decide how far it drafts before they see what it says of its tokens."""
    ahead: int = 0  # tokens of a row alone that a pass of its own writes; 0: each step is a pass
    seconds: float = 0.0  # wall time spent in model forward passes so far
    caches: Sequence[Rows] = ()
    """Rows of its own that follow the engine's, for prefixes to be copied from and into."""
    model: Rows | None = None
    """A model of its own whose passes over tokens are its steps, if they need nothing else."""
    hears: bool = False  # whether it is told what the target said; see `hear`
    target: Rows | None = None
    """The runtime to verify with, if it is one this drafter made because it shares it."""

    def unread(self, row: int, text: Sequence[int]) -> int:
        """How many tokens of a row's text, its newest among them, the next draft reads first; 0 of
        a drafter that need read none."""
        return 0

    def able(self, row: int, text: list[int]) -> bool:
        """Whether it has anything to propose behind a row's text, as far as that is known at once;
        a governor is asked only then."""
        return True

    def counters(self, row: int) -> Mapping[str, int]:
        """What this drafter counts of a row since it joined, by name; empty if nothing."""
        return {}

    def ratio(self, target: Rows) -> float:
        """Target passes over draft steps, > 0, by sizes alone: an estimate that never changes."""
        return 100.0  # no model: next to nothing

    @abstractmethod
    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """Propose what comes next in each row.

        Args:
            texts: per row the committed text, None for rows that are not drafting; only to be
                read, and only now.
            most: per row the most tokens to propose, ≥ 1 where there is a text.
            guide: for drafters that go token by token.
        """

    def hear(self, texts: Prompts, fed: Prompts, answers: Prompts) -> None:
        """What the target said of the rows it judged, if `hears`; a `rollback` of each follows.

        Args:
            texts: per row its committed text; only to be read, and only now.
            fed: per row the drafted tokens behind it that were fed.
            answers: per row the target's most likely token after its text and after each of these,
                so one more; nothing for rows that were not judged. Penalties left out.
        """

    def learn(self, text: Sequence[int], prompt: int) -> None:
        """A request is done: its text, all of which but the first `prompt` tokens it wrote."""

    def follow(self, texts: Texts) -> None:
        """Rows are reading a long prompt; a drafter with a cache may read along."""

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        """Rows were added at the end; each is expected to grow by `room` tokens.

        `sources` are what their target's encoder read; only of encoder-decoder targets.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows stay, in this order; a row may be kept twice."""

    def rollback(self, row: int, length: int) -> None:
        """The first `length` tokens of a row stand; what followed them was rejected."""


class RowsDrafter(Drafter):
    """A drafter whose passes are those of rows of its own, which follow the engine's."""

    rows: Rows

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.rows.seconds

    def ratio(self, target: Rows) -> float:
        """Weights that a pass of the target reads over those of a pass of these rows."""
        sizes = target.facts.weights, self.rows.facts.weights
        return sizes[0] / sizes[1] if all(sizes) else 5.0

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        """Empty rows: what they read, they read when they first draft, or along with the target."""
        self.rows.join(len(prompts), max(map(len, prompts)) + room)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.keep(rows)

    def rollback(self, row: int, length: int) -> None:
        self.rows.rollback(row, length)

    def unread(self, row: int, text: Sequence[int]) -> int:
        return len(text) - self.rows.lengths[row]

    def follow(self, texts: Texts) -> None:
        """Read along with the target, so that no row has all of its prompt to read at once."""
        self._read(texts, leave=0)

    def _pieces(self, texts: Texts) -> list[list[int]]:
        """What each row's cache lacks of its text."""
        lengths = self.rows.lengths
        return [[] if t is None else t[n:] for t, n in zip(texts, lengths, strict=True)]

    def _give(self, pieces: Prompts) -> None:
        """Give the next pass what it reads beside these tokens, if anything."""

    def _read(self, texts: Texts, leave: int) -> None:
        """Read in chunks, without logits, until no row has more than `leave` tokens to go."""
        from forerun.runtime.base import CHUNK

        while max(map(len, pieces := self._pieces(texts))) > leave:
            # Of rows that have no more than that, the next step is to read all.
            chunks = [piece[:CHUNK] if len(piece) > leave else [] for piece in pieces]
            self._give(chunks)
            self.rows.feed(chunks, [0] * len(chunks))


class DrafterSpec(ABC):
    """The settings of a drafter: a frozen dataclass, built before any model is loaded; its
    annotations say what they may be (`checks.check`)."""

    on_torch: ClassVar[bool] = False
    """Whether it reads the target from within, and so runs on torch unless told otherwise."""

    @property
    def kind(self) -> str:
        """Its name in messages and of its folder: that of its module."""
        return type(self).__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        check(self, self.kind)

    def remembering(self) -> DrafterSpec:
        """The same, but learning from what the target writes, if it can."""
        return self

    def depths(self, target: str | Path) -> tuple[int, ...]:
        """Depths whose states it reads of a target, if they are known before that is loaded; what
        is loaded to leave them need not be compiled again."""
        return ()

    def check_target(self, target: str | Path) -> None:
        """Refuse a target before it is loaded, where its name tells; raises as `build`."""

    @abstractmethod
    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """Make the drafter for a target and its tokenizer (or None).

        Raises:
            ModelError: what it reads is missing, damaged, or another target's.
            UnsupportedModelError: the target's family does not let it be read from within.
            SettingError: this target, its runtime or its head does not go with the settings.
        """


@dataclass(frozen=True)
class TrainedDraft(DrafterSpec):
    """The settings of a drafter that was trained for its target.

    Args:
        path: a folder of `forerun train-draft`, trained for this target. None: the folder of the
            drafter's name in the target's own, as the shipped ones have it.
    """

    on_encoder: ClassVar[bool] = False  # whether it decodes on the target's encoder
    path: Annotated[str, Named("a folder of forerun train-draft, or none")] | None = None

    def check_target(self, target: str | Path) -> None:
        """A GGUF file brings no folder and has no encoder; what is named must be there."""
        file = gguf.locate(target)
        if file and self.on_encoder:
            raise no_encoder(self.kind)
        if file or self.path:
            self.check_folder(self.folder(target))

    def check_folder(self, folder: str) -> None:
        """Refuse a folder that holds no draft of the kind: raises `ModelError`."""
        read_about(folder, self.kind)

    def folder(self, target: str | Path) -> str:
        """Where it is; `SettingError` if none is named and none comes with the target."""
        if (folder := self.path or own_draft(target, self.kind)) is None:
            raise SettingError(
                f"drafter {self.kind} needs a draft that was trained for its target, and none "
                f"comes with this one; make one with forerun train-draft {self.kind}, and name its "
                f"folder: {self.kind}(path='FOLDER')"
            )
        return folder
