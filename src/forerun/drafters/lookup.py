"""`lookup`: continue the longest earlier match of the last tokens; no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.checks import Count
from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.free import FreeDrafter
from forerun.drafters.suffix import Occurrences


class LookupDrafter(FreeDrafter):
    """Continues the most recent earlier occurrence of the text's last tokens."""

    def __init__(self, most: int, least: int) -> None:
        super().__init__()
        self._most, self._least = most, least

    def fresh(self, source: Sequence[int]) -> Occurrences:
        return Occurrences(source)

    def able(self, row: int, text: list[int]) -> bool:
        return self._match(row, text)[1] is not None

    def draft(self, row: int, text: list[int], most: int) -> tuple[list[int], list[float]]:
        """What followed the longest match, of several the latest; nothing of how sure that is."""
        whole, place = self._match(row, text)
        if place is None:
            return [], []
        # A continuation may run into the text it is itself drafting: periodic text goes on.
        period = len(whole) - place
        return [whole[place + i % period] for i in range(most)], []

    def _match(self, row: int, text: list[int]) -> tuple[list[int], int | None]:
        """A row's source and text, and where the latest of the longest matches ends."""
        seen = self._rows[row]
        seen.cover(text)
        whole = seen.whole(text)
        length, places = seen.match(whole, self._most)
        return whole, places[-1] if length >= self._least else None


@dataclass(frozen=True)
class Lookup(DrafterSpec):
    """Prompt lookup: continue the longest earlier match of the last tokens. No model, no cost.

    Args:
        n: longest suffix to match, in tokens, ≥ 1 (Saxena 2023 and transformers use 3 and 2).
        least: shortest suffix to match, 1 ≤ least ≤ n. 1 drafts more and is wrong more often.

    Reference: Saxena 2023 (prompt lookup decoding) [saxena2023].
    """

    n: Count = 3
    least: Count = 2
    rising = ("least", "n")

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        return LookupDrafter(self.n, self.least)
