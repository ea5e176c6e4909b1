"""Drafting from counts of what followed the text's last tokens before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.checks import between, whole
from forerun.drafters.base import Drafter, DrafterSpec, Prompts, Proposal, Step, StepContext, Texts
from forerun.drafters.ngrams import Guess, NGrams, follow
from forerun.drafters.stepping import step_by_step
from forerun.runtime.base import Best
from forerun.types import Stop

MOST_PLACES = 32
"""Newest earlier occurrences of a token, or of a pair, that are looked at."""
MISS_WEIGHT = 2.4
"""Hits that a miss outweighs, and"""
PRIOR, PRIOR_EXPONENT = 3.0, 1.5
"""of a match of m tokens the hits `3·m^−1.5` that something else is taken to have: both fitted to
texts of SmolLM2 on prompts of six kinds."""
LEAST_PROBABILITY = 1e-6
"""And one less this is the most: log-odds stay finite."""


class Occurrences:
    """Where tokens and pairs of them occurred in a growing text; an integer or two per token."""

    def __init__(self, source: Sequence[int] = ()) -> None:
        self._source = list(source)
        self._places: dict[int | tuple[int, int], list[int]] = {}
        self._covered = 1

    def cover(self, text: Sequence[int]) -> None:
        """Take in what the text has grown by."""
        whole = self._whole(text)
        for place in range(self._covered, len(whole)):
            self._places.setdefault(whole[place - 1], []).append(place)
            if place > 1:
                self._places.setdefault((whole[place - 2], whole[place - 1]), []).append(place)
        self._covered = max(self._covered, len(whole))

    def follow(self, text: Sequence[int], longest: int) -> Guess | None:
        """What most often followed the longest earlier match of the end of a text.

        Args:
            text: a text that was covered, and what is drafted behind it.
            longest: most tokens of a match that count.
        """
        whole = self._whole(text)
        places = self._places.get((whole[-2], whole[-1])) if len(whole) > 1 else None
        matched = 2 if places else 1
        places = places or self._places.get(whole[-1])
        if places is None:
            return None
        hits: dict[int, int] = {}
        best, last = 0, len(whole) - 1
        for place in places[-MOST_PLACES:]:
            length = matched
            while length < longest and length < place:
                if whole[place - 1 - length] != whole[last - length]:
                    break
                length += 1
            if length > best:
                best, hits = length, {}
            if length == best:  # of equally frequent ones the newest is last
                hits[whole[place]] = hits.pop(whole[place], 0) + 1
        token = max(reversed(hits), key=hits.__getitem__)
        hit = hits[token]
        misses = sum(hits.values()) - hit
        prior = PRIOR * best**-PRIOR_EXPONENT
        return Guess(token, hit / (hit + MISS_WEIGHT * misses + prior))

    def _whole(self, text: Sequence[int]) -> Sequence[int]:
        return [*self._source, *text] if self._source else text


class SuffixDrafter(Drafter):
    """Drafts the surest continuation by counts of this text, and of tables if there are any.

    Its tokens are certain to the rule; controllers are shown the estimated probabilities, as if all
    else were one other token.

    Args:
        n: most tokens of a match that count.
        least: probability that all tokens of a draft are kept below which it ends.
        tables: of other texts.
        learn: told of every request's text in the end, if anyone is.
    """

    has_distribution = False
    blind = True

    def __init__(
        self,
        n: int,
        least: float,
        tables: Sequence[NGrams] = (),
        learn: Callable[[Sequence[int], int], None] | None = None,
    ) -> None:
        self._n, self._least, self._tables, self._learn = n, least, tables, learn
        self._rows: list[Occurrences] = []
        self._kept: list[float] = []
        """Per row the estimated probability that the draft so far is kept."""

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        """Counts per new row, with its source in them."""
        self._rows.extend(Occurrences(source) for source in sources or [()] * len(prompts))

    def keep(self, rows: Sequence[int]) -> None:
        old = self._rows
        self._rows = [
            deepcopy(old[row]) if row in rows[:i] else old[row] for i, row in enumerate(rows)
        ]

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """Token by token, as controllers want it."""
        for row, text in zip(self._rows, texts, strict=True):
            if text is not None:
                row.cover(text)
        self._kept = [1.0] * len(texts)
        return step_by_step(self, texts, most, guide)

    def learn(self, text: Sequence[int], prompt: int) -> None:
        if self._learn is not None:
            self._learn(text, prompt)

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """The surest token behind each text."""
        guesses = [None if text is None else self._guess(i, text) for i, text in enumerate(texts)]
        shown: dict[str, list[list[float]]] = {}
        for guess in guesses:
            for name, value in _signals(guess.probability if guess else 0.5).items():
                shown.setdefault(name, []).append([value])
        tokens = [[guess.token if guess else 0] for guess in guesses]
        ended = [None if guess else Stop.EXHAUSTED for guess in guesses]
        return Step(best=Best(tokens, shown, [[True]] * len(texts)), ended=ended)

    def _guess(self, row: int, text: Sequence[int]) -> Guess | None:
        """The surer of what this text and what tables say, unless the draft is too doubtful."""
        guesses = self._rows[row].follow(text, self._n), follow(self._tables, text)
        best = max(filter(None, guesses), key=lambda guess: guess.probability, default=None)
        if best is not None:
            self._kept[row] *= best.probability
        return best if self._kept[row] >= self._least else None


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


@dataclass(frozen=True)
class Suffix(DrafterSpec):
    """Continue the text as it itself most often went on after its last tokens. No model, no cost.

    Args:
        n: most tokens of a match that count, ≥ 1 (ours).
        least: a draft ends before the probability that all of it is kept falls below this, in
            [0, 1] (ours).

    Reference: Oliaro et al. 2025, SuffixDecoding.
    """

    summary: ClassVar[str] = "continue as this text most often did, and say how surely; no model"
    paper: ClassVar[str] = "Oliaro et al. 2025 (SuffixDecoding)"
    bibtex: ClassVar[str] = "suffix2025"

    n: int = 16
    least: float = 0.05

    def __post_init__(self) -> None:
        whole("suffix n", self.n, 1)
        between("suffix least", self.least, 0, 1)

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        return SuffixDrafter(self.n, self.least)
