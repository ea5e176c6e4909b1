"""`lookahead`: n-grams of what the target guessed in its own passes; no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from forerun.checks import Count, Within
from forerun.drafters.base import Drafter, DrafterSpec, Prompts
from forerun.drafters.free import FreeDrafter

Run = tuple[int, ...]  # tokens that follow each other
STRIDE = 40503  # spreads the places of the text from which guesses begin: neighbours differ


@dataclass
class _LookaheadRow:
    """What is known of one text."""

    pool: dict[int, Run] = field(default_factory=dict)
    """By first token the rest of the n-gram last seen."""
    guesses: dict[int, Run] = field(default_factory=dict)
    """By place what the target last said there, behind the tokens that led to it."""
    drafted: list[Run] = field(default_factory=list)
    """What the target said at the tokens drafted last, behind the tokens that led to it."""
    begin: int = 0  # place of the first of these
    covered: int = 0  # tokens of the text whose n-grams are in the pool


class LookaheadDrafter(FreeDrafter):
    """Jacobi iteration in the passes that verify, and a pool of the n-grams it runs through."""

    hears = True

    def __init__(self, width: int, n: int, text: bool = True, fill: bool = True) -> None:
        super().__init__()
        self._width, self._n, self._text, self._fill = width, n, text, fill

    def fresh(self, source: Sequence[int]) -> _LookaheadRow:
        row = _LookaheadRow()
        if self._text:
            self._collect(row, source, 0)
        return row

    def hear(self, texts: Prompts, fed: Prompts, answers: Prompts) -> None:
        """One iteration: what was said behind a guess is the next place's guess from now on.

        A guess and those that led to it, each said by the target behind the one before it, an
        iteration earlier and a place earlier, are the n-grams of the pool.
        """
        for row, text, tokens, after in zip(self._rows, texts, fed, answers, strict=True):
            begin = len(text)
            known = row.drafted if row.begin == begin else []
            for i, (token, answer) in enumerate(zip(tokens, after[1:], strict=True)):
                led = known[i] if i < len(known) and known[i][-1] == token else (token,)
                run = (*led, answer)[-self._n :]
                row.guesses[begin + i + 1] = run
                if len(run) == self._n:
                    row.pool[run[0]] = run[1:]
            for place in [place for place in row.guesses if place <= begin]:
                del row.guesses[place]

    def draft(self, row: int, text: list[int], most: int) -> tuple[list[int], list[float]]:
        """N-grams of the pool as far as one begins where the last ends, then guesses."""
        seen, most = self._rows[row], min(most, self._width)
        if self._text:
            self._collect(seen, text, seen.covered)
            seen.covered = max(seen.covered, len(text))
        seen.begin, seen.drafted = len(text), []
        runs, last = seen.drafted, text[-1]
        while len(runs) < most and (rest := seen.pool.get(last)) is not None:
            runs += [(last, *rest[: i + 1])[-self._n :] for i in range(len(rest))]
            last = rest[-1]
        for place in range(len(text) + len(runs), len(text) + most):
            run = seen.guesses.get(place)
            if run is None and not self._fill:
                break
            runs.append(run or (text[place * STRIDE % len(text)],))
        del runs[most:]
        return [run[-1] for run in runs], []

    def _collect(self, row: _LookaheadRow, text: Sequence[int], covered: int) -> None:
        """The n-grams of a text that end beyond `covered`."""
        for end in range(max(covered + 1, self._n), len(text) + 1):
            row.pool[text[end - self._n]] = tuple(text[end - self._n + 1 : end])


@dataclass(frozen=True)
class Lookahead(DrafterSpec):
    """Lookahead decoding: the target's own passes say guesses, and n-grams of them are the draft.

    Args:
        width: most tokens of a draft, guesses included, ≥ 1; the window W. It holds beside the
            length controller's limit; reaching it stops with "exhausted". 8 is ours (the paper: 15
            at 7B on an A100).
        n: tokens of an n-gram, N ≥ 2. 4 is ours (the paper: 5), as for width by a few prompts of
            validation text.
        text: whether n-grams of the prompt and of the text so far are in the pool, too (the paper:
            the prompt as reference).
        fill: whether a place that nothing is known of begins with some token of the text, as the
            window does in the paper; without, nothing is guessed until an n-gram was drafted.

    Reference: Fu et al. 2024 (Lookahead) [lookahead2024]; Jacobi decoding: Santilli et al. 2023.
    """

    width: Count = 8
    n: Annotated[int, Within(2)] = 4
    text: bool = True
    fill: bool = True

    def build(self, target: Any, target_tokenizer: Any) -> Drafter:
        return LookaheadDrafter(self.width, self.n, self.text, self.fill)
