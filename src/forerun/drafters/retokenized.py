"""A draft model of another tokenizer: by its text, or by the tokens that both models have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from forerun.drafters.base import Prompts, Proposal, RowsDrafter, Step, StepContext, Texts
from forerun.drafters.stepping import step_by_step
from forerun.errors import ModelError
from forerun.runtime.base import CHUNK, Rows
from forerun.types import Stop

if TYPE_CHECKING:
    from forerun.drafters.eagle import EagleDrafter

LEAST_SHARE = 0.5  # of a draft's tokens that its target must have, too, if it drafts by these
TAIL = 8  # tokens before a draft that are encoded with it: a token may begin in the text
BROKEN = "\ufffd"  # what a decoder says for a character that is cut


class RetokenizedDrafter(RowsDrafter):
    """Reads every text in the draft's own tokens; what they say is given in the target's.

    A text is decoded and encoded whole in each round, and only what differs from what the draft has
    read is read anew: a committed token may change how the text before it is cut.
    """

    def __init__(self, rows: Rows, vocab_size: int, target: Any, own: Any) -> None:
        # Not among `caches`: what its rows hold is not cut as the target's is.
        self.rows, self.limit, self._vocab = rows, rows.limit, vocab_size
        self._target, self._tokenizer = target, own
        self._held: list[list[int]] = []  # per row what the draft has read

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        super().join(prompts, room)
        self._held.extend([] for _ in prompts)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._held = [list(self._held[row]) for row in rows]

    def unread(self, row: int, text: Sequence[int]) -> int:
        """All of a text that was not begun; else about as much as a step feeds."""
        return 0 if self._held[row] else len(text)

    def rollback(self, row: int, length: int) -> None:
        """Left to the next round, which compares texts."""

    def follow(self, texts: Texts) -> None:
        """A text that is cut anywhere is not yet one of the draft's."""

    def _own(self, texts: Texts, most: Sequence[int]) -> list[list[int]]:
        """The texts in the draft's tokens, its rows rolled back to what still stands of them;
        nothing of rows that do not draft or are too long."""
        out = []
        for row, text in enumerate(texts):
            ids = [] if text is None else _encoded(self._tokenizer, _decoded(self._target, text))
            ids = ids if len(ids) + most[row] < self.rows.limit else []
            held, same = self._held[row], 0
            while same < min(len(held), len(ids) - 1) and held[same] == ids[same]:
                same += 1
            if ids:
                self._back_to(row, same)
            out.append(ids)
        self._read(out, leave=CHUNK)
        return out

    def _back_to(self, row: int, length: int) -> None:
        """The first `length` of the draft's tokens stand."""
        self.rows.rollback(row, length)

    def _fed(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """What is to be fed of texts in the draft's tokens, which are then held."""
        self._held = [ids or held for ids, held in zip(texts, self._held, strict=True)]
        return self._pieces(texts)


class TextDrafter(RetokenizedDrafter):
    """Drafts by text: what the draft writes greedily is encoded by the target's tokenizer.

    Its tokens are certain to the rule: there is no probability of a target's token.

    Args:
        rows, vocab_size, target, own: as of all of them.
        head: on the draft's states; it goes on from the draft's first token of a round, unjudged by
            the draft, for a fraction of the time. None: the draft writes all of them.
    """

    has_distribution = False
    blind = True

    def __init__(
        self, rows: Rows, vocab_size: int, target: Any, own: Any, head: EagleDrafter | None = None
    ) -> None:
        super().__init__(rows, vocab_size, target, own)
        self._head = head

    def join(self, prompts: Prompts, room: int, sources: Prompts | None = None) -> None:
        super().join(prompts, room)
        if self._head is not None:
            self._head.join(prompts, room)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        if self._head is not None:
            self._head.keep(rows)

    def _back_to(self, row: int, length: int) -> None:
        super()._back_to(row, length)
        if self._head is not None:
            self._head.rollback(row, length)

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """As many of the draft's tokens as are asked for of the target's."""
        began, out = guide.clock(), Proposal.none(len(texts))
        heads = self._own(texts, most)
        ahead = [list(ids) for ids in heads]
        ends = {self._tokenizer.eos_token_id, *(self.rows.facts.eos or ())}
        active = [row for row, ids in enumerate(heads) if ids]
        while active:
            pieces = self._fed([ids if row in active else [] for row, ids in enumerate(ahead)])
            best = self.rows.best(pieces, [1 if piece else 0 for piece in pieces], frozenset())
            drawn = [row for row in active if best.sound[row][0]]
            for row in drawn:
                ahead[row].append(best.tokens[row][0])
            active = [
                row
                for row in drawn
                if len(ahead[row]) - len(heads[row]) < most[row] and ahead[row][-1] not in ends
            ]
            if not out.steps:
                out.first_seconds = guide.clock() - began
            out.steps += 1
            if active and self._head is not None:
                left = [
                    n - len(own) + len(ids) if row in active else 0
                    for row, (n, own, ids) in enumerate(zip(most, ahead, heads, strict=True))
                ]
                more = self._head.likeliest(ahead, left)
                ahead = [[*own, *new] for own, new in zip(ahead, more, strict=True)]
                out.steps += max(map(len, more))
                break
        for row, text in enumerate(texts):
            if text is not None and (drafted := ahead[row][len(heads[row]) :]):
                written = _decoded(self._tokenizer, drafted)
                out.tokens[row] = self._continued(text, written)[: most[row]]
        return out

    def _continued(self, text: Sequence[int], written: str) -> list[int]:
        """The target's tokens of what is written behind a text."""
        tail = list(text[-TAIL:])
        whole = _encoded(self._target, _decoded(self._target, tail) + written)
        if whole[: len(tail)] == tail:
            return whole[len(tail) :]
        return _encoded(self._target, written)


class SharedTokensDrafter(RetokenizedDrafter):
    """Drafts those of its tokens that the target has, too, with their distribution.

    Raises:
        ModelError: these are too few of the draft's.
    """

    def __init__(self, rows: Rows, vocab_size: int, target: Any, own: Any) -> None:
        super().__init__(rows, vocab_size, target, own)
        theirs, ours = target.get_vocab(), own.get_vocab()
        shared = {
            i: theirs[text] for text, i in ours.items()
            if i < rows.vocab_size and theirs.get(text, vocab_size) < vocab_size
        }  # fmt: skip
        if len(shared) < LEAST_SHARE * len(ours):
            raise ModelError(
                f"the target has {len(shared)} of the draft's {len(ours)} tokens, and at least "
                f"{LEAST_SHARE:.0%} are needed to draft by them; leave by='tokens' out"
            )
        self._ids = torch.tensor(list(shared), device=rows.device)
        self._theirs = torch.tensor(list(shared.values()), device=rows.device)
        self._back = {there: here for here, there in shared.items()}
        self._heads: list[tuple[int, list[int]]] = []
        """In a proposal, per row how many of the target's tokens the text had, and the draft's for
        these."""

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        began = guide.clock()
        self._heads = self._begun(texts, most)
        try:
            return step_by_step(self.step, texts, most, guide, began)
        finally:
            self._heads = []

    def _begun(self, texts: Texts, most: Sequence[int]) -> list[tuple[int, list[int]]]:
        own = self._own(texts, most)
        return [(len(text or ()), ids) for text, ids in zip(texts, own, strict=True)]

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """What comes next; outside of a proposal, of texts that are cut anew."""
        heads = self._heads or self._begun(texts, [1] * len(texts))
        ahead = [
            [*ids, *(self._back[token] for token in text[n:])] if text and ids else []
            for text, (n, ids) in zip(texts, heads, strict=True)
        ]
        pieces = self._fed(ahead)
        logits = self.rows.feed(pieces, [1 if piece else 0 for piece in pieces])[:, 0]
        wide = logits.new_full((len(logits), self._vocab), -torch.inf)
        wide[:, self._theirs] = logits[:, self._ids]
        ended = [None if piece else Stop.EXHAUSTED for piece in pieces]
        return Step(wide, ended=ended, ran=any(pieces))


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids, up to a character that is cut."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False,
                            clean_up_tokenization_spaces=False)  # fmt: skip
    return str(text).rstrip(BROKEN)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
