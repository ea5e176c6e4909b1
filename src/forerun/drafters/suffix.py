"""`suffix`: continue as this text most often did, and say how surely; no model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.checks import Count, Share
from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.free import FreeDrafter
from forerun.drafters.ngrams import Guess, NGrams, follow

MOST_PLACES = 32  # newest earlier occurrences of a token, or of a pair, that are looked at
MISS_WEIGHT = 2.4
"""Hits that a miss outweighs, and"""
PRIOR, PRIOR_EXPONENT = 3.0, 1.5
"""of a match of m tokens the hits `3·m^−1.5` that something else is taken to have: both fitted to
texts of SmolLM2 on prompts of six kinds."""


class Occurrences:
    """Where tokens and pairs of them occurred in a growing text; an integer or two per token."""

    def __init__(self, source: Sequence[int] = ()) -> None:
        self._source = list(source)
        self._places: dict[int | tuple[int, int], list[int]] = {}
        self._covered = 1

    def whole(self, text: Sequence[int]) -> Sequence[int]:
        """A text behind its source."""
        return [*self._source, *text] if self._source else text

    def cover(self, text: Sequence[int]) -> None:
        """Take in what the text has grown by."""
        whole = self.whole(text)
        for place in range(self._covered, len(whole)):
            self._places.setdefault(whole[place - 1], []).append(place)
            if place > 1:
                self._places.setdefault((whole[place - 2], whole[place - 1]), []).append(place)
        self._covered = max(self._covered, len(whole))

    def match(self, whole: Sequence[int], longest: int) -> tuple[int, list[int]]:
        """The longest earlier match of the end of a text.

        Args:
            whole: a text that was covered and what is drafted behind it, source included.
            longest: most tokens of a match that count.

        Returns:
            Its tokens, and the places that follow its newest occurrences, rising; 0 and none.
        """
        pair = longest > 1 and len(whole) > 1 and self._places.get((whole[-2], whole[-1]))
        matched, last = 1 + bool(pair), len(whole) - 1
        best, newest = 0, list[int]()
        for place in (pair or self._places.get(whole[-1], []))[-MOST_PLACES:]:
            length = matched
            while length < longest and length < place:
                if whole[place - 1 - length] != whole[last - length]:
                    break
                length += 1
            if length > best:
                best, newest = length, []
            if length == best:
                newest.append(place)
        return best, newest

    def follow(self, text: Sequence[int], longest: int) -> Guess | None:
        """What most often followed the longest earlier match of the end of a text; see `match`."""
        whole = self.whole(text)
        length, places = self.match(whole, longest)
        if not places:
            return None
        hits: dict[int, int] = {}
        for place in places:  # of equally frequent ones the newest is last
            hits[whole[place]] = hits.pop(whole[place], 0) + 1
        token = max(reversed(hits), key=hits.__getitem__)
        hit, prior = hits[token], PRIOR * length**-PRIOR_EXPONENT
        return Guess(token, hit / (hit + MISS_WEIGHT * (len(places) - hit) + prior))


class SuffixDrafter(FreeDrafter):
    """Drafts the surest continuation by counts of this text, and of tables if there are any.

    Args:
        n: most tokens of a match that count.
        least: probability that all tokens of a draft are kept below which it ends.
        tables: of other texts.
        learn: told of every request's text in the end, if anyone is.
    """

    def __init__(
        self,
        n: int,
        least: float,
        tables: Sequence[NGrams] = (),
        learn: Callable[[Sequence[int], int], None] | None = None,
    ) -> None:
        super().__init__()
        self._n, self._least, self._tables, self._learn = n, least, tables, learn

    def fresh(self, source: Sequence[int]) -> Occurrences:
        return Occurrences(source)

    def draft(self, row: int, text: list[int], most: int) -> tuple[list[int], list[float]]:
        """The surer of what this text and what tables say, until the draft is too doubtful."""
        seen, ahead = self._rows[row], list(text)
        seen.cover(text)
        chances: list[float] = []
        kept = 1.0
        while len(chances) < most:
            guesses = filter(None, (seen.follow(ahead, self._n), follow(self._tables, ahead)))
            best = max(guesses, key=lambda guess: guess.probability, default=None)
            if best is None or (kept := kept * best.probability) < self._least:
                break
            ahead.append(best.token)
            chances.append(best.probability)
        return ahead[len(text) :], chances

    def learn(self, text: Sequence[int], prompt: int) -> None:
        if self._learn is not None:
            self._learn(text, prompt)


@dataclass(frozen=True)
class Suffix(DrafterSpec):
    """Continue the text as it itself most often went on after its last tokens. No model, no cost.

    Args:
        n: most tokens of a match that count, ≥ 1 (ours).
        least: a draft ends before the probability that all of it is kept falls below this, in
            [0, 1] (ours).

    Reference: Oliaro et al. 2025 (SuffixDecoding) [suffix2025].
    """

    n: Count = 16
    least: Share = 0.05

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        return SuffixDrafter(self.n, self.least)
