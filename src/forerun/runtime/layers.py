"""Layer-by-layer access to stock Hugging Face models: embed, run some layers, norm and unembed.

Nothing of a model is copied: its own modules are called, one by one, as its own forward calls them.
Whether that is the model is proven when it is loaded, so that no list of families is kept.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from forerun.errors import UnsupportedModelError
from forerun.runtime.attention import additive_mask, windows_of
from forerun.runtime.cache import cache_argument
from forerun.runtime.packing import dense, linear, packed
from forerun.runtime.states import decoder_layers
from forerun.runtime.support import PROBE_TOLERANCE

NORMS = ("norm", "ln_f", "final_layer_norm")  # names of the norm behind the last layer
_SECOND_NORMS = ("post_attention_layernorm", "ln_2")  # before the feed-forward part

Unembedding = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias of some tokens

_UNCALLABLE = "the layers of this {} model cannot be called one by one: {}"


class Placed(NamedTuple):
    """Where the tokens `(n, width)` of a pass stand, and what they see."""

    mask: torch.Tensor | None
    """Additive `(n, 1, width, columns)` over the columns of the cache; None hides none."""
    positions: torch.Tensor
    """`(n, width)`; as long as it is the same tensor, rotary embeddings are computed once."""
    cache: Any = None  # keys and values go there and come from there; None keeps none


class LayerAccess:
    """The layers of one model, callable one by one.

    Layers are counted as depths: depth 0 is the embedding, depth `ℓ` the hidden state after `ℓ`
    decoder layers and before the final norm. `run(hidden, a, b)` takes depth `a` to depth `b`.
    `UnsupportedModelError` if layer by layer it does not reproduce its own forward, or its modules
    are not where they are looked for.
    """

    def __init__(self, model: Any) -> None:
        kind = model.config.get_text_config(decoder=True).model_type
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{kind} models have no layer-by-layer access, which early exits need: it is for "
                "decoder-only models"
            )
        if windows_of(model.config) is not None:
            raise UnsupportedModelError(
                f"the layers of this {kind} model see a sliding window, which drafts by its own "
                "layers do not serve; use another draft"
            )
        try:
            body = model.base_model
            self._embed, self._stack = model.get_input_embeddings(), decoder_layers(model)
            self._norm = next(getattr(body, name) for name in NORMS if hasattr(body, name))
            self._table = getattr(body, "wpe", None)  # of positions; without, they are rotary
            self._rotary = body.rotary_emb if self._table is None else None
        except (AttributeError, StopIteration) as error:
            raise UnsupportedModelError(_UNCALLABLE.format(kind, error)) from error
        self._cache_argument = cache_argument(self._stack[0])
        self.model = model
        self._head = model.get_output_embeddings()
        self._turned: tuple[torch.Tensor, Any] | None = None
        self.layers: int = len(self._stack)  # decoder layers L
        self.width: int = int(self._embed.weight.shape[1])  # length H of a hidden state
        _prove(self, model, kind)

    @property
    def unembedding(self) -> torch.Tensor:
        """The model's `(V, H)` unembedding matrix."""
        return dense(self._head.weight)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Depth 0, `(n, width, H)`, of token ids at positions, `(n, width)` each."""
        hidden: torch.Tensor = self._embed(ids)
        return hidden if self._table is None else hidden + self._table(positions)

    def places(self, hidden: torch.Tensor) -> Placed:
        """Of texts `(n, width, H)` from place 0 on, all alike: mask and positions of one row."""
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        return Placed(additive_mask(positions, hidden.shape[1], None, hidden.dtype), positions)

    def open(self, ids: torch.Tensor) -> tuple[torch.Tensor, Placed]:
        """Depth 0 of one text, `(1, n)` ids, from place 0 on."""
        hidden = self.embed(ids, torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        return hidden, self.places(hidden)

    def run(self, hidden: torch.Tensor, first: int, last: int, at: Placed) -> torch.Tensor:
        """Hidden states `(n, width, H)` at depth `last` of those at depth `first`, 0 ≤ first ≤ last
        ≤ `layers`."""
        return self.call(self._stack[first:last], hidden, at)

    def call(self, layers: Iterable[Any], hidden: torch.Tensor, at: Placed) -> torch.Tensor:
        """As `run`, through layers of the model's kind that need not be its own."""
        mask, positions, cache = at
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": cache is not None,
            self._cache_argument: cache,
        }
        if self._rotary is not None:
            if self._turned is None or self._turned[0] is not positions:
                self._turned = positions, self._rotary(hidden, position_ids=positions)
            arguments["position_embeddings"] = self._turned[1]
        for layer in layers:
            hidden = layer(hidden, **arguments)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: Unembedding | None = None) -> torch.Tensor:
        """Final norm and unembedding of `(..., H)`: `(..., V)` logits, the model's own at depth
        `layers`, the logit lens at any other; of the tokens of `unembedding_of` only, with
        `rows`."""
        return self.unembed(self.norm(hidden), rows)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm of hidden states `(..., H)`: what the model's own head reads."""
        return self._norm(hidden)

    def unembed(self, hidden: torch.Tensor, rows: Unembedding | None = None) -> torch.Tensor:
        """Logits `(..., V)` of hidden states that are normed already; `rows` as in `logits`."""
        return self._head(hidden) if rows is None else linear(hidden, *rows)

    def bare(self, depth: int) -> tuple[Any, Any]:
        """Copies of what an adapter over depth `depth` < L begins as: the layer that follows there
        with its attention, the norm before it and its residual connection alone, whose keys and
        values go where layer L's would; and the final norm."""
        layer = copy.deepcopy(self._stack[depth])
        layer.mlp = _Nothing()
        for name in _SECOND_NORMS:  # of the part that is gone
            if hasattr(layer, name):
                setattr(layer, name, torch.nn.Identity())
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = self.layers
        return layer, copy.deepcopy(self._norm)

    def unembedding_of(self, tokens: torch.Tensor) -> Unembedding:
        """The unembedding of these token ids alone: weight `(n, H)`, and bias `(n,)` if any."""
        bias = self._head.bias
        weight = packed(self.unembedding[tokens].detach())
        return weight, None if bias is None else bias[tokens].detach()


class _Nothing(torch.nn.Module):
    """A part of a layer that adds nothing to its residual stream."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(())


@torch.inference_mode()
def _prove(access: LayerAccess, model: Any, kind: str) -> None:
    """Three tokens through the layers and the model: another version may call them anew."""
    ids = torch.arange(1, 4, device=model.device).unsqueeze(0)
    try:
        hidden, at = access.open(ids)
        hidden = access.run(hidden, 0, access.layers, at)
        logits, expected = access.logits(hidden), model(input_ids=ids).logits
        worst = float(((logits - expected).abs().max() / (expected.abs().max() + 1e-6)).float())
    except Exception as error:  # whatever it is, this model's layers cannot be called one by one
        raise UnsupportedModelError(_UNCALLABLE.format(kind, error)) from error
    if not worst <= (PROBE_TOLERANCE if model.dtype == torch.float32 else 0.1):
        raise UnsupportedModelError(
            f"the layers of this {kind} model, called one by one, differ from the model by "
            f"{worst:.1e} (relative)"
        )
