"""Training of EAGLE-3 heads, which are written as `speculators` lays them out."""

from __future__ import annotations

from math import gcd
from pathlib import Path

import torch

from forerun.runtime.drafts import About
from forerun.runtime.eagle import HEAD, HeadForm
from forerun.runtime.eagle3 import Eagle3Head, save_head
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import dense
from forerun.training.eagle import HeadTrainer, Taught, normed_identity, spread_out
from forerun.training.settings import TrainingSettings

FLAGS = frozenset({"fc_norm", "norm_before_residual"})
"""The variant: what the layer reads and adds to keeps its size, within a draft, too."""


class Eagle3Trainer(HeadTrainer):
    """A head of EAGLE-3 in training."""

    head: Eagle3Head

    def _begun(
        self, access: LayerAccess, tokens: torch.Tensor, settings: TrainingSettings
    ) -> Eagle3Head:
        table = dense(access.model.get_input_embeddings().weight).detach()
        return begun3(access, table, tokens, len(self.depths))

    def _write(self, folder: Path, about: About) -> None:
        assert self.vocabulary is not None
        trained = {"target": about.target, **about.trained}
        save_head(folder, self.head, self.vocabulary, self.depths, trained)


@torch.no_grad()
def begun3(access: Taught, table: torch.Tensor, tokens: torch.Tensor, depths: int) -> Eagle3Head:
    """A head that says what the target's last states do, but for what is small and random.

    Args:
        access: the target.
        table: `(V', H)` its embeddings.
        tokens: `(V,)` the vocabulary.
        depths: how many it reads.
    """
    hidden = access.width
    width = gcd(hidden, HEAD)
    rates = tuple(1e4 ** (-2 * i / width) for i in range(width // 2))
    form = HeadForm(hidden, 8 * hidden // 3, hidden // width, hidden // width, width, rates=rates)
    head = Eagle3Head(form, FLAGS, table, len(tokens), depths * hidden).to(tokens.device)
    head.unembedding.weight.copy_(access.unembedding[tokens])
    spread_out(head, {"qkv": 0.7, "gate_up": 0.7, "out": 0.3, "down": 0.3, "fuse": 0.2})
    head.fuse.weight[:, -hidden:] += normed_identity(access)
    return head
