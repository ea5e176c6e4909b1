"""Shallow decoders on a target's encoder: its states, its embeddings and its head are theirs.

A graft is a model of the target's own classes whose decoder has few layers, so that whatever steps
the target steps the graft. What it shares, it shares by reference and never changes. A graft with
queries reads, behind the text, learned vectors in the places of tokens that are not known yet, and
says at each what may stand after it: a whole block in one pass.
"""

import copy
from typing import Any

import torch

from forerun.errors import SettingError, UnsupportedModelError
from forerun.runtime.base import Rows
from forerun.runtime.drafts import fill, no_encoder, read_about


class Extended(torch.nn.Module):
    """The target's table of embeddings, which stays as it is, with learned queries behind its last
    id."""

    def __init__(self, table: Any, queries: int) -> None:
        super().__init__()
        self.table = table
        self.size = int(table.weight.shape[0])
        with torch.no_grad():
            rows = table(torch.arange(min(self.size, 64), device=table.weight.device))
            start = rows.mean(0).expand(queries, -1) + rows.std() * torch.randn(
                queries, rows.shape[-1], device=rows.device, dtype=rows.dtype
            )
        self.queries = torch.nn.Parameter(start.clone())

    @property
    def weight(self) -> Any:
        return self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`(..., d)` embeddings; ids from the table's size on are queries."""
        beyond = ids >= self.size
        out = self.table(ids.clamp(max=self.size - 1))
        asked = self.queries[(ids - self.size).clamp(min=0)]
        return torch.where(beyond.unsqueeze(-1), asked, out)


def graft(target: Any, layers: int, width: int = 1) -> Any:
    """A model with `layers` decoder layers, begun as the own of an encoder-decoder model of Hugging
    Face, spread over its depth. It proposes `width` tokens in a pass: above 1 there are `width` - 1
    queries. `SettingError` for layers or a width out of range, `UnsupportedModelError` if the
    family's classes are laid out in another way.
    """
    config = copy.deepcopy(target.config)
    count = "num_decoder_layers" if hasattr(config, "num_decoder_layers") else "decoder_layers"
    depth = getattr(config, count, 0)
    if not 1 <= layers <= depth:
        raise SettingError(f"layers must be between 1 and the target's {depth}, got {layers}")
    if width < 1:
        raise SettingError(f"width must be at least 1, got {width}")
    setattr(config, count, layers)
    try:
        with torch.device("meta"):  # all of it is given below
            made = type(target)(config)
        own, theirs = made.get_decoder(), target.get_decoder()
        _begin(own, theirs, layers, depth)
        table = theirs.embed_tokens
        own.embed_tokens = table if width == 1 else Extended(table, width - 1)
        if hasattr(theirs, "embed_positions"):
            own.embed_positions = theirs.embed_positions
        made.lm_head = target.lm_head
        if hasattr(target, "final_logits_bias"):
            made.final_logits_bias = target.final_logits_bias
        inner = made.model if hasattr(made, "model") else made
        inner.encoder, inner.shared = target.get_encoder(), table
    except (AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{config.model_type} models take no draft decoder: {error}"
        ) from error
    made.generation_config = copy.deepcopy(target.generation_config)
    for module in (own, own.embed_tokens):
        module.to(target.device, target.dtype)
    return made.eval()


def _begin(own: Any, theirs: Any, layers: int, depth: int) -> None:
    """Copy what the decoder does not share; layer i from its share of the target's depth."""
    stack = "block" if hasattr(theirs, "block") else "layers"
    source = theirs.state_dict()
    begun = {}
    for name in own.state_dict():
        parts = name.split(".")
        if parts[0] == stack:
            place = int(parts[1])
            parts[1] = str(round(place * (depth - 1) / max(layers - 1, 1)) if layers > 1 else 0)
        if (value := source.get(".".join(parts))) is not None:
            begun[name] = value.detach().clone()
    own.load_state_dict(begun, strict=False, assign=True)


def own_parameters(graft: Any) -> dict[str, torch.nn.Parameter]:
    """What is trained and saved: the decoder's, without what the target's lends it."""
    lent = ("embed_positions.", "embed_tokens.table.", "embed_tokens.weight")
    return {
        name: parameter
        for name, parameter in graft.get_decoder().named_parameters()
        if not name.startswith(lent) and "relative_attention_bias" not in name
    }


def load_graft(target: Any, folder: str, kind: str) -> tuple[Any, int]:
    """The graft of a folder on its target, and how many tokens it proposes; as `load_draft`."""
    how = read_about(folder, kind).settings
    width = int(how.get("width", 1))
    made = graft(target, int(how.get("layers", 1)), width)
    fill(own_parameters(made), folder, kind, target)
    return made, width


def model_of(target: Rows, drafter: str) -> Any:
    """The target's model, which must have an encoder (else `SettingError`)."""
    model = target.executor.module()
    if model is None or target.facts.source_limit is None:
        raise no_encoder(drafter)
    return model
