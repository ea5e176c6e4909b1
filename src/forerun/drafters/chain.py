"""`chain`: one without a model where it is sure, else another: FIRST+THEN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from operator import mul
from pathlib import Path
from typing import Annotated, Any

from forerun.checks import Named, Within
from forerun.drafters.base import Drafter, DrafterSpec, Prompts, Proposal, StepContext, Texts
from forerun.drafters.free import FreeDrafter, wanted
from forerun.errors import SettingError
from forerun.runtime.base import Rows

SECONDS = (
    "target", "caches", "limit", "model", "blind", "bonus", "hears", "counters", "ratio",
    "follow", "hear", "unread", "ahead",
)  # fmt: skip
"""What a chain has of its second drafter."""


class ChainDrafter(Drafter):
    """Asks the first drafter, and the second where that has nothing, or not enough.

    Args:
        first: one without a model.
        then: any other.
        enough: tokens of a draft of the first expected to be kept that go before the second's;
            governors know better.
    """

    has_distribution = False

    def __init__(self, first: FreeDrafter, then: Drafter, enough: float) -> None:
        self._first, self._then, self._enough = first, then, enough
        self._members = first, then
        for name in SECONDS:
            setattr(self, name, getattr(then, name))

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._then.seconds

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        for member in self._members:
            member.join(prompts, room, sources)

    def keep(self, rows: Sequence[int]) -> None:
        for member in self._members:
            member.keep(rows)

    def rollback(self, row: int, length: int) -> None:
        for member in self._members:
            member.rollback(row, length)

    def learn(self, text: Sequence[int], prompt: int) -> None:
        for member in self._members:
            member.learn(text, prompt)

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """The first drafter's tokens in rows that prefer them, as far as policies want them; the
        second's in the others."""
        began = guide.clock()
        known = self._first.known(texts, most)
        chances = {
            row: list(accumulate((token.chosen for token in shown), mul))
            for row, shown in enumerate(known.shown)
            if shown
        }
        taken = {
            row: len(own) for row, own in enumerate(known.tokens) if own and row not in chances
        }
        taken |= guide.free(chances, self._enough) if chances else {}
        for row, own in enumerate(known.tokens):
            del own[taken.get(row, 0) :]
        first = wanted(known, texts, most, guide, free=True)
        first.free, first.free_seconds = {*taken}, guide.clock() - began
        rest = [None if row in first.free else text for row, text in enumerate(texts)]
        if all(text is None for text in rest):
            return first
        out = self._then.propose(rest, most, guide)
        out.prepend({row: first.tokens[row] for row in first.free})
        for row in first.free:
            out.shown[row], out.stopped_by[row] = first.shown[row], first.stopped_by[row]
        out.free, out.free_steps = first.free, first.free_steps
        out.free_seconds = first.free_seconds
        return out


@dataclass(frozen=True)
class Chain(DrafterSpec):
    """What needs no model drafts where it is sure enough, another drafter in all other rounds.

    Args:
        first: `lookup`, `suffix`, `memory` or `rest`.
        then: any drafter, or a model's folder.
        enough: tokens of the first's draft that must be expected to be kept, ≥ 0, for it to go
            before the second's under a policy that knows no costs (ours). Lookup and rest say
            nothing of their tokens, and go first wherever they have any.

    Reference: ours.
    """

    first: Annotated[DrafterSpec, Named("a drafter, like suffix")]
    then: Annotated[DrafterSpec, Named("a drafter, like suffix")]
    enough: Annotated[float, Within(0, inf)] = 2.0

    @property
    def on_torch(self) -> bool:  # type: ignore[override]
        return self.then.on_torch

    def remembering(self) -> DrafterSpec:
        return replace(self, first=self.first.remembering(), then=self.then.remembering())

    def depths(self, target: str | Path) -> tuple[int, ...]:
        return self.then.depths(target)

    def check_target(self, target: str | Path) -> None:
        self.then.check_target(target)

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        first = self.first.build(target, target_tokenizer)
        if not isinstance(first, FreeDrafter) or first.hears:
            raise SettingError(
                "the first drafter of a chain must need no model: lookup, suffix, memory or rest; "
                "write FIRST+THEN, like memory+eagle"
            )
        return ChainDrafter(first, self.then.build(target, target_tokenizer), self.enough)
