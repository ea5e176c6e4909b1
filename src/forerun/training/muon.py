"""Muon: momentum, orthogonalised; for matrices of hidden layers."""

from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def product_type(device: torch.device | str = "cpu") -> torch.dtype:
    """The type of matrix products in training: bfloat16 where there are instructions for it.

    A CPU without them multiplies in bfloat16 up to a hundred times slower than in float32.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    able = torch.cpu.get_capabilities()
    fast = any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32


def orthogonalise(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton–Schulz iteration on a stack of matrices (count, rows, columns) in `product_type`."""
    a, b, c = _COEFFICIENTS
    x = update.to(product_type(update.device))
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised; equal shapes are stacked, which is what makes it cheap here.

    Reference: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                stack = orthogonalise(torch.stack(updates))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, stack, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)
