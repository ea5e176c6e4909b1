"""Muon for the hidden matrices, AdamW for embeddings and norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from forerun.training.muon import Muon
from recipes.recipe import Recipe


def optimizers(models: Iterable[torch.nn.Module], recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The pair of optimisers over all models; each group's ``base_lr`` is its peak rate."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for model in models:
        for name, p in model.named_parameters():
            (matrices if p.ndim == 2 and "layers" in name else others).append(p)
    both: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=recipe.muon_lr, momentum=0.95, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            others, lr=recipe.adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        ),
    ]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return both
