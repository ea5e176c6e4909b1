"""What every layer of a target would say if its own head were read there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.runtime.layers import LayerAccess


@dataclass(frozen=True)
class LayerView:
    """The likeliest token after each layer, at the last positions of a text.

    Reference: SpecBound, Figure 1.
    """

    tokens: list[list[int]]  # `[layer][position]` ids; the last layer is the model itself
    probs: list[list[float]]  # `[layer][position]` probability of each, in (0, 1]

    def share_sure(self, layer: int, threshold: float) -> tuple[float, float]:
        """Share of positions at which a layer (from 0) is sure, and how many of these are right:
        say what the last layer says; NaN if there are none."""
        pairs = zip(self.tokens[layer], self.probs[layer], self.tokens[-1], strict=True)
        right = [token == last for token, prob, last in pairs if prob >= threshold]
        share = len(right) / len(self.tokens[layer])
        return share, sum(right) / len(right) if right else float("nan")


@torch.inference_mode()
def view_layers(model: Any, text: Sequence[int], count: int) -> LayerView:
    """Read the model's own norm and unembedding after every layer (the logit lens), at the last
    `count` positions of the text, each before its token is known; `UnsupportedModelError` if layers
    cannot be run one by one."""
    access = LayerAccess(model.eval())
    ids = torch.tensor([list(text)[:-1]], device=model.device)
    hidden, mask, positions = access.open(ids)
    tokens, probs = [], []
    for layer in range(access.layers):
        hidden = access.run(hidden, layer, layer + 1, mask, positions)
        best = access.logits(hidden[0, -count:]).float().softmax(-1).max(-1)
        tokens.append(best.indices.tolist())
        probs.append(best.values.tolist())
    return LayerView(tokens, probs)
