"""Training of EAGLE-3 heads, which are written as `speculators` lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path

import torch
import torch.nn.functional as F

from forerun.runtime.drafts import About
from forerun.runtime.eagle import HEAD, HeadForm, rms
from forerun.runtime.eagle3 import Eagle3Head, save_head
from forerun.runtime.layers import LayerAccess
from forerun.runtime.packing import dense
from forerun.training.eagle import HeadTrainer, normed_identity, spread_out
from forerun.training.fit import Document

FLAGS = frozenset({"fc_norm", "norm_before_residual"})
"""The variant: what the layer reads and adds to keeps its size, within a draft, too."""
SAMPLE = 128
"""Texts that a linear map is fitted to, and"""
RIDGE = 1e-3
"""what is added to the squares of what it reads, in their mean."""


class Eagle3Trainer(HeadTrainer):
    """A head of EAGLE-3 in training."""

    head: Eagle3Head

    @torch.no_grad()
    def _begun(
        self, tokens: torch.Tensor | None, texts: Sequence[Document]
    ) -> Mapping[str, torch.nn.Parameter]:
        assert tokens is not None
        table = dense(self._access.model.get_input_embeddings().weight).detach()
        self.head = begun3(self._access, table, tokens, len(self.depths))
        begin_linear(self.head, [
            (torch.tensor(text.ids[1:], device=table.device),
             self.head.fused(known, len(self.depths)))
            for part in self._batches(texts[:SAMPLE])
            for text, known in zip(part, self._known(part), strict=True)
        ])  # fmt: skip
        return dict(self.head.named_parameters())

    def _write(self, folder: Path, about: About) -> None:
        assert self.vocabulary is not None
        trained = {"target": about.target, **about.trained}
        save_head(folder, self.head, self.vocabulary, self.depths, trained)


@torch.no_grad()
def begun3(
    access: LayerAccess, table: torch.Tensor, tokens: torch.Tensor, depths: int
) -> Eagle3Head:
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


@torch.no_grad()
def begin_linear(head: Eagle3Head, texts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let a head begin as the linear map of a token and the state before it that comes closest to
    the target's next state, by least squares.

    Queries and keys are both the token's embedding, turned, so that a place attends to itself;
    values and what follows them are two factors of the map.

    Args:
        head: of `begun3`.
        texts: of each `(n − 1,)` ids from the second on, and `(n, D)` states, fused.
    """
    width = head.width
    read = torch.cat([head.entered(ids, states[:-1])[1] for ids, states in texts])
    goal, before = torch.cat([states[1:] for _, states in texts]), read[:, width:]
    squares = read.T @ read
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    linear = torch.linalg.solve(squares, read.T @ (head.state_norm(goal) - before))
    left, sizes, right = torch.linalg.svd(linear.T, full_matrices=False)
    turned = F.pad(torch.linalg.qr(torch.randn(width, width)).Q.to(left), (0, width))
    head.out.weight.copy_(left * sizes.sqrt())
    head.qkv.weight.copy_(torch.cat([turned, turned, sizes.sqrt()[:, None] * right]))
    guess = rms(before + read @ linear)
    head.norm.weight.fill_(float((guess * goal).sum() / guess.square().sum()))
