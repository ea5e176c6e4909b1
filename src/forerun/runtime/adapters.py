"""Kangaroo's adapter: an attention and two norms that take a shallow layer's states for the last's.

It sits on one depth of a target and shares all else with it, its head included. Its keys and
values stand in the target's own cache, as one layer more, so that they are kept, copied and rolled
back with the rest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.errors import SettingError
from forerun.runtime.attention import Mask
from forerun.runtime.base import Rows
from forerun.runtime.drafts import fill, read_about
from forerun.runtime.exits import Batch, LayersExecutor
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import pack

KIND = "kangaroo"


class Adapter(torch.nn.Module):
    """`norm₂(h + attention(norm₁(h)))` of hidden states `h` at depth ℓ; the target's head unembeds.

    Begun as the attention of the target's next layer and its final norm.

    Args:
        access: the target's layers.
        depth: ℓ, 1 ≤ ℓ < L.

    Raises:
        SettingError: no such depth.

    Reference: Liu et al. 2024, Kangaroo, section 3.1.
    """

    def __init__(self, access: LayerAccess, depth: int) -> None:
        if not 1 <= depth < access.layers:
            raise SettingError(
                f"layers must be between 1 and {access.layers - 1} for kangaroo, whose adapter "
                f"stands below the target's {access.layers}, got {depth}"
            )
        super().__init__()
        self.depth = depth
        self.layer, self.norm = access.bare(depth)

    def forward(
        self,
        access: LayerAccess,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        """`(n, width, H)` states for `LayerAccess.unembed`; as `LayerAccess.run`."""
        out: torch.Tensor = self.norm(access.call([self.layer], hidden, mask, positions, cache))
        return out


class AdapterExecutor(LayersExecutor):
    """A target that drafts from one depth, through an adapter. Whatever passes that depth passes
    the adapter, too: prompts, drafts, and what is verified."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        self.adapter = adapter.eval()
        self._adapted = torch.empty(0)
        super().__init__(model)
        layer = self.facts.token_bytes // self.access.layers
        self.facts = replace(self.facts, token_bytes=self.facts.token_bytes + layer)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, mask: Mask) -> torch.Tensor:
        assert isinstance(mask, torch.Tensor), "layer access refuses sliding windows"
        hidden = self.access.embed(ids, positions)
        return self.access.logits(self._climbed(hidden, 0, self.access.layers, mask, positions))

    def _through(self, batch: Batch, first: int, last: int) -> torch.Tensor:
        return self._climbed(batch.hidden, first, last, batch.mask, batch.positions)

    def _shown(self, batch: Batch) -> torch.Tensor:
        return self._adapted

    def _climbed(
        self,
        hidden: torch.Tensor,
        first: int,
        last: int,
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """As `LayerAccess.run`, and through the adapter on the way."""
        depth = self.adapter.depth
        if first < depth <= last:
            hidden = self.access.run(hidden, first, depth, mask, positions, self.cache)
            self._adapted = self.adapter(self.access, hidden, mask, positions, self.cache)
            first = depth
        return self.access.run(hidden, first, last, mask, positions, self.cache)


def adapter_rows(model: Any, folder: str | Path) -> Rows:
    """Rows of a model that drafts through the adapter of a folder.

    Raises:
        ModelError: it is missing, damaged, of another kind, or does not fit the model.
        UnsupportedModelError: the model's layers cannot be called one by one.
    """
    adapter = Adapter(LayerAccess(model), int(read_about(folder, KIND).settings.get("layers", 0)))
    fill(dict(adapter.named_parameters()), folder, KIND, model)
    return Rows(AdapterExecutor(model, pack(adapter.to(model.device, model.dtype))))
