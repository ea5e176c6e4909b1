"""`kangaroo`: a shallow exit and a trained adapter draft; double early exit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.checks import Count, Share
from forerun.drafters.base import Drafter, Proposal, Step, StepContext, Texts, TrainedDraft
from forerun.drafters.specbound import SpecBoundDrafter
from forerun.runtime.base import Rows
from forerun.runtime.drafts import fill, naming_target, read_about
from forerun.runtime.exits import Adapter, LayersExecutor, layers_of
from forerun.runtime.heads import ExitHeads
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import pack
from forerun.runtime.support import model_on_torch
from forerun.types import Stop


class KangarooDrafter(SpecBoundDrafter):
    """Steps the target's first layers and the adapter; made by `Kangaroo.build`."""

    def __init__(self, rows: Rows, threshold: float, most: int, keep: bool = True) -> None:
        adapter, access = layers_of(rows).adapter, layers_of(rows).access
        assert adapter is not None, "rows with an adapter"
        # If unsure tokens stay, every one leaves at the exit, and the draft ends behind it.
        least = 0.0 if keep else threshold
        super().__init__(rows, ExitHeads(access), (adapter.depth,), least, 0.0, most)
        self._least = threshold if keep else 0.0
        self._unsure: set[int] = set()  # rows whose newest token is the last of their draft

    def ratio(self, target: Rows) -> float:
        """Layers of the target over those below the adapter, which counts as one."""
        return self.executor.access.layers / (self.layers[-1] + 1)

    def _said(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """By the target's own head, as the adapter has normed them."""
        return self.executor.access.unembed(hidden)

    def propose(self, texts: Texts, most: Sequence[int], guide: StepContext) -> Proposal:
        self._unsure.clear()
        return super().propose(texts, most, guide)

    def step(self, texts: Texts, greedy: frozenset[str] | None) -> Step:
        """What the adapter says next in each row; a row behind an unsure token ends there."""
        out = super().step(
            [None if row in self._unsure else text for row, text in enumerate(texts)], greedy
        )
        ended = [
            Stop.DIFFICULT if row in self._unsure else why
            for row, why in enumerate(out.ended or [None] * len(texts))
        ]
        if out.logits is not None:
            top = out.logits.float().softmax(-1).amax(-1).tolist()
            self._unsure |= {row for row, sure in enumerate(top) if not sure >= self._least}
        return replace(out, ended=ended)


@dataclass(frozen=True)
class Kangaroo(TrainedDraft):
    """Kangaroo: the target's first layers and a small adapter draft; no second model, one cache.

    Args:
        threshold: η in [0, 1], the paper's 0.6; 0 never stops.
        most: γ, ≥ 1, the paper's 6. Both hold beside the length controller; `fixed(6)` or more
            leaves the length to Kangaroo alone.
        keep: whether the token that is unsure stays in the draft; false ends it before that one,
            which costs its draft step for nothing but saves verifying it.

    Reference: Liu et al. 2024 (Kangaroo) [kangaroo2024], sections 3.1 and 3.2, and the authors'
    code, in which the unsure token stays in the draft (`keep`).
    """

    on_torch = True

    threshold: Share = 0.6
    most: Count = 6
    keep: bool = True

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """With a runtime of its own around the target's model (`Drafter.target`)."""
        model, folder = model_on_torch(target, self.kind), self.folder(target.facts.name)
        depth = int(read_about(folder, self.kind).settings.get("layers", 0))
        with naming_target(folder):
            adapter = Adapter(LayerAccess(model), depth)
        fill(dict(adapter.named_parameters()), folder, self.kind, model)
        rows = Rows(LayersExecutor(model, pack(adapter.to(model.device, model.dtype))))
        return KangarooDrafter(rows, self.threshold, self.most, self.keep)
