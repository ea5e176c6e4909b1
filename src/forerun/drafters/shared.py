"""A shallow decoder on the target's own encoder drafts."""

from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.drafters.base import Drafter, TrainedDraft
from forerun.drafters.model import ModelDrafter
from forerun.runtime.base import Rows
from forerun.runtime.grafts import load_graft, model_of


@dataclass(frozen=True)
class SharedDraft(TrainedDraft):
    """One or two decoder layers on the states of an encoder-decoder target's encoder.

    Args:
        path: a folder of `forerun train-draft shared`, trained for this target. None:
            the folder `shared` in the target's own, as the shipped translator has it.

    Reference: after the shared encoders of distil-Whisper (Gandhi et al. 2023) and the reduced
    decoder of CM-ASD's drafter.
    """

    summary: ClassVar[str] = "a shallow decoder on the target's encoder drafts; made by train-draft"
    paper: ClassVar[str] = "CM-ASD; Gandhi et al. 2023 (distil-Whisper)"
    bibtex: ClassVar[str] = "cmasd2025"
    kind: ClassVar[str] = "shared"

    def build(self, target: Rows, target_tokenizer: Any) -> Drafter:
        made, _ = load_graft(model_of(target, self.kind), self.folder(target), self.kind)
        return ModelDrafter(Rows(target.executor.beside(made)), target.vocab_size)
