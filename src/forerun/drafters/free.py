"""What drafters without a model have in common."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from forerun.drafters.base import Drafter, Prompts, Proposal, StepContext, Texts
from forerun.types import Token

LEAST_PROBABILITY = 1e-6
"""And one less this is the most: log-odds stay finite."""


class FreeDrafter(Drafter):
    """One without a model: drafts cost next to nothing, and tokens are certain to the rule."""

    has_distribution = False
    blind = True

    def __init__(self) -> None:
        self._rows: list[Any] = []

    def fresh(self, source: Sequence[int]) -> Any:
        """What is to be known of a new row, whose source (of an encoder) counts like a prompt."""

    @abstractmethod
    def draft(self, row: int, text: list[int], most: int) -> tuple[list[int], list[float]]:
        """At most so many tokens, and how likely each is kept if those before it are; no numbers
        where nothing is said of that."""

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        self._rows.extend(self.fresh(source) for source in sources or [()] * len(prompts))

    def keep(self, rows: Sequence[int]) -> None:
        old = self._rows  # a row that is kept twice goes on by itself
        self._rows = [
            deepcopy(old[row]) if row in rows[:i] else old[row] for i, row in enumerate(rows)
        ]

    def known(self, texts: Texts, most: Sequence[int]) -> Proposal:
        """All that is known of what follows each text; whoever asks decides what of it to take."""
        out = Proposal.none(len(texts))
        for row, text in enumerate(texts):
            if text is not None:
                out.tokens[row], chances = self.draft(row, text, most[row])
                out.shown[row] = [Token(**_signals(chance)) for chance in chances]
        return out

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """Token by token as controllers want it; at once, where nothing is said of the tokens."""
        known = self.known(texts, most)
        return wanted(known, texts, most, guide) if any(known.shown) else known


def wanted(
    known: Proposal, texts: Texts, most: Sequence[int], guide: StepContext, free: bool = False
) -> Proposal:
    """Of tokens that are known already, those that policies want.

    Args:
        known: the tokens.
        texts, most, guide: as of `Drafter.propose`.
        free: as of `StepContext.settle`; the tokens are then counted apart.
    """
    out = Proposal.none(len(texts))
    active = [row for row, tokens in enumerate(known.tokens) if tokens]
    ahead = [list(text or ()) for text in texts]
    while active:
        for row in active:
            place = len(out.tokens[row])
            shown = known.shown[row][place] if known.shown[row] else Token()
            guide.note(row, known.tokens[row][place], shown, ahead[row], out)
        going = guide.settle(active, most, out, free)
        active = [row for row in going if len(out.tokens[row]) < len(known.tokens[row])]
        out.free_steps += free
    return out


def _signals(probability: float) -> dict[str, float]:
    """What a distribution over two tokens says of one with this probability."""
    likely = min(max(probability, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY)
    other = 1 - likely
    entropy = -likely * math.log(likely) - other * math.log(other)
    return {
        "top1": max(likely, other),
        "chosen": likely,
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(2),
        "logit_margin": max(math.log(likely / other), 0.0),
        "softmax_margin": max(1 - other / likely, 0.0),
    }
