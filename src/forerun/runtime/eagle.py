"""One decoder layer on the hidden states of a target: the head behind the drafter `eagle`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forerun.runtime.base import Facts, Pieces, Rows
from forerun.runtime.cache import CachedExecutor
from forerun.runtime.drafts import About, Tensors
from forerun.runtime.states import States
from forerun.runtime.trees import Parents

KIND = "eagle"
HEAD = 64
"""Width of an attention head."""
ROTARY_BASE = 10_000.0
EPS = 1e-5

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries to keys and values, `(n, heads, tokens, HEAD)` each, and its result."""


class Norm(nn.Module):
    """`rms(x) · weight`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms(x) * self.weight


class EagleHead(nn.Module):
    """Says the next token from the newest one and the target's states of the one before it.

    `x = layer(W · [rms(embedding); rms(state)])`, where the state is `W_f · [rms(h_a); rms(h_b);
    ...]` of the token before, or within a draft the output x of the step before; logits are
    `embedding · norm(x)` over a cut vocabulary of V tokens. All numbers are float32.

    Args:
        width: D, a multiple of `HEAD`.
        inner: M, of the feed-forward part.
        vocab: V.
        states: all depths' states of a token together.
    """

    def __init__(self, width: int, inner: int, vocab: int, states: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        table = torch.empty(vocab + 1, width)
        if not table.is_meta:  # where torch takes seconds to draw nothing
            table.normal_()
        self.embedding = nn.Embedding(vocab + 1, width, _weight=table)
        """The last row stands for every token outside the vocabulary."""
        self.fuse = nn.Linear(states, width, bias=False)
        self.input = nn.Linear(2 * width, width, bias=False)
        self.attention_norm, self.mlp_norm, self.norm = Norm(width), Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def fused(self, states: torch.Tensor, depths: int) -> torch.Tensor:
        """`(..., D)` of the target's states `(..., depths × H)`."""
        parts = rms(states.float().unflatten(-1, (depths, -1)))
        out: torch.Tensor = self.fuse(parts.flatten(-2))
        return out

    def layer(
        self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`(n, tokens, D)` outputs.

        Args:
            ids: `(n, tokens)` in the cut vocabulary, V for others.
            states: `(n, tokens, D)` of the token before each.
            positions: `(n, tokens)`, or `(1, tokens)` of all.
            attend: to what is before; it is given queries and keys with their positions in them.
        """
        x = self.input(torch.cat([rms(self.embedding(ids)), rms(states)], -1))
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, HEAD))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = attend(_turned(query, positions), _turned(key, positions), value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        out: torch.Tensor = x + self.down(F.silu(gate) * up)
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., V)` of outputs `(..., D)`."""
        return F.linear(self.norm(x), self.embedding.weight[:-1])


def rms(x: torch.Tensor) -> torch.Tensor:
    """`x` over its root mean square, of the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def _turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions: `(n, heads, tokens, HEAD)`, halves turned against each other."""
    half = HEAD // 2
    rates = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def shapes(about: About, tensors: Tensors, width: int) -> Mapping[str, tuple[int, ...]]:
    """Shapes that the tensors of a head must have, by its own sizes and H, the target's width.

    Raises:
        KeyError, ValueError: it has none of the tensors that say its sizes, or odd ones.
    """
    (d,), (_, inner) = tensors["norm.weight"].shape, tensors["down.weight"].shape
    if d % HEAD:
        raise ValueError(f"its width, {d}, is no multiple of {HEAD}")
    vocab = len(tensors["tokens"])
    with torch.device("meta"):
        made = EagleHead(d, inner, vocab, len(about.settings["depths"]) * width)
    return {name: tuple(value.shape) for name, value in made.state_dict().items()}


def head_of(tensors: Tensors) -> EagleHead:
    """The head with these tensors, `tokens` left out, for inference."""
    own = {name: tensor.float() for name, tensor in tensors.items() if name != "tokens"}
    (width, states), inner = own["fuse.weight"].shape, own["down.weight"].shape[1]
    head = EagleHead(width, inner, len(own["embedding.weight"]) - 1, states)
    head.load_state_dict(own)
    return head.eval().requires_grad_(False)


class HeadExecutor(CachedExecutor):
    """Runs a head by PyTorch; what it reads beside tokens is put into `given` before a pass.

    Args:
        head: on its device.
        facts: of it.
    """

    def __init__(self, head: EagleHead, facts: Facts) -> None:
        super().__init__()
        self.head, self.facts = head, facts
        self.device = head.norm.weight.device
        self.given: torch.Tensor | None = None
        """`(tokens, D)` states of all tokens of the next pass, a row's after another's."""
        self.states = States((1,), len(head.norm.weight))

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        rows = [row for row, piece in enumerate(pieces) if piece]
        counts = [len(pieces[row]) for row in rows]
        out = torch.zeros(
            len(pieces), max(wanted, default=0), self.facts.vocab_size, device=self.device
        )
        if not rows:
            return out
        assert self.given is not None, "states come before the tokens"
        width, begins = max(counts), [starts[row] for row in rows]
        ids = torch.tensor([[*pieces[row], *[0] * (width - len(pieces[row]))] for row in rows])
        states = torch.nn.utils.rnn.pad_sequence(list(self.given.split(counts)), batch_first=True)
        columns = self.cache.open(rows, begins, width, self.device)
        places = torch.tensor(begins)[:, None] + torch.arange(width)
        seen = (torch.arange(columns) <= places[..., None])[:, None].to(self.device)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.update(key, value, 0)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)

        x = self.head.layer(
            ids.to(self.device), states.to(self.device), places.to(self.device), attend
        )
        assert self.states is not None
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            self.states.note(row, starts[row], x[i, :count])
            if wanted[row]:
                out[row, : wanted[row]] = self.head.logits(x[i, count - wanted[row] : count])
        return out


def facts_of(head: EagleHead, target: Rows, name: str) -> Facts:
    """What there is to know of a head on a target; its projection of states is not of a step."""
    vocab, width = head.embedding.weight.shape
    return Facts(
        vocab_size=vocab - 1,
        limit=target.limit,
        layers=1,
        weights=sum(p.numel() for p in head.parameters()) - head.fuse.weight.numel(),
        token_bytes=8 * width,
        executor="torch",
        name=name,
    )


def given(rows: Rows, states: torch.Tensor) -> None:
    """Let the next pass of a head's rows read these states, `(tokens, D)`."""
    executor: Any = rows.executor
    executor.given = states
