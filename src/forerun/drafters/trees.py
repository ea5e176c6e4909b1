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
        self.nodes: list[tuple[int, int, float]] = []
        """The node that each follows (-1: the text), its token, its chance."""
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
        return [*self.path(self.nodes[node][0]), self.nodes[node][1]] if node >= 0 else []

    def follow(self, token: int) -> None:
        """The draft goes on by a token."""
        if (node := self._child(self._tip, token)) < 0:
            node = len(self.nodes)
            self.nodes.append((self._tip, token, self._chance(self._tip)))
            self.places.append(self._tip + 1)
        self._tip = node

    def grow(self, chances: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
        """Add the likeliest tokens behind each node of the newest level, falling."""
        newest, nodes = range(self.known, len(self.nodes)) if self.nodes else [-1], self.nodes
        self.known, tip, draft = len(nodes), self._tip, set[int]()
        for node, shares, ids in zip(newest, chances, tokens, strict=True):
            if node == tip:
                draft.add(len(nodes))
            above = self._chance(node)
            pairs = zip(shares, ids, strict=True)
            nodes += [(node, token, above * min(p, 1.0)) for p, token in pairs if p > 0]
        while tip >= 0:
            draft.add(tip)
            tip = nodes[tip][0]
        # Those of a path fall, and of equal ones the first is kept: a node's parent stays with it.
        order = sorted(range(len(nodes)), key=lambda n: (n not in draft, -nodes[n][2]))
        kept = sorted(order[: max(self._most, len(draft))])
        places = {-1: -1} | {old: new for new, old in enumerate(kept)}
        self.places = [nodes[n][0] + 1 for n in kept]
        self.nodes = [(places[nodes[n][0]], *nodes[n][1:]) for n in kept]
        self.known, self._tip = sum(n < self.known for n in kept), places[self._tip]

    def beside(self, draft: Sequence[int]) -> tuple[list[tuple[int, int]], list[float]]:
        """Nodes that are not of a draft, as of `Proposal.nodes`, and their chances, falling."""
        places, tip = {-1: 0}, -1
        for depth, token in enumerate(draft, 1):
            if (tip := self._child(tip, token)) < 0:
                break
            places[tip] = depth
        others = [n for n in range(len(self.nodes)) if n not in places]
        others = sorted(others, key=lambda n: -self._chance(n))[: max(self._most - len(draft), 0)]
        places |= {node: n for n, node in enumerate(others, len(draft) + 1)}
        nodes = [self.nodes[n] for n in others]
        return [(places[above], token) for above, token, _ in nodes], [p for *_, p in nodes]

    def _child(self, parent: int, token: int) -> int:
        pairs = enumerate(self.nodes)
        return next((n for n, node in pairs if node[:2] == (parent, token)), -1)

    def _chance(self, node: int) -> float:
        return self.nodes[node][2] if node >= 0 else 1.0
