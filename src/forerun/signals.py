"""What a distribution says about its own tokens, in one pass over the logits."""

import math
from collections.abc import Set

import torch


def measure(logits: torch.Tensor, tokens: torch.Tensor, names: Set[str]) -> dict[str, torch.Tensor]:
    """Compute the named signals (`types.SIGNALS`, `types.LIVE_SIGNALS`) of one token per
    distribution.

    Args:
        logits: `(..., V)` logits at temperature 1, before truncation; −inf excludes a token.
        tokens: `(...,)` the tokens that were drafted.
        names: wanted fields.

    Returns:
        `(...,)` float tensors on the logits' device, one per name.
    """
    if not names:
        return {}
    log = logits.log_softmax(-1, dtype=float_type(logits))
    out: dict[str, torch.Tensor] = {}
    if "chosen" in names:
        out["chosen"] = log.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).exp()
    if names & {"entropy", "normalized_entropy"}:
        out["entropy"] = entropy(log)
        # A vocabulary of one token has no uncertainty to normalise by.
        most = math.log(logits.shape[-1]) or 1.0
        out["normalized_entropy"] = (out["entropy"] / most).clamp(max=1)
    if names & {"logit_margin", "softmax_margin", "second"}:
        best, ranked = log.topk(min(2, log.shape[-1]), dim=-1)
        top = best[..., 0]
        second = best[..., 1] if best.shape[-1] == 2 else torch.full_like(top, -math.inf)
        out["logit_margin"] = top - second
        out["second"] = ranked[..., -1].to(log.dtype)
        if "softmax_margin" in names:
            out["softmax_margin"] = -torch.expm1(second - top)
        if "top1" in names:
            out["top1"] = top.exp()
    elif "top1" in names:
        out["top1"] = log.amax(-1).exp()
    if "logit_variance" in names:
        possible = log > -torch.inf  # a constant takes nothing from a variance
        count = possible.sum(-1, keepdim=True)
        mean = torch.where(possible, log, 0).sum(-1, keepdim=True) / count
        out["logit_variance"] = (torch.where(possible, log - mean, 0) ** 2).sum(-1) / count[..., 0]
    return {name: out[name] for name in names}


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """`(...,)` Shannon entropy in nats of `(..., V)` log-probabilities; −inf counts nothing."""
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def float_type(logits: torch.Tensor) -> torch.dtype:
    """The type probabilities are computed in: float64 if the logits are, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
