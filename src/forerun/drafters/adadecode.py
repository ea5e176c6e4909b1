"""`adadecode`: the target's middle layers say sure tokens; their rest is run later."""

from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

from forerun.checks import Count, Named, Within
from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.specbound import SpecBoundDrafter, exits_of, listed
from forerun.runtime.base import Rows
from forerun.runtime.exits import layers_of


@dataclass(frozen=True)
class AdaDecode(DrafterSpec):
    """AdaDecode: middle layers say sure tokens, and what is left of these is run in parallel.

    Args:
        threshold: γ, ≥ 0, the paper's 0.75; above 1 nothing is said early.
        most: tokens said early before the next verification, ≥ 1; the paper's 5. Reaching it stops
            with "exhausted", a token that no head is sure of with "difficult". It holds beside the
            length controller's limit; `fixed(5)` or more leaves the length to AdaDecode alone.
        layers: a layer with a head to ask, or text like "3,6,9". None: those nearest to a quarter,
            a half and three quarters of the target's, as the paper's 8, 16 and 24 of 32.
        exits: a folder of `forerun train-draft exits`, as for `specbound`; empty uses the target's
            own norm and unembedding. None: the folder `exits` in the target's own, as the shipped
            target has one.

    Reference: Wei et al. 2025 (AdaDecode) [adadecode2025], section 3. We had its abstract and
    detailed summaries, not its full text: these give the rule, γ, the cap, the layers and the
    training.
    """

    on_torch = True
    threshold: Annotated[float, Within(0, inf)] = 0.75
    most: Count = 5
    layers: int | str | None = None
    exits: Annotated[str, Named("a folder of exit heads, or none", empty=True)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            listed(str(self.layers), self.kind)

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """With a runtime of its own around the target's model (`Drafter.target`)."""
        rows, heads, _ = exits_of(target, self.exits, self.kind)
        layers = self._asked(layers_of(rows).access.layers, tuple(heads.layers))
        return SpecBoundDrafter(rows, heads, layers, self.threshold, 0.0, self.most)

    def _asked(self, layers: int, heads: tuple[int, ...]) -> tuple[int, ...]:
        """Layers in use of a target of so many, with heads at `heads`."""
        if self.layers is None and heads:
            quarters = [quarter * layers / 4 for quarter in (1, 2, 3)]
            return tuple(sorted({min(heads, key=lambda n: abs(n - at)) for at in quarters}))
        return tuple(sorted({*listed(str(self.layers or 1), self.kind, heads)}))
