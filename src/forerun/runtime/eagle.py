"""One decoder layer on the hidden states of a target: what heads of this kind share, and the head
behind the drafter `eagle`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from forerun.errors import ModelError, SettingError, UnsupportedModelError
from forerun.runtime.attention import Parents, additive, hidden_columns
from forerun.runtime.base import Facts, Pieces
from forerun.runtime.cache import RowCache, cache_argument
from forerun.runtime.drafts import Tensors
from forerun.runtime.head_file import EPS, HEAD, ROTARY, WHOLE, HeadWeights, read_head
from forerun.runtime.layers import Placed
from forerun.runtime.packing import dense
from forerun.runtime.padded import PaddedExecutor, PaddedPass
from forerun.runtime.states import States

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries to keys and values, `(n, heads, tokens, width)` each, and its result."""


@dataclass(frozen=True)
class HeadForm:
    """Sizes of a head's layer."""

    width: int  # D
    inner: int  # M, of the feed-forward part
    heads: int  # of queries, and
    key_heads: int  # of keys and values, which divide them
    head_width: int = HEAD
    eps: float = EPS
    rates: tuple[float, ...] = ROTARY  # radians per place by which pairs of a head's numbers turn
    stretch: float = 1.0  # what turned queries and keys are multiplied by
    head_norms: bool = False  # whether queries and keys are normed
    norm_output: bool = False  # whether the output, which is fed back within a draft, is normed


class Norm(nn.Module):
    """`rms(x) · weight`. Torch's own warns where autocast has `x` in another type."""

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.eps) * self.weight


class StateHead(nn.Module, ABC):
    """A decoder layer that says the next token from the newest one and a state of the one before:
    queries, keys and values are of what `entered` makes of both, so many numbers per token. All are
    float32."""

    rates: torch.Tensor
    width: int  # D, of the states that it reads within a draft: its own outputs
    reads: int  # ids that it can read, from 0 on: all of the target's, or of a cut vocabulary
    token_bytes: int  # of its keys and values
    first: int = 0
    """Place of the first token that others see: 1 if none is read that has no state before it."""
    span: int = WHOLE  # tokens of a prompt that it reads, its last ones

    def __init__(self, form: HeadForm, read: int) -> None:
        super().__init__()
        width, inner = form.width, form.inner
        self.form, self.width = form, width
        self.attention_norm, self.mlp_norm, self.norm = (Norm(width, form.eps) for _ in range(3))
        norms = (Norm(form.head_width, form.eps) if form.head_norms else None for _ in range(2))
        self.query_norm, self.key_norm = norms
        pairs = form.heads + 2 * form.key_heads
        self.qkv = nn.Linear(read, pairs * form.head_width, bias=False)
        self.out = nn.Linear(form.heads * form.head_width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.register_buffer("rates", torch.tensor(form.rates), persistent=False)
        self.token_bytes = 8 * form.key_heads * form.head_width

    @property
    def weights(self) -> int:
        """Parameters that a step reads; a projection of states is not of a step."""
        parts = self.named_parameters()
        return sum(p.numel() for name, p in parts if not name.startswith("fuse"))

    @abstractmethod
    def fused(self, states: torch.Tensor, depths: int) -> torch.Tensor:
        """`(..., D)` of the target's states `(..., depths × H)`."""

    @abstractmethod
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., V)` of outputs `(..., D)`."""

    @abstractmethod
    def entered(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds to, `(n, tokens, D)`, and what it reads, `(n, tokens, read)`."""

    def filled(self, tensors: Tensors) -> Self:
        """With these tensors, where they are; for inference."""
        self.load_state_dict(tensors, assign=True)
        self.rates = torch.tensor(self.form.rates, device=tensors["norm.weight"].device)
        return self.eval().requires_grad_(False)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`(n, heads, tokens, width)` with their positions in them: halves turn each other."""
        angles = positions[:, None, :, None].float() * self.rates
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        out = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return out if self.form.stretch == 1.0 else out * self.form.stretch

    def layer(
        self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`(n, tokens, D)` outputs; as `run`, with positions `(n, tokens)` or `(1, tokens)`, which
        are in the queries and keys that `attend` is given."""
        x, read = self.entered(ids, states)
        form = self.form
        heads = self.qkv(read).unflatten(-1, (-1, form.head_width)).transpose(1, 2)
        sizes = [form.heads, form.key_heads]
        both, value = heads.split([sum(sizes), form.key_heads], 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split(sizes, 1)
            both = torch.cat([self.query_norm(query), self.key_norm(key)], 1)
        query, key = self.turned(both, positions).split(sizes, 1)
        x = x + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return self.norm(x) if form.norm_output else x

    def run(self, ids: torch.Tensor, states: torch.Tensor, at: Placed) -> torch.Tensor:
        """`(n, tokens, D)` outputs of a pass that was opened in the cache: of `(n, tokens)` ids,
        and states `(n, tokens, D)` of the token before each. The mask, `(n, 1, tokens, columns)`,
        says whether a token sees a column."""
        grouped = self.form.heads != self.form.key_heads

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = at.cache.update(key, value, 0)
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=at.mask, enable_gqa=grouped
            )

        return self.layer(ids, states, at.positions, attend)


class EagleHead(StateHead):
    """Says the next token from the newest one and the target's states of the one before it.

    `x = layer(W · [rms(embedding); rms(state)])`, where the state is `W_f · [rms(h_a); rms(h_b);
    ...]` of the token before, or within a draft the output x of the step before; logits are
    `embedding · norm(x)` over a cut vocabulary of V tokens, `vocab`. D, `width`, is a multiple of
    `HEAD`; `states` is how many numbers all depths' states of a token have.
    """

    span = HeadWeights.span

    def __init__(self, width: int, inner: int, vocab: int, states: int) -> None:
        super().__init__(HeadForm(width, inner, width // HEAD, width // HEAD), width)
        self.reads = vocab
        table = torch.empty(vocab + 1, width)
        if not table.is_meta:  # where torch takes seconds to draw nothing
            table.normal_()
        self.embedding = nn.Embedding(vocab + 1, width, _weight=table)
        """The last row stands for every token outside the vocabulary."""
        self.fuse = nn.Linear(states, width, bias=False)
        self.input = nn.Linear(2 * width, width, bias=False)

    def fused(self, states: torch.Tensor, depths: int) -> torch.Tensor:
        parts = rms(states.float().unflatten(-1, (depths, -1)))
        return self.fuse(parts.flatten(-2))

    def entered(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The projection of token and state, and its norm."""
        x = self.input(torch.cat([rms(self.embedding(ids)), rms(states)], -1))
        return x, self.attention_norm(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.embedding.weight[:-1])


def rms(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """`x` over its root mean square, of the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def load_eagle(
    folder: str | Path, width: int, model: Any, vocab_size: int
) -> tuple[EagleHead, torch.Tensor]:
    """The head in a folder, for inference, and the `(V,)` ids of the tokens that it says; as
    `load_draft`. H, `width`, is that of the target's states."""
    own = read_head(folder, width, model, vocab_size)
    with torch.device("meta"):
        made = EagleHead(own.width, own.inner, own.reads, own.states)
    where = "cpu" if model is None else model.device
    tensors = {name: torch.from_numpy(tensor).to(where) for name, tensor in own.tensors.items()}
    return made.filled(tensors), torch.from_numpy(own.tokens).to(where)


class MtpHead:
    """The layer that a checkpoint brings to predict one token further, run by transformers' own
    `MtpModel`: it reads a token and the state of the one before it, normed: the target's, or its
    own output. Of several layers the first is run for every token.

    `SettingError` if the target brings none or this transformers runs none, `UnsupportedModelError`
    for one with a sliding window or a state, `ModelError` if it cannot be loaded.
    """

    first, token_bytes, span = 1, 0, WHOLE

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        count = getattr(config, "mtp_num_hidden_layers", None)
        if count and not getattr(config, "num_mtp_layers", None):  # as Qwen's call them
            config.num_mtp_layers, config.mtp_layer_types = count, ["full_attention"] * count
        if not getattr(config, "num_mtp_layers", None):
            raise SettingError(
                f"drafter mtp is for targets that bring layers for it, and this {config.model_type}"
                " model names none (num_mtp_layers); use a head (eagle, eagle3) or memory"
            )
        kinds = set(getattr(config, "mtp_layer_types", None) or ()) - {"full_attention"}
        if kinds:
            raise UnsupportedModelError(
                f"the layer for mtp of this {config.model_type} model is of {kinds.pop()}, which "
                "is not served; use another draft"
            )
        self._model = _mtp_layers(model)
        self._norm = model.get_decoder().norm
        self._layer = self._model.layers[0]
        self._cache_argument = cache_argument(self._layer)
        self.width = int(config.hidden_size)
        self.reads = int(dense(model.get_output_embeddings().weight).shape[0])
        own = sum(p.numel() for p in self._layer.parameters())
        self.weights = own + self.width * self.reads

    def fused(self, states: torch.Tensor, depths: int) -> torch.Tensor:
        """`(..., H)` of the target's last states: what its head reads, behind the final norm."""
        return self._norm(states)

    def run(self, ids: torch.Tensor, states: torch.Tensor, at: Placed) -> torch.Tensor:
        """As of `StateHead`."""
        (seen, places, cache), model = at, self._model
        assert seen is not None
        tokens = model.embed_tokens(ids)
        turns = None if model.rotary_emb is None else model.rotary_emb(tokens, position_ids=places)
        x: torch.Tensor = self._layer(
            tokens,
            states.to(tokens.dtype),
            position_embeddings=turns,
            attention_mask=additive(~seen, tokens.dtype),
            position_ids=places,
            **{self._cache_argument: cache},
        )
        return model.shared_post_norm(x) if model.use_shared_post_norm else x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model._project_to_logits(x)


def _mtp_layers(model: Any) -> Any:
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise SettingError(
            "drafter mtp runs transformers' MtpModel, which this version lacks; update transformers"
        ) from error
    try:
        return MtpModel.from_pretrained(model).to(model.device).eval().requires_grad_(False)
    except Exception as error:  # whatever it is, this layer cannot be used
        raise ModelError(
            f"cannot load the layers for mtp of {model.config.name_or_path!r}: {error}"
        ) from error


StateReader = StateHead | MtpHead


class HeadExecutor(PaddedExecutor):
    """Runs a head by PyTorch; what it reads beside tokens is put into `given` before a pass."""

    model, dtype = None, torch.float32

    def __init__(self, head: StateReader, facts: Facts, device: torch.device | str) -> None:
        self.cache = RowCache()
        self.head, self.facts, self.device = head, facts, torch.device(device)
        self.given: list[torch.Tensor] = []
        """`(tokens, D)` states of the tokens of the next pass, of each fed row."""
        self.states = States((1,), head.width)

    def run(
        self, starts: Sequence[int], pieces: Pieces, wanted: Sequence[int], parents: Parents = ()
    ) -> torch.Tensor:
        if any(pieces):
            fed = [row for row, piece in enumerate(pieces) if piece]
            self._given = dict(zip(fed, self.given, strict=True))
        return super().run(starts, pieces, wanted, parents)

    def _forward(self, now: PaddedPass) -> torch.Tensor:
        given = [self._given[row] for row in now.rows]
        places = torch.tensor(now.starts)[:, None] + torch.arange(now.ids.shape[1])
        tree = None if now.tree is None else now.tree.cpu()
        seen = ~hidden_columns(places, now.columns, tree=tree)
        if self.head.first:  # what has no state before it is seen by itself alone
            seen &= (torch.arange(now.columns) >= self.head.first) | (places[..., None] == 0)
        places = places if tree is None else tree[0]
        at = Placed(seen[:, None].to(self.device), places.to(self.device), self.cache)
        states = torch.nn.utils.rnn.pad_sequence(given, batch_first=True).to(self.device)
        x = self.head.run(now.ids, states, at)
        self._note(now, x)
        return self.head.logits(now.pick(x))
