"""`mtp`: a layer that the target's own checkpoint brings for it drafts (MTP)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.eagle import EagleDrafter
from forerun.errors import SettingError
from forerun.runtime import gguf
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

    def check_target(self, target: str | Path) -> None:
        if gguf.locate(target):
            raise SettingError(
                f"drafter mtp runs a layer that a checkpoint brings for it, and {str(target)!r} is "
                "a GGUF file, of which none is read; use a head (eagle), memory or a draft model"
            )

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        head = MtpHead(model_on_torch(target, "mtp"))
        states = target.executor.tap([target.facts.layers])
        head.token_bytes = target.facts.token_bytes // max(target.facts.layers, 1)
        tokens = torch.arange(target.vocab_size)
        return EagleDrafter(target, states, head, tokens, target.facts.name)
