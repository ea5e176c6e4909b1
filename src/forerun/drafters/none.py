"""`none`: plain decoding: the target alone, through the same engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.drafters.base import Drafter, DrafterSpec, Proposal, StepContext, Texts


class NullDrafter(Drafter):
    """Never proposes anything, so every round is one plain decoding step."""

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        return Proposal.none(len(texts))


@dataclass(frozen=True)
class NoDraft(DrafterSpec):
    """Plain decoding through the same engine."""

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        return NullDrafter()
