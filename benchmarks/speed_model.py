"""Predicted speed of early exits: SpecBound's own model, and one that counts projections too.

Wen and Feng 2026, SpecBound, section 2.4. The paper counts decoder layers and nothing else: all
tokens of a draft leave at the depth bound, and every draft is as long as the width bound. Eqs. 3 to
5 are blank in the text we have; they are reconstructed from what it says of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.checks import between, whole
from forerun.errors import require


def round_passes(width: int, depth: int, layers: int) -> float:
    """Target passes of a round of `width` drafted tokens: `w · D/L + (L − D)/L` (eq. 3).

    Args:
        width: w, tokens drafted, ≥ 0.
        depth: D, the layer they exit at, 1 ≤ D ≤ L.
        layers: L.

    >>> round_passes(width=6, depth=8, layers=32)
    2.25
    """
    whole("width", width)
    whole("layers", layers, 1)
    require(1 <= depth <= layers, "depth", depth, f"between 1 and {layers}")
    return width * depth / layers + (layers - depth) / layers


def expected_tokens(rate: float, width: int, bonus: bool = True) -> float:
    """Tokens a round commits in the mean (eq. 4): `(1 − r^(w+1)) / (1 − r)`, the "standard"
    expression of Leviathan et al., or without a bonus token, as the paper's round is told,
    `(1 − r^w) / (1 − r)`.

    Args:
        rate: r, probability that a drafted token is kept given that all before it were, in [0, 1].
        width: w, tokens drafted, ≥ 0; ≥ 1 without a bonus.
        bonus: whether a draft that is kept whole is followed by the target's own token.

    >>> expected_tokens(0.5, 2), expected_tokens(0.5, 2, bonus=False)
    (1.75, 1.5)
    """
    between("rate", rate, 0.0, 1.0)
    whole("width", width, 0 if bonus else 1)
    return float(sum(rate**i for i in range(width + bonus)))


def speedup(rate: float, width: int, depth: int, layers: int, bonus: bool = True) -> float:
    """Speed-up over plain decoding: eq. 4 over eq. 3 (eq. 5), arguments as there.

    >>> round(speedup(0.9, width=6, depth=8, layers=32), 2)
    2.32
    """
    return expected_tokens(rate, width, bonus) / round_passes(width, depth, layers)


@dataclass(frozen=True)
class Shape:
    """A target as early exits see it, in units of the time of one of its layers for one token.

    Args:
        layers: L.
        projection: one projection onto the vocabulary.
        exit_projection: one projection at an exit, cheaper if its head has a small vocabulary.
        widening: what each further token adds to a layer or projection it shares; 0 where reading
            the weights is all that costs, as on a GPU at batch 1.
    """

    layers: int
    projection: float = 0.0
    exit_projection: float = 0.0
    widening: float = 0.0

    @classmethod
    def of(
        cls, layers: int, hidden: int, inner: int, vocab: int, keys: float = 1.0, head: int = 0
    ) -> Shape:
        """The shape of a gated transformer, costs by its weights.

        Args:
            layers, hidden, inner, vocab: L, H, the inner size of the feed-forward part, V.
            keys: heads of keys and values over heads of queries.
            head: vocabulary of an exit head; 0: all V.

        >>> Shape.of(32, 4096, 11008, 32000).projection < 0.65
        True
        """
        layer = (2 + 2 * keys) * hidden**2 + 3 * hidden * inner
        return cls(layers, hidden * vocab / layer, hidden * (head or vocab) / layer)

    def plain(self) -> float:
        """One token of plain decoding, in layers."""
        return self.layers + self.projection

    def layers_of(
        self, calls: float, passes: float, rounds: float, projections: float, exits: float
    ) -> float:
        """Time of counted work at batch 1, in layers.

        Args:
            calls: layers run, however many tokens at once (`Work.calls`).
            passes: tokens × layers (`Work.passes`).
            rounds: verifications, one projection call each.
            projections: tokens × projections of the last layer (`Work.passes("project")`).
            exits: projections at exits (`Work.passes("exit")`).
        """
        run = calls + self.widening * (passes - calls)
        calls_projected = rounds + self.widening * (projections - rounds)
        return run + self.projection * calls_projected + self.exit_projection * exits
