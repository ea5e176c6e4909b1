"""The target's own layer for multi-token prediction drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from forerun.drafters.base import Drafter, DrafterSpec
from forerun.drafters.eagle import EagleDrafter
from forerun.errors import SettingError
from forerun.runtime.base import Facts, Rows
from forerun.runtime.eagle import HeadExecutor
from forerun.runtime.mtp import MtpHead


@dataclass(frozen=True)
class MTP(DrafterSpec):
    """A layer that the target's checkpoint brings for it drafts token by token; nothing to train.

    Reference: DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 2.2; `MtpModel` in
    transformers.
    """

    summary: ClassVar[str] = "a layer that the target's own checkpoint brings for it drafts (MTP)"
    paper: ClassVar[str] = "DeepSeek-AI 2024 (DeepSeek-V3)"
    bibtex: ClassVar[str] = "deepseekv32024"
    on_torch: ClassVar[bool] = True

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        """The drafter, on the target's last states.

        Raises:
            SettingError: the target brings no such layer, or does not run on torch.
            UnsupportedModelError: a layer that is not served.
            ModelError: it cannot be loaded.
        """
        model = target.executor.module()
        if model is None or target.facts.source_limit is not None:
            raise SettingError(
                "mtp is for decoder-only targets on the runtime torch, and this one runs on "
                f"{target.facts.executor or 'none'}"
            )
        head = MtpHead(model)
        states = target.executor.tap([target.facts.layers])
        facts = Facts(
            vocab_size=target.vocab_size,
            limit=target.limit,
            layers=1,
            weights=head.weights,
            token_bytes=target.facts.token_bytes // max(target.facts.layers, 1),
            executor="torch",
            name=target.facts.name,
        )
        rows = Rows(HeadExecutor(head, facts, target.device))
        return EagleDrafter(target, states, head, torch.arange(target.vocab_size), rows)
