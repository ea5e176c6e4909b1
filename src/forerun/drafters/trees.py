"""Trees: what is nearly as likely as a draft, grown in the same steps, level by level."""

from collections.abc import Sequence


class Tree:
    """What may follow a text: nodes, each level behind the one before it. A node has the chance of
    all of its path, by the draft's own probabilities; those of the draft itself stay, of the others
    the likeliest (Li et al. 2024, EAGLE-2).

    Args:
        most: nodes, ≥ 1, but where the draft alone has more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens: list[int] = []
        self.parents: list[int] = []  # of each node the one that it follows; -1: the text
        self.chances: list[float] = []
        self.known = 0  # nodes whose children are known: all but the newest level
        self.places: list[int] = []
        """Of each node where the one that it follows was in the newest pass: 0, the text's last
        token, or behind it."""
        self._tip = -1  # the draft's newest node

    @property
    def column(self) -> int:
        """The draft's newest node among those of the newest level."""
        return max(self._tip - self.known, 0)

    def path(self, node: int) -> list[int]:
        """The tokens from the text to a node."""
        return [*self.path(self.parents[node]), self.tokens[node]] if node >= 0 else []

    def follow(self, token: int) -> None:
        """The draft goes on by a token."""
        if (node := self._child(self._tip, token)) < 0:
            node = len(self.tokens)
            self._add(self._tip, token, self.chances[self._tip] if self._tip >= 0 else 1.0)
            self.places.append(self._tip + 1)
        self._tip = node

    def grow(self, chances: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
        """Add the likeliest tokens behind each node of the newest level, falling."""
        newest = range(self.known, len(self.tokens)) if self.tokens else [-1]
        self.known = len(self.tokens)
        drafted = {self.known} if self._tip < 0 else set[int]()
        for node, shares, ids in zip(newest, chances, tokens, strict=False):
            above = self.chances[node] if node >= 0 else 1.0
            if node == self._tip:
                drafted = {len(self.tokens)}
            for share, token in zip(shares, ids, strict=True):
                if share > 0:
                    self._add(node, token, above * min(share, 1.0))
        node = self._tip
        while node >= 0:
            drafted.add(node)
            node = self.parents[node]
        # Those of a path fall, and of equal ones the first is kept: a node's parent stays with it.
        order = sorted(range(len(self.tokens)), key=lambda n: (n not in drafted, -self.chances[n]))
        kept = sorted(order[: max(self._most, len(drafted))])
        places = {-1: -1} | {old: new for new, old in enumerate(kept)}
        self.places = [self.parents[n] + 1 for n in kept]
        self.parents = [places[self.parents[n]] for n in kept]
        self.tokens, self.chances = ([of[n] for n in kept] for of in (self.tokens, self.chances))
        self.known, self._tip = sum(n < self.known for n in kept), places[self._tip]

    def beside(self, draft: Sequence[int]) -> tuple[list[tuple[int, int]], list[float]]:
        """Nodes that are not of a draft, as of `Proposal.nodes`, and their chances, falling."""
        places, tip = {-1: 0}, -1
        for depth, token in enumerate(draft, 1):
            if (tip := self._child(tip, token)) < 0:
                break
            places[tip] = depth
        others = [n for n in range(len(self.tokens)) if n not in places]
        others = sorted(others, key=lambda n: -self.chances[n])[: max(self._most - len(draft), 0)]
        places |= {node: n for n, node in enumerate(others, len(draft) + 1)}
        nodes = [(places[self.parents[n]], self.tokens[n]) for n in others]
        return nodes, [self.chances[n] for n in others]

    def _child(self, parent: int, token: int) -> int:
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((n for n, pair in enumerate(pairs) if pair == (parent, token)), -1)

    def _add(self, parent: int, token: int, chance: float) -> None:
        self.parents.append(parent)
        self.tokens.append(token)
        self.chances.append(chance)
