"""The target's training step, written so that one CPU core spends its time in matrix products.

The forward pass is that of ``LlamaForCausalLM`` on its own weights (a test compares both): plain
functions per layer, so that one compiled graph serves all layers; attention in blocks of queries,
each of which multiplies only the keys it may see; the loss over the vocabulary in pieces of rows,
its gradient made at once, so that no vocabulary-wide array of a whole batch exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from forerun.training.muon import product_type
from recipes.recipe import Guide

BLOCK = 128
"""Queries per block of attention."""
PIECE = 512
"""Rows per piece of the loss."""


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """RMS norm in float32, rounded to ``dtype``."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of ``x`` (…, length, size); ``cos`` and ``sin`` (length, size / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of (rows x heads, length, size) in blocks of queries."""
    length = q.shape[1]
    q = q * q.shape[-1] ** -0.5
    outputs = []
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        scores = torch.bmm(q[:, begin:end], k[:, :end].mT).float()
        row = torch.arange(begin, end, device=q.device)[:, None]
        later = torch.arange(end, device=q.device)[None] > row
        shares = scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype)
        outputs.append(torch.bmm(shares, v[:, :end]))
    return torch.cat(outputs, 1)


def layer(
    x: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    eps: float,
    dtype: torch.dtype,
    weights: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """One decoder layer on the residual stream ``x`` (rows, length, hidden) in float32."""
    norm_1, *matrices, norm_2, gate, up, down = weights
    q_w, k_w, v_w, o_w = (w.to(dtype) for w in matrices)
    rows, length, hidden = x.shape
    y = norm(x, norm_1, eps, dtype)
    q, k, v = (
        F.linear(y, w).view(rows, length, heads, -1).transpose(1, 2) for w in (q_w, k_w, v_w)
    )
    q, k = rotate(q, *turn), rotate(k, *turn)
    flat = (rows * heads, length, hidden // heads)
    mixed = attend(q.reshape(flat), k.reshape(flat), v.reshape(flat))
    mixed = mixed.view(rows, heads, length, -1).transpose(1, 2).reshape(x.shape)
    x = x + F.linear(mixed, o_w)
    y = norm(x, norm_2, eps, dtype)
    inner = F.silu(F.linear(y, gate.to(dtype))) * F.linear(y, up.to(dtype))
    return x + F.linear(inner, down.to(dtype))


def score_piece(
    state: torch.Tensor, head: torch.Tensor, goal: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy against token ids, summed, and its gradient by the logits.

    A negative weight asks for the opposite, that the token be unlikely: ``-log(1 - p)`` for
    ``-log p`` (Welleck et al., 2020).
    """
    logits = (state @ head.t()).float()
    log = logits.log_softmax(-1)
    of_goal = log.gather(1, goal[:, None])[:, 0]
    share = of_goal.exp().clamp(max=0.9999)
    loss = (torch.where(weight < 0, (-share).log1p(), -of_goal) * weight).sum()
    weight = torch.where(weight < 0, weight * share / (1 - share), weight)
    hot = torch.arange(logits.shape[1], device=goal.device)[None] == goal[:, None]
    slope = (log.exp() - hot.float()) * weight[:, None]
    return loss, slope.to(state.dtype)


def match_piece(
    state: torch.Tensor,
    head: torch.Tensor,
    goal: torch.Tensor,
    weight: torch.Tensor,
    goal_head: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy against what states ``goal`` with ``goal_head`` predict, and slope."""
    log = (state @ head.t()).float().log_softmax(-1)
    wanted = (goal @ goal_head.t()).float().softmax(-1)
    loss = -((wanted * log).sum(-1) * weight).sum()
    return loss, ((log.exp() - wanted) * weight[:, None]).to(state.dtype)


class _InPieces(torch.autograd.Function):
    """Sums a loss over pieces of rows; the gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        state: torch.Tensor,
        head: torch.Tensor,
        goal: torch.Tensor,
        weight: torch.Tensor,
        piece: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        *more: torch.Tensor,
    ) -> torch.Tensor:
        by_state = torch.empty_like(state)
        by_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        loss = torch.zeros((), device=head.device)
        for at in range(0, len(state), PIECE):
            part = slice(at, at + PIECE)
            value, slope = piece(state[part], head, goal[part], weight[part], *more)
            loss += value
            by_state[part] = slope @ head
            by_head += slope.t() @ state[part]
        ctx.save_for_backward(by_state, by_head.to(head.dtype))
        ctx.more = len(more)
        return loss

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        by_state, by_head = ctx.saved_tensors
        return (slope * by_state, slope * by_head, *[None] * (3 + ctx.more))


@dataclass(frozen=True)
class Functions:
    """The three inner functions, compiled or as they are, and the type of the products."""

    layer: Callable[..., torch.Tensor]
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    match: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype

    @classmethod
    def make(cls, compiled: bool) -> Functions:
        """Compiled, in the CPU's `product_type`, or eager in float32."""
        if not compiled:
            return cls(layer, score_piece, match_piece, torch.float32)
        return cls(
            torch.compile(layer, dynamic=False),
            torch.compile(score_piece, dynamic=False),
            torch.compile(match_piece, dynamic=False),
            product_type(),
        )


def turns(config: Any, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary positions, (length, size / 2)."""
    size = config.hidden_size // config.num_attention_heads
    place = torch.arange(max(size, length), device=device).float()
    speed = config.rope_parameters["rope_theta"] ** -(place[:size:2] / size)
    angle = torch.outer(place[:length], speed)
    return angle.cos(), angle.sin()


def states(
    model: Any, ids: torch.Tensor, functions: Functions, wanted: frozenset[int] = frozenset()
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The last state and those after the ``wanted`` layers, (rows, length, hidden), before norm."""
    config = model.config
    turn = turns(config, ids.shape[1], ids.device)
    x = model.model.embed_tokens(ids)
    between = {}
    for depth, block in enumerate(model.model.layers, start=1):
        a, mlp = block.self_attn, block.mlp
        weights = (
            block.input_layernorm.weight,
            *(m.weight for m in (a.q_proj, a.k_proj, a.v_proj, a.o_proj)),
            block.post_attention_layernorm.weight,
            *(m.weight for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
        )
        x = functions.layer(
            x, turn, config.num_attention_heads, config.rms_norm_eps, functions.dtype, weights
        )
        if depth in wanted:
            between[depth] = x
    return x, between


def predictions(
    model: Any, state: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed states (count, hidden) of a residual stream, and the head that reads them."""
    last = model.model.norm.weight
    normed = norm(state.reshape(-1, state.shape[-1]), last, model.config.rms_norm_eps, dtype)
    return normed, model.lm_head.weight.to(dtype)


class Losses(NamedTuple):
    """The losses of a micro-batch."""

    final: torch.Tensor
    """Weighted cross-entropy of the next tokens, summed."""
    exits: dict[int, torch.Tensor]
    """Per exit its cross-entropy against the final distribution, summed, not yet weighted."""
    guides: list[tuple[torch.Tensor, torch.Tensor]]
    """Per guide the mean cross-entropy of its head's attention, and of what follows from it."""


def losses(
    model: Any,
    ids: torch.Tensor,
    weights: torch.Tensor,
    functions: Functions,
    exits: Sequence[int] = (),
    positions: torch.Tensor | None = None,
    guided: Sequence[tuple[Guide, torch.Tensor]] = (),
) -> Losses:
    """All losses of a micro-batch.

    ``ids`` and ``weights`` are (rows, length); the weights belong to predicting each position.
    ``exits`` are layers whose states, through the last norm and the shared head, are matched with
    the final distribution on ``positions`` (indices into rows x (length - 1)). That distribution
    is a constant there: it is not drawn towards what shallow layers can do. ``guided`` has places
    (count, 3), as in `Batch`, for each guide.
    """
    wanted = frozenset(exits).union(*((how.depth, *how.answers) for how, _ in guided))
    x, between = states(model, ids, functions, wanted)
    final, head = predictions(model, x[:, :-1], functions.dtype)
    goal, weight = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    loss = _InPieces.apply(final, head, goal, weight, functions.score)
    matched = {}
    for depth in exits:
        chosen = between[depth][:, :-1].reshape(-1, x.shape[-1])[positions]
        shallow, _ = predictions(model, chosen, functions.dtype)
        target, share = final.detach()[positions], weight[positions]
        matched[depth] = _InPieces.apply(shallow, head, target, share, functions.match, head)
    return Losses(loss, matched, [_guide(model, ids, between, *one) for one in guided])


def _guide(
    model: Any,
    ids: torch.Tensor,
    between: dict[int, torch.Tensor],
    how: Guide,
    places: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    row, asked, place = places.unbind(1)
    config, block = model.config, model.model.layers[how.depth]
    size = config.hidden_size // config.num_attention_heads
    y = norm(between[how.depth], block.input_layernorm.weight, config.rms_norm_eps, torch.float32)
    own = slice(how.head * size, (how.head + 1) * size)
    turn = turns(config, ids.shape[1], ids.device)
    q, k = (
        rotate(F.linear(y, matrix.weight[own]), *turn)
        for matrix in (block.self_attn.q_proj, block.self_attn.k_proj)
    )
    scores = torch.einsum("ns,nls->nl", q[row, asked], k[row]) * size**-0.5
    later = torch.arange(ids.shape[1], device=ids.device)[None] > asked[:, None]
    attention = F.cross_entropy(scores.masked_fill(later, float("-inf")), place)
    answers = torch.zeros((), device=ids.device)
    for depth in how.answers:
        state, head = predictions(model, between[depth][row, asked], torch.float32)
        answers = answers + F.cross_entropy(state @ head.t(), ids[row, asked + 1]) / len(
            how.answers
        )
    return attention, answers


def divergence(
    target: Any, draft: Any, ids: torch.Tensor, weights: torch.Tensor, functions: Functions
) -> torch.Tensor:
    """Summed weighted cross-entropy of the draft against the target's distribution.

    That is the forward KL divergence up to the target's entropy. Only the draft is trained.
    """
    with torch.no_grad():
        x, _ = states(target, ids, functions)
        wanted, wanted_head = predictions(target, x[:, :-1], functions.dtype)
    x, _ = states(draft, ids, functions)
    own, head = predictions(draft, x[:, :-1], functions.dtype)
    weight = weights[:, 1:].reshape(-1)
    return _InPieces.apply(own, head, wanted, weight, functions.match, wanted_head)
