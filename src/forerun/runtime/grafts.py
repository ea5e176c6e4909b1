"""Shallow decoders on a target's encoder: its states, its embeddings and its head are theirs.

A graft is a model of the target's own classes whose decoder has few layers, so that whatever steps
the target steps the graft. What it shares, it shares by reference and never changes. A graft with
queries reads, behind the text, learned vectors in the places of tokens that are not known yet, and
says at each what may stand after it: a whole block in one pass.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ForerunWarning, ModelError, SettingError, UnsupportedModelError
from forerun.runtime.base import Rows
from forerun.runtime.fingerprints import fingerprint

ABOUT, WEIGHTS = "draft.json", "draft.safetensors"
FORMAT = "forerun draft decoder 1"


@dataclass(frozen=True)
class About:
    """What a folder of a graft says of itself."""

    kind: str
    """"shared", "block" or "kangaroo"."""
    layers: int
    """Of its decoder; of Kangaroo's, those of the target below the adapter."""
    width: int
    """Tokens it proposes in a pass: 1, or of a block more."""
    target: str
    """Fingerprint of the target it was trained for."""
    trained: dict[str, Any]
    """Steps, texts and held-out agreement."""


class Extended(torch.nn.Module):
    """A table of embeddings with learned queries behind its last id.

    Args:
        table: the target's; stays as it is.
        queries: how many.
    """

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
        """The table's."""
        return self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`(..., d)` embeddings; ids from the table's size on are queries."""
        beyond = ids >= self.size
        out = self.table(ids.clamp(max=self.size - 1))
        asked = self.queries[(ids - self.size).clamp(min=0)]
        return torch.where(beyond.unsqueeze(-1), asked, out)


def graft(target: Any, layers: int, width: int = 1) -> Any:
    """A model with `layers` decoder layers, begun as the target's own, spread over its depth.

    Args:
        target: an encoder-decoder model of Hugging Face.
        layers: ≥ 1, at most as many as the target's.
        width: tokens proposed in a pass; above 1 there are `width` - 1 queries.

    Raises:
        SettingError: layers or width out of range.
        UnsupportedModelError: the family's classes are laid out in another way.
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


def save_own(own: Mapping[str, torch.Tensor], about: About, folder: Path) -> None:
    """Write what a draft has of its own (bfloat16) and what it is."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in own.items()}
    save_file(weights, str(folder / WEIGHTS))
    os.chmod(folder / WEIGHTS, 0o644)
    text = json.dumps({"format": FORMAT, **asdict(about)}, indent=2, ensure_ascii=False)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")


def read_about(folder: str | Path, kind: str | None = None) -> About:
    """What a folder of a graft says of itself.

    Raises:
        ModelError: it is none, or cannot be read, or is not of the kind that is named.
    """
    path = Path(folder) / ABOUT
    if not path.is_file():
        raise ModelError(
            f"{str(folder)!r} holds no draft decoder: {ABOUT} is missing; "
            "forerun train-draft makes one"
        )
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if given.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of the format {FORMAT!r}")
        about = About(**given)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if kind not in (None, about.kind):
        raise ModelError(
            f"{str(folder)!r} holds a draft decoder for the drafter {about.kind!r}, not {kind!r}"
        )
    return about


def kept(target: str | Path, kind: str) -> str | None:
    """The draft decoder that comes with a target: the folder of that kind in its own, if any."""
    folder = Path(target, kind) if str(target) else None
    try:
        return str(folder) if folder is not None and (folder / ABOUT).is_file() else None
    except (OSError, ValueError):  # no name of a file
        return None


def draft_folder(target: Rows, kind: str, path: str | None) -> str:
    """The folder named, or the one that comes with the target.

    Raises:
        SettingError: neither is there.
    """
    model_of(target, kind)  # has an encoder
    folder = path or kept(target.facts.name, kind)
    if folder is None:
        raise SettingError(
            f"drafter {kind} needs a draft decoder, and none comes with this target; make one with "
            f"forerun train-draft, and name its folder: {kind}(path='FOLDER')"
        )
    return folder


def load_graft(target: Any, folder: str | Path, kind: str) -> tuple[Any, About]:
    """The graft of a folder, on its target.

    Raises:
        ModelError: it is missing, damaged, of another kind, or does not fit the target.

    Warns:
        ForerunWarning: it was trained for another target of the same sizes.
    """
    about = read_about(folder, kind)
    made = graft(target, about.layers, about.width)
    fill(own_parameters(made), about, target, folder)
    return made, about


def fill(own: Mapping[str, torch.Tensor], about: About, target: Any, folder: str | Path) -> None:
    """Read what a draft has of its own from a folder.

    Raises:
        ModelError: it is missing, damaged, or does not fit.

    Warns:
        ForerunWarning: it was trained for another target of the same sizes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(str(Path(folder) / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {str(folder)!r}: {error}") from error
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes != {name: tuple(value.shape) for name, value in own.items()}:
        raise ModelError(
            f"the draft decoder in {str(folder)!r} does not fit this target; it was trained for "
            f"another one (fingerprint {about.target})"
        )
    if fingerprint(target) != about.target:
        warnings.warn(
            f"the draft decoder in {str(folder)!r} was trained for another target (or for this one "
            "in another precision); where it agrees less, drafts are shorter",
            ForerunWarning,
            stacklevel=5,
        )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


def graft_rows(target: Rows, graft: Any) -> Rows:
    """Rows of a graft that attend to what the target's encoder read."""
    return Rows(target.executor.beside(graft))


def model_of(target: Rows, drafter: str) -> Any:
    """The target's model, which must have an encoder.

    Raises:
        SettingError: it has none.
    """
    model = target.executor.module()
    if model is None or target.facts.source_limit is None:
        raise SettingError(
            f"drafter {drafter} decodes on the states of the target's encoder, and this target "
            "has none; use a draft model or lookup"
        )
    return model
