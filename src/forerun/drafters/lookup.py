"""Drafting from the text itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.drafters.base import Drafter, DrafterSpec, Prompts, Proposal, StepContext, Texts
from forerun.errors import require


class LookupDrafter(Drafter):
    """Continues the most recent earlier occurrence of the text's last tokens.

    Each row keeps an index from every n-gram of its committed context to where it last ended, so a
    draft costs a few dictionary look-ups however long the context is.
    """

    has_distribution = False
    blind = True

    def __init__(self, most: int, least: int) -> None:
        self._most, self._least = most, least
        self._index: list[dict[tuple[int, ...], int]] = []
        self._covered: list[int] = []
        self._sources: list[list[int]] = []
        """What stands before each row's text: the source, with an encoder."""

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        """Start an index per new row, with its source in it."""
        self._index.extend({} for _ in prompts)
        self._covered.extend(0 for _ in prompts)
        self._sources.extend(list(source) for source in sources or [()] * len(prompts))

    def keep(self, rows: Sequence[int]) -> None:
        index = self._index  # a row that is kept twice gets an index of its own
        self._index = [
            dict(index[row]) if row in rows[:i] else index[row] for i, row in enumerate(rows)
        ]
        self._covered = [self._covered[row] for row in rows]
        self._sources = [self._sources[row] for row in rows]

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        out = Proposal.none(len(texts))
        for row, text in enumerate(texts):
            if text is None:
                continue
            whole = [*self._sources[row], *text] if self._sources[row] else text
            if (place := self._match(row, whole)) is None:
                continue
            # A continuation may run into the text it is itself drafting: periodic text goes on.
            period = len(whole) - place
            for i in range(most[row]):
                out.tokens[row].append(whole[place + i % period])
        return out

    def _match(self, row: int, context: Sequence[int]) -> int | None:
        """Index after the latest earlier occurrence of the longest matching suffix."""
        index, end = self._index[row], len(context)
        # The suffix itself is left out of the index, or it would find itself.
        for stop in range(max(self._covered[row], 1), end):
            for n in range(self._least, self._most + 1):
                if n <= stop:
                    index[tuple(context[stop - n : stop])] = stop
        self._covered[row] = max(self._covered[row], end)
        for n in range(min(self._most, end - 1), self._least - 1, -1):
            if (place := index.get(tuple(context[end - n :]))) is not None:
                return place
        return None


@dataclass(frozen=True)
class Lookup(DrafterSpec):
    """Prompt lookup: continue the longest earlier match of the last tokens. No model, no cost.

    Args:
        n: longest suffix to match, in tokens, ≥ 1 (Saxena 2023 and transformers use 3 and 2).
        least: shortest suffix to match, 1 ≤ least ≤ n. 1 drafts more and is wrong more often.

    Reference: Saxena 2023, Prompt Lookup Decoding.
    """

    summary: ClassVar[str] = "continue the longest earlier match of the last tokens; no model"
    paper: ClassVar[str] = "Saxena 2023 (prompt lookup decoding)"
    bibtex: ClassVar[str] = "saxena2023"

    n: int = 3
    least: int = 2

    def __post_init__(self) -> None:
        require(isinstance(self.n, int) and self.n >= 1, "lookup n", self.n, "an integer ≥ 1")
        require(1 <= self.least <= self.n, "lookup least", self.least, f"between 1 and n={self.n}")

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        return LookupDrafter(self.n, self.least)
