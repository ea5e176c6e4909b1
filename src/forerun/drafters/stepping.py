"""The autoregressive loop: a token at a time, until every row has stopped; along branches, too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from forerun.drafters.base import Proposal, RowsDrafter, Step, StepContext, Texts
from forerun.drafters.trees import Tree
from forerun.runtime.base import CHUNK

if TYPE_CHECKING:
    import torch

    from forerun.runtime.attention import Parents

CHILDREN = 8  # most of a node of a tree
NO_PLACES: Mapping[int, Sequence[int]] = {}  # of chains alone; see `Tree.places`


Steps = Callable[[Texts, frozenset[str] | None], Step]
"""What follows each text, by `StepContext.greedy`. None texts get no answer."""


def by_place(ask: Callable[[int, Texts], torch.Tensor]) -> Steps:
    """Steps through a block: `(rows, V)` logits by the place in it, from 0 on, and the texts."""
    places = count()
    return lambda texts, greedy: Step(ask(next(places), texts))


def step_by_step(
    step: Steps, texts: Texts, most: Sequence[int], guide: StepContext, since: float | None = None
) -> Proposal:
    """Draft for every row until its limit, its controller, a step or the text says stop. The first
    step began at `since`, by the guide's clock, if texts were read before it."""
    out = Proposal.none(len(texts))
    ahead: list[list[int] | None] = [None if t is None else list(t) for t in texts]
    active = [row for row, text in enumerate(ahead) if text is not None]
    began = guide.clock() if since is None else since
    while active:
        answer, drawing = step(ahead, guide.greedy), active
        if answer.ended is not None:
            # A row that ends here draws nothing: neither a token nor a coin.
            for row in active:
                out.stopped_by[row] = answer.ended[row]
            drawing = [row for row in active if answer.ended[row] is None]
        if drawing:
            drawing = guide.choose(answer, ahead, drawing, out)
        if answer.ran:
            out.first_seconds = out.first_seconds or guide.clock() - began
            out.steps += 1
        going = guide.settle(drawing, most, out)
        if going != active:
            ahead = [text if row in going else None for row, text in enumerate(ahead)]
        active = going
    return out


class SteppedDrafter(RowsDrafter):
    """Steps rows of its own, along branches, too, if their executor can."""

    @abstractmethod
    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """As of `Steps`."""

    @abstractmethod
    def branch(
        self, texts: Texts, wanted: Sequence[int], parents: Parents = (),
        places: Mapping[int, Sequence[int]] = NO_PLACES,
    ) -> torch.Tensor:  # fmt: skip
        """`(rows, n, V)` logits behind the last `wanted` tokens of each row's text, n the most of
        them. What of a text is not read is a tree by `parents`, as of `Executor.run`; `places` are
        of rows with nodes, as of `Tree.places`."""

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        """Read what rows lack of their texts, then draft token by token, with trees in the rows for
        which the guide wants some."""
        began = guide.clock()
        self._read(texts, leave=CHUNK)
        nodes = guide.trees(self.rows.limit) if self.rows.executor.trees else ()
        if not any(nodes):
            return step_by_step(self.step, texts, most, guide, began)
        along = Branching(self, texts, guide, nodes)
        out = step_by_step(along.step, texts, most, guide, began)
        out.trees = along.trees
        return out


class Branching:
    """Steps along a draft and, in the same passes, along what is nearly as likely. A pass is fed
    all of a tree behind the text's last token, as far as its children are wanted or known."""

    def __init__(
        self, drafter: SteppedDrafter, texts: Texts, guide: StepContext, nodes: Sequence[int]
    ) -> None:
        self._drafter, self._guide = drafter, guide
        self._begins = [len(text or ()) for text in texts]
        pairs = enumerate(zip(nodes, texts, strict=True))
        self.trees = {row: Tree(n) for row, (n, text) in pairs if n and text is not None}

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        fed, wanted = list(texts), [int(text is not None) for text in texts]
        parents: list[list[int]] = [[] for _ in texts]
        paths = [[(text or [])[n:]] for n, text in zip(self._begins, texts, strict=True)]
        grown = {row: tree for row, tree in self.trees.items() if texts[row] is not None}
        places = {}
        for row, tree in grown.items():
            begin, text = self._begins[row], texts[row]
            assert text is not None
            if len(text) > begin:
                tree.follow(text[-1])
                fed[row] = [*text[:begin], *(token for _, token, _ in tree.nodes)]
                parents[row] = [-1, *(parent + 1 for parent, *_ in tree.nodes)]
                paths[row] = [tree.path(n) for n in range(tree.known, len(tree.nodes))]
                wanted[row], places[row] = len(paths[row]), tree.places
        logits = self._drafter.branch(fed, wanted, parents, places)
        columns = [0] * len(texts)
        chances, tokens = self._guide.likeliest(logits, paths, CHILDREN)
        for row, tree in grown.items():
            columns[row] = tree.column
            tree.grow(chances[row][: wanted[row]], tokens[row][: wanted[row]])
            self._drafter.rollback(row, self._begins[row] - 1)
        return Step(logits[range(len(columns)), columns])
