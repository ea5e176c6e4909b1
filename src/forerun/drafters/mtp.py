"""`mtp`: a layer that the target's own checkpoint brings for it drafts (MTP)."""

from dataclasses import dataclass
from typing import Any

import torch

from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.eagle import EagleDrafter
from forerun.runtime.base import Rows
from forerun.runtime.eagle import MtpHead
from forerun.runtime.support import model_on_torch


@dataclass(frozen=True)
class MTP(DrafterSpec):
    """A layer that the target's checkpoint brings for it drafts token by token; nothing to train.

    Reference: DeepSeek-AI 2024 (DeepSeek-V3) [deepseekv32024], section 2.2; `MtpModel` in
    transformers.
    """

    on_torch = True

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        head = MtpHead(model_on_torch(target, "mtp"))
        states = target.executor.tap([target.facts.layers])
        head.token_bytes = target.facts.token_bytes // max(target.facts.layers, 1)
        tokens = torch.arange(target.vocab_size)
        return EagleDrafter(target, states, head, tokens, target.facts.name)
