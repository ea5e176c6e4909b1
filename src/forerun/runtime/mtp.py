"""The layer that a checkpoint brings to predict one token further (multi-token prediction), run by
transformers' own `MtpModel`."""

from __future__ import annotations

from typing import Any

import torch

from forerun.errors import ModelError, SettingError, UnsupportedModelError
from forerun.runtime.attention import additive
from forerun.runtime.cache import RowCache, cache_argument
from forerun.runtime.eagle import StateReader
from forerun.runtime.packing import dense


class MtpHead(StateReader):
    """Reads a token and the state of the one before it, normed: the target's, or its own output. Of
    several layers the first is run for every token.

    `SettingError` if the target brings none or this transformers runs none, `UnsupportedModelError`
    for one with a sliding window or a state, `ModelError` if it cannot be loaded.
    """

    first = 1

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
        self._model = _loaded(model)
        self._norm = model.get_decoder().norm
        self._layer = self._model.layers[0]
        self._cache_argument = cache_argument(self._layer)
        self.width = int(config.hidden_size)
        self.reads = int(dense(model.get_output_embeddings().weight).shape[0])
        own = sum(p.numel() for p in self._layer.parameters())
        self.weights = own + self.width * self.reads

    def fused(self, states: torch.Tensor, depths: int) -> torch.Tensor:
        """`(..., H)` of the target's last states: what its head reads, behind the final norm."""
        out: torch.Tensor = self._norm(states)
        return out

    def run(
        self,
        ids: torch.Tensor,
        states: torch.Tensor,
        places: torch.Tensor,
        seen: torch.Tensor,
        cache: RowCache,
    ) -> torch.Tensor:
        model = self._model
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
        out: torch.Tensor = self._model._project_to_logits(x)
        return out


def _loaded(model: Any) -> Any:
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
