"""`eagle3`: a published EAGLE-3 head (speculators, or its authors' layout) drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.drafters.base import Drafter, TrainedDraft
from forerun.drafters.eagle import EagleDrafter
from forerun.errors import ModelError
from forerun.runtime.base import Rows
from forerun.runtime.eagle3 import load_head
from forerun.runtime.head_file import CONFIG
from forerun.runtime.support import check_decoder_only


@dataclass(frozen=True)
class Eagle3(TrainedDraft):
    """A head of EAGLE-3, as its makers publish it, drafts token by token on the target's states.

    Args:
        path: a folder of `speculators`, or of the authors' layout, trained for this target. None:
            the folder `eagle3` in the target's own.

    Reference: Li et al. 2025 (EAGLE-3) [eagle32025], section 3; `Eagle3DraftModel` in speculators.
    """

    def check_folder(self, folder: str) -> None:
        if not Path(folder, CONFIG).expanduser().is_file():
            raise ModelError(f"{folder!r} holds no head: {CONFIG} is missing; name its folder")

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        check_decoder_only(target, self.kind)
        folder = self.folder(target.facts.name)
        states, head, tokens = load_head(folder, target)
        return EagleDrafter(target, states, head, tokens, folder)
